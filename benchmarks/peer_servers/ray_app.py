"""Ray Serve: one replica of a cluster of its own, which is shut down when this process is told to end."""

from __future__ import annotations

import signal
import threading
from typing import Any

import ray
from ray import serve
from starlette.requests import Request

from benchmarks.peer_servers.callables import asked, max_batch_size, port, window


@serve.deployment(num_replicas=1, max_ongoing_requests=256, ray_actor_options={"num_cpus": 1})
class Model:
    def __init__(self) -> None:
        self.run = asked()

    @serve.batch(max_batch_size=max_batch_size(), batch_wait_timeout_s=window())
    async def batched(self, items: list[Any]) -> list[Any]:
        return self.run(items)

    async def __call__(self, request: Request) -> Any:
        return {"result": await self.batched(await request.json())}


if __name__ == "__main__":
    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": port()})
    serve.run(Model.bind(), route_prefix="/predict")
    end.wait()
    serve.shutdown()
    ray.shutdown()
