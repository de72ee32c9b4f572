"""The forms of a pipeline's run: its own JSON, the costs of its stages as CSV, and those of its timeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from microbatch.pipeline.costs_file import costs_csv
from microbatch.pipeline.run_report import PipelineRun


def pipeline_run_form(path: Path) -> Callable[[PipelineRun], bytes]:
    """What writes the form that a file's name asks for.

    Raises:
        InvalidSettings: no suffix of a form.
    """
    from microbatch.reporting.timeline_forms import timeline_form

    name = path.name.lower()
    if name.endswith(".json") and not name.endswith(".trace.json"):
        return _json
    if name.endswith(".csv"):
        return _csv
    if name.endswith(".txt"):
        return _text
    of_timeline = timeline_form(path)
    return lambda run: of_timeline(run.timeline)


def _json(run: PipelineRun) -> bytes:
    from microbatch.reporting.save import pretty_json

    return pretty_json(run.to_json())


def _csv(run: PipelineRun) -> bytes:
    return costs_csv(run.timeline.costs, run.timeline.schedule.stages).encode()


def _text(run: PipelineRun) -> bytes:
    from microbatch.reporting.pipeline_run_text import lines

    return ("\n".join(lines(run)) + "\n").encode()
