"""What steps have to tell, on its way to who asked: one wake-up for each event loop and step. No torch."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from microbatch.llm.sampling import Chosen

Told = Callable[[Any], None]


@dataclass(slots=True, eq=False)
class Reply:
    """Who asked.

    Attributes:
        tell: called with each `Emission` of a stream, then with None for the end; or with an exception. Never raises.
        streams: whether it wants to know of every step; else of the end only.
        loop: where it is called; None for the thread of the engine itself.
    """

    tell: Told
    streams: bool = False
    loop: AbstractEventLoop | None = None


@dataclass(frozen=True, slots=True)
class Emission:
    """What a step added to one sequence; `text` is None where the reader makes it from the tokens."""

    index: int
    token_id: int
    chosen: Chosen | None
    text: str | None
    finish_reason: str | None
    stop_reason: str | int | None


class Deliveries:
    """What a step has to tell, handed over at its end."""

    def __init__(self) -> None:
        self._by_loop: dict[AbstractEventLoop | None, list[tuple[Told, Any]]] = {}

    def add(self, reply: Reply, message: Any) -> None:
        """One more message; those to one reply arrive in order."""
        self._by_loop.setdefault(reply.loop, []).append((reply.tell, message))

    def send(self) -> None:
        """Hand everything over."""
        by_loop, self._by_loop = self._by_loop, {}
        for loop, messages in by_loop.items():
            if loop is None:
                _tell(messages)
                continue
            try:
                loop.call_soon_threadsafe(_tell, messages)
            except RuntimeError:  # the loop has been closed: nobody waits there any more
                continue


def _tell(messages: list[tuple[Told, Any]]) -> None:
    for tell, message in messages:
        tell(message)
