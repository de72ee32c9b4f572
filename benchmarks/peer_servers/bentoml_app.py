"""BentoML. A batchable API takes and gives lists; its dispatcher adapts itself and has no window to set."""

from __future__ import annotations

from typing import Any

import bentoml

from benchmarks.peer_servers.callables import asked, max_batch_size


@bentoml.service(workers=1, traffic={"timeout": 60})
class Service:
    def __init__(self) -> None:
        self.run = asked()

    @bentoml.api(batchable=True, max_batch_size=max_batch_size(), max_latency_ms=60_000)
    def predict(self, items: list[Any]) -> list[Any]:
        return self.run(items)
