"""batched, behind FastAPI as its documentation has it. An item that is itself a list would be taken apart: a tuple."""

from __future__ import annotations

from typing import Any

import batched
from fastapi import FastAPI, Request

from benchmarks.peer_servers.callables import asked, max_batch_size, window

app = FastAPI()
run = asked()


@batched.dynamically(batch_size=max_batch_size(), timeout_ms=1e3 * window())
def predict(items: list[Any]) -> list[Any]:
    return run([list(item) if isinstance(item, tuple) else item for item in items])


@app.post("/predict")
async def endpoint(request: Request) -> dict[str, Any]:
    item = await request.json()
    return {"result": await predict.acall(tuple(item) if isinstance(item, list) else item)}
