"""The table of layers of a prediction: work and time of each. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from microbatch.curves.profile import Layer
from microbatch.profiling.predict_clock import Clock
from microbatch.work.operators import Operator


def predict_layers(clock: Clock, sizes: Sequence[int]) -> tuple[Layer, ...]:
    """One row per layer that has operators; repeated layers stand in one row with their number."""
    rows: defaultdict[str, list[int]] = defaultdict(list)
    for index, operator in enumerate(clock.work.operators):
        rows[operator.layer or operator.name].append(index)
    return tuple(_layer(name, indices, clock, sizes) for name, indices in rows.items())


def _layer(name: str, indices: list[int], clock: Clock, sizes: Sequence[int]) -> Layer:
    operators = [clock.work.operators[index] for index in indices]
    last, sequence = sizes[-1], clock.sequence
    main = max(operators, key=lambda o: o.flops(last, sequence))
    return Layer(
        name=name,
        kind=main.kind,
        parameter_bytes=round(sum(o.repeat * o.weight_bytes(0) for o in operators if not o.backward)),
        flops_per_item=_total(operators, "flops", last, sequence) / last,
        activation_bytes_per_item=sum(_total(operators, p, last, sequence) for p in ("read_bytes", "written_bytes"))
        / last,
        seconds=tuple(
            sum(clock.work.operators[index].repeat * clock.call(size).operators[index].seconds for index in indices)
            for size in sizes
        ),
        repeat=max(o.repeat for o in operators),
    )


def _total(operators: Sequence[Operator], part: str, batch: float, sequence: float) -> float:
    return float(sum(o.repeat * getattr(o, part)(batch, sequence) for o in operators))
