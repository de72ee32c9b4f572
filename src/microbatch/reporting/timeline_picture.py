"""A timeline as SVG: one lane per rank on a true time axis, and under it what the rank holds.

Kinds differ in shade and shape, so that they survive a grey printer: forwards are filled, input gradients pale with an
edge, weight gradients lower and dotted, full backwards hatched. Waiting is the empty lane. Written by hand rather than
by matplotlib: thousands of boxes in tenths of a second, text kept as text, colours that follow the reader's theme.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape

import numpy as np

from microbatch.palette import PALETTES
from microbatch.pipeline.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from microbatch.pipeline.timeline import Timeline
from microbatch.reporting import timeline_wording as wording
from microbatch.units import format_bytes, format_number

LANE, MEMORY, GAP, AXIS = 26, 24, 12, 34
"""Heights: of the actions, of the staircase under them, between ranks, and of the time axis."""
LABELS = 76
"""Width of the names of the ranks."""
_DIGIT = 6.8
_FONT = 11
_WIDEST = 24_000
_HEADROOM = 1.2
"""Room above the largest peak, so that neither it nor the limit touches the lane."""
_SHADES = {FORWARD: "forward", INPUT_GRADIENT: "input", WEIGHT_GRADIENT: "weight", BACKWARD: "backward"}
_WORDS = {FORWARD: "forward", INPUT_GRADIENT: "input gradient", WEIGHT_GRADIENT: "weight gradient",
          BACKWARD: "full backward"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frame:
    """Where things stand: pixels per unit of time, and heights.

    Attributes:
        scale: pixels per second.
        width: of the time axis.
        lanes: timelines that share the axis.
        limit: the memory that is drawn at the top of a staircase.
    """

    scale: float
    width: float
    lanes: int
    limit: float

    @property
    def row(self) -> float:
        """Height of a rank."""
        return self.lanes * (LANE + MEMORY) + GAP

    def height(self, ranks: int) -> float:
        """Of all ranks and the axis."""
        return ranks * self.row + AXIS


def frame_of(timeline: Timeline, least_width: float) -> Frame:
    """At least so wide, and wider where numbers would not fit into the boxes."""
    shown = timeline.shown
    longest = max(one.makespan for one in shown) or 1.0
    needed = _DIGIT * len(str(timeline.schedule.num_micro_batches - 1)) + 5
    boxes = np.concatenate([one.end - one.start for one in shown])
    boxes = boxes[
        boxes > 0.1 * np.median(boxes)
    ]  # an action that does nothing, as the first input gradient, has no number
    typical = float(np.quantile(boxes, 0.1)) if len(boxes) else longest
    width = min(max(least_width, longest * needed / typical), _WIDEST)
    peaks = [max(one.peak_activations) for one in shown]
    return Frame(width / longest, width, len(shown), _HEADROOM * max(*peaks, timeline.memory_limit or 0.0))


def standalone(timeline: Timeline, least_width: float = 1100) -> str:
    """One SVG file with the sentence on top, for papers and pages; it follows the reader's light or dark theme."""
    frame = frame_of(timeline, least_width)
    sentence = list(_wrapped(wording.headline(timeline), frame.width + LABELS))
    top = 36 + 18 * len(sentence) + LANE + 12
    height, width = top + frame.height(timeline.schedule.ranks), LABELS + frame.width + 16
    texts = [f'<text class="title" x="8" y="22">{escape(wording.subject(timeline))}</text>']
    texts += [f'<text class="say" x="8" y="{44 + 18 * i}">{escape(line)}</text>' for i, line in enumerate(sentence)]
    parts = [
        *texts,
        f'<g transform="translate(8 {36 + 18 * len(sentence)})">{legend(timeline)}</g>',
        f'<g transform="translate(8 {top})">{labels(timeline, frame)}</g>',
        f'<g transform="translate({LABELS} {top})">{lanes(timeline, frame)}</g>',
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(wording.headline(timeline), quote=True)}">'
        f'<style>{theme_style()}</style>{patterns()}<rect class="ground" width="100%" height="100%"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def theme_style() -> str:
    """Colours of both themes as variables, and what the classes look like."""
    light, dark = (
        ";".join(f"--{name}:{colour}" for name, colour in PALETTES[theme].items()) for theme in ("light", "dark")
    )
    return f":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}{CLASSES}"


