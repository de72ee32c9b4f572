"""A deployment on a local Ray with two replicas: answers, errors, HTTP, and one replica killed while requests run."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import microbatch
from microbatch.errors import DeadlineExceeded, InvalidSettings, Overloaded
from tests.web import ray_functions

HERE = importlib.util.find_spec("ray") is not None
pytestmark = [
    pytest.mark.alone,
    pytest.mark.filterwarnings("ignore"),  # Ray and what it loads warn of many things
    pytest.mark.skipif(not HERE, reason="Ray is not installed: make ray-test installs and runs it"),
]
LONG = 60.0
OPTIONS: dict[str, Any] = {
    "ray_actor_options": {"num_cpus": 0.1},
    "health_check_period_s": 0.5,
    "health_check_timeout_s": 10,
}


@dataclass(frozen=True)
class Running:
    """An application that runs: its handle and its address."""

    handle: Any
    url: str

    def ask(self, item: Any, **options: Any) -> Any:
        """A request through the handle, as a response that is still to come."""
        return self.handle.submit.remote(item, **({"model": "work"} | options))

    def result(self, item: Any, **options: Any) -> Any:
        return self.ask(item, **options).result(timeout_s=LONG)

    def processes(self) -> set[int]:
        """Replicas that answer now."""
        answers = [self.ask({"value": 0, "sleep": 0.01}) for _ in range(30)]
        return {answer.result(timeout_s=LONG)[1] for answer in answers}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
        from ray import serve

        port = _free_port()
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            models: dict[str, Any] = {"work": ray_functions.work, "narrow": ray_functions.narrow}
            app = microbatch.ray_application(models, num_replicas=2, options=OPTIONS, metrics_period=0.5)
            handle = serve.run(app, name="tested")
            yield Running(handle, f"http://127.0.0.1:{port}")
        finally:
            serve.shutdown()
            ray.shutdown()


def test_answers_come_from_both_replicas_in_their_own_places(running: Running) -> None:
    answers = [running.ask({"value": number}) for number in range(100)]
    assert [answer.result(timeout_s=LONG)[0] for answer in answers] == [2 * number for number in range(100)]
    _eventually(lambda: len(running.processes()) == 2)  # Ray looks how busy they are, and begins with one
    many = running.handle.submit_many.remote([{"value": 3}, {"fail": 1, "value": 0}, {"value": 4}], model="work")
    three, failed, four = many.result(timeout_s=LONG)
    assert (three[0], four[0]) == (6, 8)
    assert isinstance(failed, ValueError)


def test_a_bad_item_fails_alone(running: Running) -> None:
    answers = [running.ask({"value": n, "sleep": 0.05} | ({"fail": 1} if n == 3 else {})) for n in range(8)]
    for number, answer in enumerate(answers):
        if number == 3:
            with pytest.raises(ValueError, match="cannot be done"):
                answer.result(timeout_s=LONG)
        else:
            assert answer.result(timeout_s=LONG)[0] == 2 * number


def test_errors_arrive_as_what_they_are(running: Running) -> None:
    with pytest.raises(DeadlineExceeded):
        running.result({"value": 1, "sleep": 1.0}, deadline=0.05)
    answers = [running.ask({"value": number}, model="narrow") for number in range(20)]
    outcomes = [_outcome(answer) for answer in answers]
    refused = [outcome for outcome in outcomes if isinstance(outcome, Overloaded)]
    assert len(refused) >= 10
    assert all(error.retry_after >= 0 for error in refused)
    assert all("of at most 1 items wait" in error.message for error in refused)
    assert [each for each in outcomes if not isinstance(each, Overloaded)] == [
        number for number, each in enumerate(outcomes) if not isinstance(each, Overloaded)
    ]
    with pytest.raises(InvalidSettings, match="no model 'other'"):
        running.result({"value": 1}, model="other")


def test_http_has_the_same_routes_and_statuses(running: Running) -> None:
    assert _http(f"{running.url}/predict/work", {"value": 21})[1]["result"][0] == 42
    assert _http(f"{running.url}/predict/work", {"value": 1, "fail": 1})[0] == 500
    assert _http(f"{running.url}/predict/other", {"value": 1})[0] == 404
    late = _http(f"{running.url}/predict/work", {"value": 1, "sleep": 1.0}, {"Microbatch-Deadline": "0.05"})
    assert late[0] == 504
    assert late[1]["error"]["type"] == "DeadlineExceeded"
    assert _http(f"{running.url}/ready")[0] == 200

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: _http(f"{running.url}/predict/narrow", {"value": 1}), range(12)))
    assert {status for status, _, _ in answers} <= {200, 429}
    refused = [headers for status, _, headers in answers if status == 429]
    assert refused
    assert all(int(headers["Retry-After"]) >= 1 for headers in refused)


def test_metrics_of_a_replica_and_those_told_to_ray(running: Running) -> None:
    running.result({"value": 1}, tenant="a")
    found = [running.handle.metrics.remote("work").result(timeout_s=LONG) for _ in range(10)]
    assert any("a" in metrics["tenants"] for metrics in found)
    assert all(metrics["ready"] and metrics["max_batch_size"] == 8 for metrics in found)
    from microbatch.web.ray_metrics import RayMetrics

    with microbatch.DynamicBatcher(list) as engine:
        engine.call(1)
        told = RayMetrics()
        told.tell({"model": engine.metrics(), "idle": None})
        engine.call(2)
        told.tell({"model": engine.metrics()})


def test_a_replica_killed_while_requests_run(running: Running, tmp_path: Path) -> None:
    """Each request has exactly one outcome: its own answer, or an error that says that its replica died.

    Requests that the replica had not taken yet are sent to the other one by Ray.
    """
    from ray.exceptions import RayActorError

    answers = [running.ask({"value": number, "sleep": 0.2, "folder": str(tmp_path)}) for number in range(150)]
    _eventually(lambda: any(tmp_path.iterdir()))
    killed = int(next(tmp_path.iterdir()).name)
    os.kill(killed, signal.SIGKILL)
    outcomes = [_outcome(answer) for answer in answers]
    for number, outcome in enumerate(outcomes):
        if isinstance(outcome, Exception):
            assert isinstance(outcome, RayActorError)
        else:
            assert outcome[0] == 2 * number
    answered = sum(not isinstance(outcome, Exception) for outcome in outcomes)
    assert 0 < answered < 150, "what ran there is lost, and the other one goes on"
    assert killed not in running.processes()
    _eventually(lambda: len(running.processes()) == 2)
    assert [running.result({"value": number})[0] for number in range(10)] == [2 * number for number in range(10)]


def test_what_waits_is_answered_before_the_end(running: Running) -> None:
    from ray import serve

    @microbatch.batched(max_batch_size=1)
    def slow(items: list[int]) -> list[int]:
        import time

        time.sleep(0.2)
        return [item + 1 for item in items]

    app = microbatch.ray_application(slow, name="slow", options=OPTIONS)  # not importable there: sent as it is
    handle = serve.run(app, name="ending", route_prefix="/ending")
    answers = [handle.submit.remote(number) for number in range(10)]
    time.sleep(0.3)
    serve.delete("ending")
    assert [answer.result(timeout_s=LONG) for answer in answers] == [number + 1 for number in range(10)]


def _outcome(answer: Any) -> Any:
    """The result, or the exception."""
    try:
        return answer.result(timeout_s=LONG)
    except Exception as error:
        return error


def _http(url: str, item: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
    body = None if item is None else json.dumps(item).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=LONG) as response:
            return response.status, json.loads(response.read()), response.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), error.headers


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.3)
