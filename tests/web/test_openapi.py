"""The OpenAPI document is true: what it promises is kept, and what it forbids is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from microbatch.web.application import application
from tests.web.asking import ask
from tests.web.engines import Instant
from tests.web.running import running
from tests.web.text_engines import Echoing

ENGINES: dict[str, dict[str, Any]] = {
    "anything": {"m": Instant(lambda item: item)},
    "numbers": {"m": Instant(lambda item: 2 * item, (1.0,))},
    "texts": {"m": Instant(len, ("text",))},
    "tensors": {"m": Instant(lambda item: item.sum(), (torch.zeros(3),))},
    "members": {"m": Instant(lambda item: item["a"], ({"a": torch.zeros(2), "b": [1.0]},))},
    "two": {"a": Instant(lambda item: item, (1,)), "b": Instant(len, ("text",))},
    "language": {"m": Echoing()},
    "language and texts": {"a": Echoing(), "b": Instant(len, ("text",))},
}


@pytest.mark.parametrize("name", ENGINES)
def test_the_document_is_valid_and_lists_every_route(name: str) -> None:
    app = application(ENGINES[name])
    document = ask(app, "GET", "/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    names = [f"/predict/{one}" for one, engine in ENGINES[name].items() if isinstance(engine, Instant)]
    expected = {"/health", "/ready", "/openapi.json", *names} | (
        {"/predict"} if ENGINES[name].keys() == {"m"} else set()
    )
    if name.startswith("language"):
        expected = (expected - {"/predict"}) | {"/v1/completions", "/v1/chat/completions", "/v1/models"}
    assert expected <= document["paths"].keys()
    assert ("/predict" in document["paths"]) == ("/predict" in expected)
    identities = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(identities) == len(set(identities))
    for path in document["paths"].values():
        for operation in path.values():
            assert operation["summary"]
            assert {"405"} < operation["responses"].keys()


def test_with_keys_it_says_where_they_are_needed() -> None:
    app = application(ENGINES["texts"], keys=["correct-horse"])
    document = ask(app, "GET", "/openapi.json", headers={"x-api-key": "correct-horse"}).json()
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert document["paths"]["/predict"]["post"]["security"] == [{"key": []}]
    assert "401" in document["paths"]["/predict"]["post"]["responses"]
    assert "security" not in document["paths"]["/health"]["get"]


def test_a_tester_finds_nothing(tmp_path: Path) -> None:
    """schemathesis tries what the document allows and what it forbids, on every route, against a real server."""
    pytest.importorskip("schemathesis")
    engines = {name: served["m"] for name, served in ENGINES.items() if "m" in served and name != "language"}
    with running(engines) as url:
        tried(url, tmp_path, "^/(predict|health|ready|openapi)")


def test_a_tester_finds_nothing_in_openai_s_routes(tmp_path: Path) -> None:
    """What a member may be beside another one no document can say, so that some that it allows are refused."""
    pytest.importorskip("schemathesis")
    with running(ENGINES["language"]) as url:
        tried(url, tmp_path, "^/v1/", "--exclude-checks", "positive_data_acceptance")


def tried(url: str, folder: Path, paths: str, *options: str) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--max-examples", "12"]
    done = subprocess.run(
        [*command, "--seed", "1", "--no-color", "--include-path-regex", paths, *options],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