CLASSES = (
    "svg text{font:11px system-ui,'DejaVu Sans',sans-serif;fill:var(--text)}"
    "svg .title{font-size:15px;font-weight:650}svg .say{font-size:13px}svg .soft{fill:var(--muted)}"
    "svg .ground{fill:var(--background)}svg .number{text-anchor:middle;pointer-events:none;"
    "paint-order:stroke;stroke:var(--background);stroke-width:2px;stroke-opacity:.75}"
    ".lane{fill:var(--panel)}.line{stroke:var(--grid);stroke-width:1}"
    ".forward{fill:var(--forward);fill-opacity:.5;stroke:var(--forward)}"
    ".input{fill:var(--input_gradient);fill-opacity:.12;stroke:var(--input_gradient);stroke-width:1.5}"
    ".weight{fill:url(#dots);stroke:var(--weight_gradient)}"
    ".backward{fill:url(#hatch);stroke:var(--backward)}"
    ".joined{fill:none;stroke:var(--text);stroke-width:1.5}"
    ".held{fill:var(--samples);fill-opacity:.45;stroke:var(--data);stroke-width:1}"
    ".limit{stroke:var(--target);stroke-width:1.2;stroke-dasharray:5 3}.over{fill:var(--target)}"
)


def patterns() -> str:
    """Dots for weight gradients and hatching for full backwards."""
    return (
        '<defs><pattern id="dots" width="5" height="5" patternUnits="userSpaceOnUse">'
        '<rect width="5" height="5" style="fill:var(--weight_gradient);fill-opacity:.1"/>'
        '<circle cx="2.5" cy="2.5" r=".9" style="fill:var(--weight_gradient);fill-opacity:.75"/></pattern>'
        '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" style="fill:var(--backward);fill-opacity:.16"/>'
        '<rect width="1.6" height="6" style="fill:var(--backward);fill-opacity:.5"/></pattern></defs>'
    )


def kinds_of(timeline: Timeline) -> list[tuple[int | None, str]]:
    """The kinds that occur, and waiting (None), with their names."""
    return [*((kind, _WORDS[kind]) for kind in sorted(set(timeline.schedule.kind.tolist()))), (None, "waiting")]


def key(kind: int | None) -> str:
    """A box of the kind as a small picture, for a legend in HTML."""
    return f'<svg width="24" height="{LANE}" aria-hidden="true">{_key_box(kind, 0)}</svg>'


def _key_box(kind: int | None, x: float) -> str:
    if kind is None:
        return f'<rect class="lane" x="{x}" y="1" width="22" height="{LANE - 2}"/>'
    return _box(kind, x, 22, 0)


def legend(timeline: Timeline) -> str:
    """A box of each kind that occurs, and of waiting, side by side."""
    parts, x = [], 0.0
    for kind, word in kinds_of(timeline):
        parts.append(_key_box(kind, x) + f'<text x="{x + 28:.0f}" y="17">{word}</text>')
        x += 44 + 6.4 * len(word)
    return "".join(parts)


def labels(timeline: Timeline, frame: Frame) -> str:
    """The name of each rank, with its peak under it."""
    parts = []
    for rank in range(timeline.schedule.ranks):
        for number, one in enumerate(timeline.shown):
            y = rank * frame.row + number * (LANE + MEMORY)
            name = f"rank {rank}" if number == 0 else one.source
            held = one.source if one is not timeline.shown[-1] else f"holds {format_number(one.peak_activations[rank])}"
            over = timeline.memory_limit is not None and one.peak_activations[rank] > timeline.memory_limit
            parts.append(
                f'<text x="0" y="{y + 17:.1f}">{name}</text>'
                f'<text class="{"over" if over else "soft"}" x="0" y="{y + LANE + 17:.1f}">{held}</text>'
            )
    return "".join(parts)


def lanes(timeline: Timeline, frame: Frame) -> str:
    """Every rank's actions and staircase, and the axis."""
    parts: list[str] = list(_grid(timeline, frame))
    for rank in range(timeline.schedule.ranks):
        for number, one in enumerate(timeline.shown):
            y = rank * frame.row + number * (LANE + MEMORY)
            parts.append(f'<rect class="lane" x="0" y="{y:.1f}" width="{frame.width:.1f}" height="{LANE}"/>')
            parts += _actions(one, frame, rank, y)
            parts += _staircase(one, frame, rank, y + LANE)
    return "".join(parts)


