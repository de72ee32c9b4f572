"""Workers in processes: what crosses, what a dead one costs, and that each request still gets exactly one answer."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from microbatch.errors import DeadlineExceeded, InvalidSettings, ModelFailed, WorkerDied
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.serving.engine.carrier import Carrier
from microbatch.serving.engine.worker_process import portable
from microbatch.serving.engine.workers import InProcess, spec_of
from tests.serving import functions

pytestmark = pytest.mark.alone

LONG = 60.0


@pytest.fixture(scope="module")
def engine() -> Iterator[DynamicBatcher]:
    with_process = DynamicBatcher(functions.deadly, processes=True, max_batch_size=8).start()
    yield with_process
    with_process.close()


def ends() -> tuple[Carrier, Carrier]:
    left, right = multiprocessing.Pipe()
    return Carrier(left, os.getpid()), Carrier(right, os.getpid())


def there_and_back(*values: Any) -> list[Any]:
    left, right = ends()
    found = []
    for value in values:
        sender = threading.Thread(target=left.send, args=(value,))
        sender.start()
        found.append(right.receive())
        sender.join(LONG)
    return found


def test_values_cross_unchanged() -> None:
    values = [
        torch.arange(6).reshape(2, 3),
        torch.randn(3, dtype=torch.bfloat16),
        torch.tensor(2.5),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.randn(4, 4).t(),
        torch.tensor([1 + 2j]),
    ]
    for sent, found in zip(values, there_and_back(*values)):
        assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
        assert torch.equal(found, sent)
    mixed = {"a": [np.arange(5), "text", None], "b": (torch.ones(2), 3)}
    (found,) = there_and_back(mixed)
    assert found["a"][1:] == ["text", None]
    assert found["a"][0].tolist() == [0, 1, 2, 3, 4]
    assert found["b"][0].tolist() == [1.0, 1.0]


def test_a_block_grows_and_what_was_received_stays() -> None:
    small, large, again = there_and_back(torch.zeros(10), torch.ones(3_000_000), torch.full((10,), 2.0))
    assert small.sum() == 0
    assert large.sum() == 3_000_000
    assert again.sum() == 20
    small += 1  # what was received is the receiver's own


def test_an_answer_from_a_process(engine: DynamicBatcher) -> None:
    assert engine.call(3) == 6
    assert engine.map(range(40)) == [2 * number for number in range(40)]
    found = engine.call(torch.arange(3))
    assert found.tolist() == [0, 2, 4]
    assert engine.ready


def test_an_item_that_ends_its_process_hurts_only_itself(engine: DynamicBatcher) -> None:
    before = engine.metrics().worker_restarts
    found = asyncio.run(engine.submit_many([1, 2, "kill", 3]))
    assert [found[0], found[1], found[3]] == [2, 4, 6]
    assert isinstance(found[2], WorkerDied)
    assert engine.call(5) == 10
    assert engine.metrics().worker_restarts > before
    assert engine.ready


def test_a_process_killed_while_idle_is_started_again_without_a_request(engine: DynamicBatcher) -> None:
    assert engine.call(1) == 2
    (worker,) = workers_of(engine)
    before, end = worker.pid, time.monotonic() + LONG
    killed(worker)
    while not (engine.ready and worker.pid != before):
        assert time.monotonic() < end, "nobody started it again"
        time.sleep(0.005)
    failed = engine.metrics().failed
    assert engine.call(2) == 4
    assert engine.metrics().failed == failed, "it costs no request"


def test_what_cannot_be_sent_fails_alone(engine: DynamicBatcher) -> None:
    found = asyncio.run(engine.submit_many([1, threading.Lock(), 3]))
    assert [found[0], found[2]] == [2, 6]
    assert isinstance(found[1], TypeError)


def test_results_that_cannot_be_sent_are_an_error() -> None:
    engine = DynamicBatcher(functions.lambdas, processes=True)
    with pytest.raises((AttributeError, pickle.PicklingError, ModelFailed)):
        engine.call(1)
    engine.close()


def test_a_deadline_is_kept_while_a_process_is_busy() -> None:
    engine = DynamicBatcher(functions.slow, processes=True).start()

    async def ask() -> float:
        busy = asyncio.create_task(engine.submit(1.0))
        while not engine.metrics().running:
            await asyncio.sleep(0.002)
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await engine.submit(0.0, deadline=0.2)
        took = time.monotonic() - start
        assert not busy.done(), "answered while the process was busy"
        assert await busy == 1.0
        return took

    assert 0.2 <= asyncio.run(ask()) < 1.0
    engine.close()


def test_a_decorated_function_is_found_in_a_process() -> None:
    assert functions.decorated.call(4) == 8
    assert workers_of(functions.decorated.engine)[0].pid != os.getpid()
    functions.decorated.engine.close()


def test_a_thousand_requests_while_processes_are_killed() -> None:
    """Processes are killed at random points of the work; how many requests an error costs is chance, but no answer is
    wrong, missing or given twice."""
    engine = DynamicBatcher(functions.double, processes=True, workers=2, max_batch_size=8, max_queue=2000).start()
    draw = random.Random(0)
    points = sorted(draw.sample(range(50, 950), 5))

    async def one(number: int) -> Any:
        try:
            return await engine.submit(number)
        except WorkerDied as error:
            return error

    async def client(numbers: range) -> list[Any]:
        return [await one(number) for number in numbers]

    async def kill() -> None:
        for point in points:
            while (metrics := engine.metrics()).answered + metrics.failed < point:
                await asyncio.sleep(0.001)
            killed(draw.choice(workers_of(engine)))

    async def ask() -> list[list[Any]]:
        clients = [client(range(start, 1000, 20)) for start in range(20)]
        return (await asyncio.gather(*clients, kill()))[:-1]  # type: ignore[return-value]

    answers = asyncio.run(ask())
    for start, found in enumerate(answers):
        expected = [2 * number for number in range(start, 1000, 20)]
        assert len(found) == len(expected)
        assert all(got == right or isinstance(got, WorkerDied) for got, right in zip(found, expected))
    metrics = engine.metrics()
    assert metrics.answered + metrics.failed == metrics.accepted == 1000
    assert (metrics.waiting, metrics.running) == (0, 0)
    engine.close()


def killed(worker: InProcess) -> None:
    if worker.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)


def test_a_function_that_cannot_be_found_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="by name"):
        spec_of(lambda items: items)


def test_a_process_that_cannot_start_tells_why() -> None:
    worker = InProcess(spec_of(functions.double).__class__("tests.serving.functions", "not_there"))
    with pytest.raises(AttributeError, match="not_there"):
        worker.start()
    worker.stop()


def test_errors_are_made_portable() -> None:
    class Local(Exception):
        pass

    kept, told = portable(ValueError("x")), portable(Local("y"))
    assert isinstance(kept, ValueError)
    assert "In the worker process" in kept.__notes__[0]
    assert isinstance(told, ModelFailed)
    assert str(told) == "Local: y"


def workers_of(engine: DynamicBatcher) -> list[InProcess]:
    service = engine._service
    assert service is not None
    return [worker for worker in service.prepared.workers if isinstance(worker, InProcess)]
