"""What a step may hold so that targets are met, learnt from the steps themselves. No torch, no clock.

A step model is fitted to measured steps and fitted again as they go on; between two fits a pace follows the machine,
since a slower machine is slower at every size. The time a step may take is the target less what steps wander. Without a
target a step is as large as pays: larger ones would bring little and make streams wait.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from statistics import median

from microbatch.errors import InvalidSettings
from microbatch.llm.step_model import ENOUGH, StepModel, StepSample, fit
from microbatch.units import format_seconds

FIRST_TOKENS = 256
"""Tokens of a step before anything is known, without a target."""
MOST_TOKENS = 8192
"""And at most, where the user sets no bound."""
MOST_SEQUENCES = 256
PAYS = 0.95
"""Without a target, the smallest step with so much of the best throughput."""
KEPT = 6
"""Samples of each kind of step that a fit sees."""
REFIT = 64
"""Steps between two fits; the first ones come sooner."""
RECENT = 12
"""Steps whose median is the pace."""
SPREAD = 128
"""Steps from which it is known how much they wander."""
MOST_MARGIN = 1.5
GUARD = 1.02
"""What the fit itself is off by."""
SLOW = 1.5
"""A step so many times slower than expected is slow, whatever the target."""
GROWTH_SHARE = 0.85
"""Generation alone may take so much of a step's time: caches grow, and prompts need some."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a step may hold.

    Attributes:
        max_tokens: in a step.
        max_sequences: that run at once.
        reason: why, in words.
        seconds: a step with generation may take; None without a target.
    """

    max_tokens: int
    max_sequences: int
    reason: str = ""
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The two numbers that a user of a serving engine has to set, for a target.

    Attributes:
        max_sequences: that may generate at once.
        max_tokens: of a step in which they all generate, prompts included.
        limited_by: "target", "memory", or "throughput" where larger steps would bring little.
        seconds: of a step in which they only generate.
        reason: in words.
    """

    max_sequences: int
    max_tokens: int
    limited_by: str
    seconds: float
    reason: str


