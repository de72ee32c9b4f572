"""Whose request it is, over HTTP: by the key, else by a header that only a gateway should set."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from microbatch.errors import InvalidRequest
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.web.tenants import LONGEST, tenant_of
from tests.serving.functions import double
from tests.web.running import running


@pytest.mark.parametrize(
    ("key_name", "header", "expected"),
    [
        ("", b"", ""),
        ("", b"blue", "blue"),
        ("red", b"", "red"),
        ("red", b"blue", "red"),
        ("", b"x" * LONGEST, "x" * LONGEST),
        ("red", b"\xff", "red"),
    ],
)
def test_a_key_says_more_than_a_header(key_name: str, header: bytes, expected: str) -> None:
    assert tenant_of(key_name, header) == expected


@pytest.mark.parametrize("header", [b"x" * (LONGEST + 1), b"\xe9", b"a\tb"])
def test_a_header_that_is_no_name_is_refused(header: bytes) -> None:
    with pytest.raises(InvalidRequest, match="X-Tenant"):
        tenant_of("", header)


def ask(url: str, **headers: str) -> int:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(
        f"{url}/predict", json.dumps(4).encode(), {"Content-Type": "application/json", **names}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def seen(engine: DynamicBatcher) -> dict[str, Any]:
    return {name: tenant.answered for name, tenant in engine.metrics().tenants.items()}


def test_the_tenant_reaches_the_engine_and_its_metrics() -> None:
    engine = DynamicBatcher(double)
    keys = {"key-of-red-1": "red", "key-of-nobody": ""}
    with running(engine, keys=keys) as url:
        assert ask(url, X_API_Key="key-of-red-1", X_Tenant="blue") == 200
        assert ask(url, X_API_Key="key-of-nobody", X_Tenant="blue") == 200
        assert ask(url, X_API_Key="key-of-nobody") == 200
        assert ask(url, X_API_Key="key-of-nobody", X_Tenant="x" * 200) == 400
        assert ask(url, X_Tenant="blue") == 401
        assert seen(engine) == {"red": 1, "blue": 1}
        request = urllib.request.Request(f"{url}/metrics", headers={"X-API-Key": "key-of-nobody"})
        with urllib.request.urlopen(request, timeout=30) as response:
            page = response.read().decode()
    assert 'microbatch_tenant_items_total{model="model",outcome="answered",tenant="red"} 1.0' in page.replace(
        'tenant="red",outcome="answered"', 'outcome="answered",tenant="red"'
    )


def test_without_keys_the_header_is_believed() -> None:
    engine = DynamicBatcher(double)
    with running(engine) as url:
        assert ask(url, X_Tenant="blue") == ask(url) == 200
        assert seen(engine) == {"blue": 1}
