"""A client that goes ends the work for it; watching costs no task where the connection tells by itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from microbatch.web.watch import GONE, GRACE, Watch


class Asked:
    """A request whose body has come and whose client goes when it is told to."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self.scope, self.unread = scope, False
        self.application = SimpleNamespace(body_timeout=9.0)
        self.leaves = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}


@pytest.mark.parametrize("tells", [True, False])
def test_work_for_a_client_that_goes_is_cancelled(tells: bool) -> None:
    to_call: list[Any] = []

    async def run() -> tuple[bool, int]:
        asked = Asked({"extensions": {GONE: to_call}} if tells else {})
        watch = Watch(asked)  # type: ignore[arg-type]

        async def work() -> None:
            with watch:
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await asyncio.sleep(5 * GRACE)
        tasks = len(asyncio.all_tasks())
        asked.leaves.set()
        for call in to_call:
            call()
        with pytest.raises(asyncio.CancelledError):
            await task
        return watch.gone, tasks

    gone, tasks = asyncio.run(run())
    assert gone and tasks == (2 if tells else 3), "this one, the work, and where nobody tells a task that waits for it"
    assert to_call == [], "an answered request is not told any more"


def test_work_that_ends_by_itself_is_left_alone() -> None:
    async def run() -> None:
        to_call: list[Any] = []
        with Watch(Asked({"extensions": {GONE: to_call}})) as watch:  # type: ignore[arg-type]
            assert len(to_call) == 1
            await asyncio.sleep(2 * GRACE)
        assert not watch.gone and to_call == []
        await asyncio.sleep(GRACE)

    asyncio.run(run())
