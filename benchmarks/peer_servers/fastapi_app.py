"""Plain FastAPI, no batching: `async def`, which runs the model in the event loop, or `def`, which takes a thread."""

from __future__ import annotations

import os
from typing import Annotated, Any

from fastapi import Body, FastAPI

from benchmarks.peer_servers.callables import asked

app = FastAPI()
run = asked()
Item = Annotated[Any, Body()]


async def in_the_loop(item: Item) -> dict[str, Any]:
    return {"result": run([item])[0]}


def in_a_thread(item: Item) -> dict[str, Any]:
    return {"result": run([item])[0]}


app.post("/predict")(in_a_thread if os.environ["PEER_WAY"] == "def" else in_the_loop)
