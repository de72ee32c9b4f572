"""What the web front asks of an engine that generates text; `microbatch.LLMEngine` is one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from microbatch.web.engine import Engine

if TYPE_CHECKING:
    from microbatch.llm.results import Generation, Piece
    from microbatch.llm.sampling_params import SamplingParams


class Tokens(Protocol):
    """The tokenizer of an engine; any thread may ask it."""

    def text_of(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids."""
        ...

    def token_text(self, token_id: int) -> str:
        """The text of one of them."""
        ...


class Limits(Protocol):
    """What an engine keeps to."""

    @property
    def vocab_size(self) -> int:
        """Token ids of the model are below it."""
        ...

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer, at most."""
        ...


class TextEngine(Protocol):
    """Generates text, token by token, for many requests at once."""

    @property
    def tokenizer(self) -> Tokens:
        """Between text and tokens."""
        ...

    @property
    def limits(self) -> Limits:
        """What it keeps to."""
        ...

    @property
    def ready(self) -> bool:
        """Whether requests are welcome."""
        ...

    def start(self) -> Any:
        """Be ready for requests; may take long. A second call does nothing."""
        ...

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        deadline: float | None = None,
        priority: int = 0,
        tenant: str = "",
    ) -> Generation:
        """All of the answers to a prompt."""
        ...

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        deadline: float | None = None,
        priority: int = 0,
        tenant: str = "",
    ) -> AsyncIterator[Piece]:
        """The same as it comes; who leaves early aborts it."""
        ...

    @property
    def chat(self) -> Callable[..., list[int]]:
        """``chat(messages, **arguments)``: a conversation as a prompt, by the model's template; from any thread."""
        ...

    def metrics(self) -> Any:
        """A `microbatch.llm.metrics.LLMMetrics`."""
        ...

    async def drain(self, timeout: float | None = None) -> None:
        """Take no more requests, answer those that wait, and stop."""
        ...


AnyEngine = Engine | TextEngine


def generates_text(engine: Any) -> TypeGuard[TextEngine]:
    """Whether an engine is one of these."""
    return hasattr(engine, "stream")


def text_engines(engines: Mapping[str, Any]) -> dict[str, TextEngine]:
    """Those among some engines that generate text, by name."""
    return {name: engine for name, engine in engines.items() if generates_text(engine)}
