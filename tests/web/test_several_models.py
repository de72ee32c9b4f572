"""Several models behind one server: each with its own queue and numbers, all on one CPU in turn."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.web.application import application
from tests.serving.engines import Held
from tests.serving.functions import double
from tests.serving.test_gate import Overlap
from tests.web.running import running


def post(url: str, item: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(item).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        return str(response.read().decode())


@contextmanager
def held_and_free(**options: Any) -> Iterator[tuple[Held, Mapping[str, DynamicBatcher], str]]:
    """Two models, one of which waits until it is let go."""
    held = Held()
    engines = {"held": DynamicBatcher(held, max_batch_size=1), "free": DynamicBatcher(double)}
    with running(engines, **options) as url:
        try:
            yield held, engines, url
        finally:
            held.let_go()


def test_models_have_their_own_paths_numbers_and_readiness() -> None:
    engines = {"two": DynamicBatcher(double), "text": DynamicBatcher(lambda items: [item.upper() for item in items])}
    with running(engines) as url:
        assert post(f"{url}/predict/two", 4) == {"result": 8}
        assert post(f"{url}/predict/text", "a") == post(f"{url}/predict/text", "A") == {"result": "A"}
        assert json.loads(get(f"{url}/ready"))["engines"] == {"two": True, "text": True}
        page = get(f"{url}/metrics")
    assert 'microbatch_items_accepted_total{model="two"} 1.0' in page
    assert 'microbatch_items_accepted_total{model="text"} 2.0' in page


def test_models_on_one_cpu_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microbatch.serving.engine.gate.batches_at_once", lambda: 1)
    overlap = Overlap()
    engines = {name: DynamicBatcher(overlap.function(), max_batch_size=4) for name in ("a", "b", "c")}
    with running(engines) as url, ThreadPoolExecutor(9) as pool:
        asked = [(name, number) for number in range(10) for name in engines]
        results = list(pool.map(lambda each: post(f"{url}/predict/{each[0]}", each[1]), asked))
    assert results == [{"result": 2 * number} for _, number in asked]
    assert overlap.most == 1


@pytest.mark.parametrize("share_cpu", [True, False])
def test_a_model_that_is_busy_holds_up_only_those_that_share(share_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microbatch.serving.engine.gate.batches_at_once", lambda: 1)
    with held_and_free(share_cpu=share_cpu) as (held, engines, url), ThreadPoolExecutor(2) as pool:
        busy = pool.submit(post, f"{url}/predict/held", 1)
        asyncio.run(held.busy())
        free = pool.submit(post, f"{url}/predict/free", 2)
        if share_cpu:
            with pytest.raises(TimeoutError):
                free.result(0.3)
            assert engines["free"].metrics().waiting == 1
        else:
            assert free.result(60) == {"result": 4}
            assert not busy.done()
        held.let_go()
        assert free.result(60) == {"result": 4}
        assert busy.result(60) == {"result": 2}


def test_one_model_has_nobody_to_wait_for() -> None:
    engine = DynamicBatcher(double)
    application({"model": engine})
    assert engine._gate is None