def limits(
    model: StepModel, target: float | None, context: int, memory_tokens: int, *, most: int = MOST_SEQUENCES
) -> Limits:
    """How many sequences and how many tokens per step.

    Args:
        model: of a step.
        target: seconds of a step, which is the time per output token; None for the best throughput.
        context: tokens that a sequence has in the cache, as a rule.
        memory_tokens: that the cache holds.
        most: sequences at most.

    Raises:
        InvalidSettings: not even one sequence is within the target, or fits.
    """
    fits = min(most, memory_tokens // max(1, context))
    if fits < 1:
        raise InvalidSettings(
            f"A sequence of {context} tokens does not fit into a cache of {memory_tokens}.",
            "Give the cache more memory.",
        )
    alone = model.seconds(1, context, 1)
    if target is not None and alone > target:
        raise InvalidSettings(
            f"One sequence alone takes {format_seconds(alone)} a token, and the target is {format_seconds(target)}.",
            f"Set a target above {format_seconds(alone)}.",
        )
    sequences = _most_sequences(model, target, context, fits)
    seconds = model.seconds(sequences, sequences * context, sequences)
    tokens = max(sequences, tokens_for(model, target, sequences * context, sequences, MOST_TOKENS))
    by = "memory" if sequences == fits else "target" if target is not None else "throughput"
    return Limits(sequences, tokens, by, seconds, _limits_words(by, sequences, tokens, seconds, context))


def _limits_words(by: str, sequences: int, tokens: int, seconds: float, context: int) -> str:
    why = {
        "memory": "more do not fit into the cache",
        "target": "more would take longer than the target leaves beside prompts",
        "throughput": "more bring little",
    }[by]
    return (
        f"{sequences} sequences of {context} tokens take {format_seconds(seconds)} for a token each, and {why}; "
        f"{tokens} tokens in a step, prompts included"
    )


def _most_sequences(model: StepModel, target: float | None, context: int, most: int) -> int:
    """The most within their share of the target; without one, the fewest with `PAYS` of the best throughput."""
    seconds = {count: model.seconds(count, count * context, count) for count in range(1, most + 1)}
    if target is not None:
        return max([count for count, each in seconds.items() if each <= GROWTH_SHARE * target], default=1)
    best = max(count / each for count, each in seconds.items())
    return min(count for count, each in seconds.items() if count / each >= PAYS * best)


def tokens_for(model: StepModel, seconds: float | None, cached: int, sequences: int, most: int) -> int:
    """Tokens of a step: as many as its time allows; without one, the fewest with `PAYS` of the best throughput."""
    if seconds is not None:
        return min(most, model.tokens_within(seconds, cached, sequences))
    sizes = sorted({*[1 << power for power in range(most.bit_length())], *model.sizes})
    known = [size for size in sizes if size <= min(most, model.sizes[-1])] or [most]
    rates = {size: size / max(model.seconds(size, 0, 1), 1e-9) for size in known}  # a fit may say 0
    return min(size for size, rate in rates.items() if rate >= PAYS * max(rates.values()))


class BudgetFollower:
    """Follows the machine.

    Attributes:
        budget: what a step may hold now.
        model: seconds of a step as the machine is now; None before enough was measured.
    """

    def __init__(
        self,
        *,
        time_per_output_token_target: float | None = None,
        time_to_first_token_target: float | None = None,
        max_tokens: int | None = None,
        max_sequences: int | None = None,
        model: StepModel | None = None,
    ) -> None:
        """
        Args:
            time_per_output_token_target: seconds; no step that generates shall take longer.
            time_to_first_token_target: seconds; who comes waits for the step under way and then for its own, so that
                no step takes longer than half of it.
            max_tokens, max_sequences: bounds of the user's or of memory.
            model: measured before.

        Raises:
            InvalidSettings: a target or bound that is not above zero.
        """
        given = {
            "time_per_output_token_target": time_per_output_token_target,
            "time_to_first_token_target": time_to_first_token_target,
            "max_tokens": max_tokens,
            "max_sequences": max_sequences,
        }
        for name, value in given.items():
            if value is not None and not value > 0:
                raise InvalidSettings(f"{name} is {value}.", "Give a number above zero.")
        halved = None if time_to_first_token_target is None else time_to_first_token_target / 2
        self._target = min([each for each in (time_per_output_token_target, halved) if each is not None], default=None)
        self._most_tokens = max_tokens or MOST_TOKENS
        self._most_sequences = min(max_sequences or MOST_SEQUENCES, self._most_tokens)  # each takes a token in a step
        self._fitted = self.model = model
        self._samples: dict[tuple[int, ...], deque[StepSample]] = {}
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._spread: deque[float] = deque(maxlen=SPREAD)
        self._context: deque[float] = deque(maxlen=SPREAD)
        self._steps, self._next_fit, self._pace = 0, ENOUGH, 1.0
        self._largest: StepSample | None = None
        self.budget = self._decide()

    def observe(self, sample: StepSample) -> str | None:
        """A step took so long. Why, where it was a slow one."""
        expected = None if self.model is None else self.model.seconds(
            sample.tokens, sample.cached, sample.sequences, sample.pairs
        )  # fmt: skip
        self._keep(sample)
        if expected:
            ratio = sample.seconds / expected
            self._recent.append(ratio)
            self._spread.append(ratio)
        self._steps += 1
        if self._steps >= self._next_fit:
            self._refit()
        elif self._steps % RECENT == 0:
            self._follow()
        if self.model is None or self._steps % RECENT == 0:
            self.budget = self._decide()
        return self._why_slow(sample, expected)

    def _keep(self, sample: StepSample) -> None:
        """At the machine's first pace, so that steps before and after it has changed tell of one model."""
        kind = (sample.tokens.bit_length(), sample.cached.bit_length(), sample.pairs.bit_length())
        self._samples.setdefault(kind, deque(maxlen=KEPT)).append(replace(sample, seconds=sample.seconds / self._pace))
        self._context.append(sample.cached / max(1, sample.sequences))
        if self._largest is None or sample.tokens > self._largest.tokens:
            self._largest = sample

    def _refit(self) -> None:
        samples = [sample for kind in self._samples.values() for sample in kind]
        self._next_fit = self._steps + min(REFIT, max(ENOUGH, self._steps))
        if len(samples) < ENOUGH:
            return
        self._fitted = fit(samples)
        self.model = self._fitted.scaled(self._pace)
        self._recent.clear()
        self.budget = self._decide()

    def _follow(self) -> None:
        """The machine has become slower or faster: all of the model with it."""
        if self._fitted is not None and len(self._recent) == RECENT:
            change = median(self._recent)
            if abs(change - 1) > 0.02:
                self._pace *= change
                self.model = self._fitted.scaled(self._pace)
                self._recent.clear()

    def _decide(self) -> Budget:
        if self.model is None:
            return self._cautious()
        aim = None if self._target is None else self._target / self._margin()
        context = int(sum(self._context) / len(self._context)) if self._context else 0
        sequences = self._most_sequences
        if aim is not None:
            sequences = _most_sequences(self.model, aim, context, sequences)
        tokens = tokens_for(self.model, aim, sequences * context, sequences, self._most_tokens)
        tokens = min(self._most_tokens, max(tokens, sequences + 16))
        return Budget(tokens, sequences, self._words(aim), aim)

    def _margin(self) -> float:
        """How many times longer than expected all but one step in a hundred take."""
        if len(self._spread) < ENOUGH:
            return 1.1
        ordered = sorted(self._spread)
        return min(MOST_MARGIN, max(1.0, ordered[-1 - len(ordered) // 100]) * GUARD)

    def _words(self, aim: float | None) -> str:
        if aim is None or self._target is None:
            return f"the smallest step with {PAYS:.0%} of the best throughput measured"
        return f"steps of {format_seconds(aim)}, for they shall take {format_seconds(self._target)} at most and wander"

    def _cautious(self) -> Budget:
        """Twice the tokens take at most twice as long: a step may grow from the largest one seen."""
        tokens = FIRST_TOKENS
        if self._target is not None:
            seen = self._largest
            tokens = (
                16 if seen is None else max(1, min(2 * seen.tokens, int(seen.tokens * self._target / seen.seconds)))
            )
        tokens = min(self._most_tokens, max(tokens, 16))
        return Budget(tokens, self._most_sequences, "nothing has been measured yet")

    def _why_slow(self, sample: StepSample, expected: float | None) -> str | None:
        target = self._target
        slower = sample.seconds / expected if expected else None
        missed = target is not None and sample.seconds > target
        if not missed and (slower is None or slower < SLOW):
            return None
        took = format_seconds(sample.seconds)
        if slower is not None and slower >= SLOW:
            return f"{took}: the machine was busy: {slower:.1f} times what the model says; or choosing tokens took long"
        prefill = sample.prefill if sample.prefill is not None else sample.tokens - sample.sequences
        if prefill > sample.sequences:
            return f"{took}: prefill of {prefill} tokens"
        return f"{took}: {sample.sequences} sequences, {sample.cached} cached tokens"
