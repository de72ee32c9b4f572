"""The forms of a timeline: text, SVG, HTML, Chrome trace."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import microbatch
from microbatch.errors import InvalidSettings
from microbatch.pipeline.costs import Costs
from microbatch.pipeline.schedule import Schedule
from microbatch.pipeline.schedules import SCHEDULES
from microbatch.pipeline.simulate import simulate
from microbatch.pipeline.timeline import Timeline
from microbatch.reporting.text import to_text
from microbatch.reporting.timeline_page import to_html
from microbatch.reporting.timeline_picture import frame_of, standalone
from microbatch.reporting.timeline_trace import chrome_trace


def timeline(name: str = "zb_h1", p: int = 4, m: int = 8, limit: float | None = None) -> Timeline:
    return simulate(Schedule.of(name, ranks=p, num_micro_batches=m), memory_limit=limit)


def test_lanes_say_what_is_done() -> None:
    text = to_text(timeline("one_f_one_b"))
    lane = next(line for line in text.splitlines() if line.startswith("  rank 3"))
    assert re.search(r"·{6,}F0─*B0━+F1─*B1━", lane)
    assert "waits 27 %" in lane
    assert "holds 1," in lane
    assert "F forward   B full backward   · waiting; the number is the micro-batch" in text


def test_many_actions_are_sampled() -> None:
    lane = next(line for line in to_text(timeline(m=512)).splitlines() if line.startswith("  rank 3"))
    assert len(re.findall("[FIWB·]", lane.split("holds")[0])) >= 90


def test_the_sentence_has_bubble_bottleneck_and_alternative() -> None:
    first = to_text(timeline("gpipe")).splitlines()[0]
    assert re.fullmatch(r"Ranks wait 27 % of the step; stage \d is the bottleneck \(10 % shorter saves .*\); "
                        r"\w+( \(2 chunks\))? would take [\d.]+ % less time\.", first)  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_pictures_are_whole(name: str) -> None:
    one = timeline(name, limit=5)
    svg = ElementTree.fromstring(standalone(one))
    boxes = [box for box in svg.iter() if box.get("class") in ("forward", "input", "weight", "backward")]
    kinds = len(set(one.schedule.kind.tolist()))
    assert len(boxes) == len(one.schedule) + kinds  # and those of the legend
    numbers = [text for text in svg.iter() if text.get("class") == "number"]
    assert len(numbers) == len(one.schedule)
    assert len([line for line in svg.iter() if line.get("class") == "limit"]) == 4


def test_boxes_stand_where_their_times_say() -> None:
    one = timeline("one_f_one_b")
    frame = frame_of(one, 1100)
    svg = ElementTree.fromstring(standalone(one))
    drawn = sorted(float(box.get("x", 0)) for box in svg.iter() if box.get("class") == "backward")[1:]
    wanted = sorted(float(s) * frame.scale + 0.5 for s, k in zip(one.start, one.schedule.kind) if k == 3)
    assert drawn[-5:] == pytest.approx(wanted[-5:], abs=0.02)


def test_a_measured_timeline_shares_the_axis() -> None:
    one = timeline("one_f_one_b")
    slower = replace(one, start=one.start * 1.1, end=one.end * 1.1, source="measured")
    both = replace(one, beside=slower)
    assert frame_of(both, 1000).scale == pytest.approx(1000 / slower.makespan)
    assert standalone(both).count(">measured<") == 4
    assert ">measured<" in to_html(both)


def test_the_page_names_what_was_compared() -> None:
    page = to_html(timeline("gpipe", limit=8))
    assert "one_f_one_b" in page
    assert "What to change first" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")


def test_a_name_is_not_code(tmp_path: Path) -> None:
    path = tmp_path / "<b>&.csv"
    path.write_text(Schedule.of("gpipe", ranks=2, num_micro_batches=2).to_csv())
    one = simulate(Schedule.from_csv(path))
    assert "<b>" not in to_html(one)
    ElementTree.fromstring(standalone(one))


def test_the_trace_has_an_event_for_each_action() -> None:
    one = timeline()
    trace = chrome_trace(one)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(one.schedule)
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(one.makespan * 1e6)
    arrows = [event["ph"] for event in trace["traceEvents"] if event["ph"] in "sf"]
    assert arrows.count("s") == arrows.count("f") == int(one.schedule.crosses().sum())


def test_suffixes_choose_the_form(tmp_path: Path) -> None:
    one = timeline()
    microbatch.save(one, tmp_path / "step.trace.json")
    assert "traceEvents" in json.loads((tmp_path / "step.trace.json").read_text())
    microbatch.save(one, tmp_path / "step.json")
    assert json.loads((tmp_path / "step.json").read_text())["makespan"] == one.makespan
    microbatch.save(one, tmp_path / "step.csv")
    assert Schedule.from_csv(tmp_path / "step.csv") == one.schedule
    with pytest.raises(InvalidSettings, match=r"no form \.pdf"):
        microbatch.save(one, tmp_path / "step.pdf")
    with pytest.raises(InvalidSettings, match="does not exist"):
        microbatch.save(one, tmp_path / "nowhere" / "step.svg")


def test_a_notebook_shows_the_picture() -> None:
    assert "<svg" in (timeline()._repr_html_() or "")


def test_forms_load_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    code = (
        "import sys, microbatch as m; t = m.simulate(m.Schedule.of('zb_v', ranks=4, num_micro_batches=8));"
        f"[m.save(t, r'{tmp_path}/a' + s) for s in ('.svg', '.html', '.txt', '.trace.json')];"
        "print([n for n in ('torch', 'matplotlib') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def measured(name: str = "one_f_one_b") -> Timeline:
    """A step that took a tenth longer than its costs of a millisecond say."""
    costs = Costs(forward=1e-3, input_gradient=1e-3, weight_gradient=1e-3)
    one = simulate(timeline(name).schedule, costs)
    return replace(one, start=one.start * 1.1, end=one.end * 1.1, source="measured", beside=one)


def test_measured_stands_above_simulated_on_one_axis() -> None:
    both = measured()
    lines = [line for line in to_text(both).splitlines() if line.startswith("  rank ")]
    assert [line.split()[2] for line in lines] == ["measured", "simulated"] * 4
    ends = [max(line.rfind(mark) for mark in "━─") for line in lines[:2]]
    assert ends[1] < ends[0]
    assert len({line.index(" holds ") for line in lines}) == 1
    assert "27 % of the step (27 % simulated)" in to_text(both)
    assert "36.3 ms" in to_text(both)
    svg = standalone(both)
    assert svg.count(">measured<") == svg.count(">simulated<") == 4
    assert svg.index(">measured<") < svg.index(">simulated<")
    assert "36.3 ms" in to_html(both)


def test_what_was_measured_names_bottleneck_and_alternative() -> None:
    assert re.search(r"is the bottleneck .* would take [\d.]+ % less time", to_text(measured("gpipe")))
    assert "What to change first" in to_html(measured("gpipe"))


def test_a_measured_trace_has_processes_of_its_own() -> None:
    trace = chrome_trace(measured())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in trace if event["ph"] == "M"}
    assert [names[pid] for pid in (0, 3, 4, 7)] == [
        "rank 0 measured", "rank 3 measured", "rank 0 simulated", "rank 3 simulated",
    ]  # fmt: skip
    arrows = [event["id"] for event in trace if event["ph"] == "s"]
    assert len(arrows) == len(set(arrows))


def test_an_action_of_no_time_does_not_stretch_the_picture() -> None:
    """The first stage has no input gradient to make."""
    one = timeline("zb_h1")
    end = one.end.copy()
    nothing = (one.schedule.kind == 1) & (one.schedule.stage == 0)
    end[nothing] = one.start[nothing] + 1e-6
    assert frame_of(replace(one, end=end), 1000).width < 3000