def _actions(timeline: Timeline, frame: Frame, rank: int, y: float) -> Iterator[str]:
    digits = _DIGIT
    for index in timeline.schedule.of_rank(rank):
        action = timeline.schedule.action(index)
        x = float(timeline.start[index]) * frame.scale
        width = float(timeline.end[index]) * frame.scale - x
        yield f"<g>{_box(action.kind, x, width, y)}<title>{action} on rank {rank}</title>"
        text = str(action.micro_batch)
        if width >= digits * len(text) + 2:
            yield f'<text class="number" x="{x + width / 2:.1f}" y="{y + _baseline(action.kind):.1f}">{text}</text>'
        yield "</g>"
        if timeline.schedule.is_joined[index]:
            both = float(timeline.end[index + 1]) * frame.scale - x
            yield f'<rect class="joined" x="{x:.2f}" y="{y + 1:.1f}" width="{both:.2f}" height="{LANE - 2}"/>'


def _box(kind: int, x: float, width: float, y: float) -> str:
    top, height = (7, LANE - 8) if kind == WEIGHT_GRADIENT else (1, LANE - 2)
    return (
        f'<rect class="{_SHADES[kind]}" x="{x + 0.5:.2f}" y="{y + top:.1f}" '
        f'width="{max(width - 1, 0.6):.2f}" height="{height}"/>'
    )


def _baseline(kind: int) -> float:
    return 20 if kind == WEIGHT_GRADIENT else 17


def _staircase(timeline: Timeline, frame: Frame, rank: int, y: float) -> Iterator[str]:
    times, held = timeline.memory_steps(rank)
    if len(times):
        room = MEMORY - 4
        level = room / frame.limit
        path = [f"M{float(times[0]) * frame.scale:.1f} {y + room:.1f}"]
        for time, value in zip(times.tolist(), held.tolist()):
            path.append(f"H{time * frame.scale:.1f}V{y + room - value * level:.1f}")
        yield f'<path class="held" d="{"".join(path)}V{y + room:.1f}Z"/>'
    if timeline.memory_limit is not None:
        line = y + MEMORY - 4 - timeline.memory_limit * (MEMORY - 4) / frame.limit
        yield f'<line class="limit" x1="0" x2="{frame.width:.1f}" y1="{line:.1f}" y2="{line:.1f}"/>'


def _grid(timeline: Timeline, frame: Frame) -> Iterator[str]:
    bottom = timeline.schedule.ranks * frame.row
    for value in _ticks(frame.width / frame.scale, frame.width):
        x = value * frame.scale
        anchor = "start" if value == 0 else "end" if x > frame.width - 24 else "middle"
        yield f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom:.1f}"/>'
        place = f'text-anchor="{anchor}" x="{x:.1f}" y="{bottom + 14:.1f}"'
        yield f'<text class="soft" {place}>{_time(timeline, value)}</text>'


def _time(timeline: Timeline, value: float) -> str:
    return escape(wording.time(timeline, value)) if value else "0"


def _ticks(end: float, width: float) -> list[float]:
    """Round times at least 90 pixels apart."""
    least = end * 90 / width
    unit = 10.0 ** np.floor(np.log10(least)) if least > 0 else 1.0
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= least * (1 - 1e-9))
    return [float(step * index) for index in range(int(end / step * (1 + 1e-9)) + 1)]


def _wrapped(text: str, width: float) -> Iterable[str]:
    from textwrap import wrap

    return wrap(text, max(int(width / 6.9), 24))


def memory_note(timeline: Timeline) -> str:
    """What the staircases show, and against what."""
    if timeline.memory_limit is not None:
        limit = format_number(timeline.memory_limit)
        return f"Under each lane what the rank holds; the dashed line is the limit of {limit}."
    if timeline.memory_limit_bytes is not None:
        limit = format_bytes(timeline.memory_limit_bytes)
        return f"Under each lane what the rank holds; the limit is {limit} with weights."
    return "Under each lane the micro-batches that the rank holds."
