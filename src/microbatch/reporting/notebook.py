"""Registers the notebook form of results. Light to import: the page itself is made when a cell shows it."""

from __future__ import annotations

from microbatch.batch.exactness import ExactnessReport
from microbatch.curves.explanation import Explanation
from microbatch.notebook import notebook_form
from microbatch.pipeline.timeline import Timeline
from microbatch.web.load.result import LoadReport


@notebook_form.register
def _(result: Explanation) -> str:
    from microbatch.reporting.page import to_notebook

    return to_notebook(result)


@notebook_form.register
def _(result: ExactnessReport) -> str:
    from microbatch.reporting.exactness import to_notebook

    return to_notebook(result)


@notebook_form.register
def _(result: Timeline) -> str:
    from microbatch.reporting.timeline_page import to_notebook

    return to_notebook(result)


@notebook_form.register
def _(result: LoadReport) -> str:
    from microbatch.reporting.load_forms import to_notebook

    return to_notebook(result)
