"""``save(result, path)`` chooses the form by the suffix; ``show(result)`` prints to a terminal.

Heavy libraries are loaded with the form that needs them: matplotlib for pictures and pages, rich to show.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import msgspec

from microbatch.curves.explanation import Explanation
from microbatch.curves.profile import Profile
from microbatch.errors import InvalidSettings
from microbatch.pipeline.timeline import Timeline
from microbatch.reporting.text import to_details, to_text
from microbatch.web.load.result import LoadReport


def save(result: object, path: str | os.PathLike[str]) -> Path:
    """Write a result as a file; nothing half-written is ever left behind.

    Args:
        result: an `Explanation` has every form; a `Profile` is explained first where its form needs that; any other
            result with ``to_json`` has .json, and .txt where it can be shown.
        path: its suffix is the form: .json (with every raw sample), .html (one page that opens offline), .png, .svg
            and .pdf (the curve, for papers), .txt, .csv (``batch_size,seconds``, a row for each sample). A `Timeline`
            has .svg, .html, .txt, .json, .trace.json (for Perfetto) and .csv (its order, which torch reads).

    Returns:
        the path.

    Raises:
        InvalidSettings: an unknown suffix, a result without that form, or a folder that cannot be written to.
    """
    target = Path(path)
    write = _form(result, target)
    _check_folder(target)
    write_whole(target, write(result))
    return target


def _form(result: object, target: Path) -> Callable[[Any], bytes]:
    """What writes the result in the form that the suffix names; some results have forms of their own."""
    if isinstance(result, Timeline):
        from microbatch.reporting.timeline_forms import timeline_form

        return timeline_form(target)
    if type(result).__name__ == "PipelineRun":  # its module loads the search for schedules
        from microbatch.reporting.pipeline_run_forms import pipeline_run_form

        return pipeline_run_form(target)
    if isinstance(result, LoadReport):
        from microbatch.reporting.load_forms import load_form

        return load_form(target)
    write = FORMS.get(target.suffix.lower())
    if write is None:
        given = f"The suffix {target.suffix!r}" if target.suffix else "A name without a suffix"
        raise InvalidSettings(f"{given} of {str(target)!r} names no form.", f"Use one of {', '.join(FORMS)}.")
    return write


def _check_folder(target: Path) -> None:
    if not target.parent.is_dir():
        raise InvalidSettings(f"The folder {str(target.parent)!r} does not exist.", "Create it first.")


def show(result: object) -> None:
    """Print a result to standard output: in colour on a terminal, plain in a pipe.

    Raises:
        InvalidSettings: the result has no form as text.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for number, line in enumerate(to_text(result).split("\n")):
        style = "bold" if number == 0 else _STYLES.get(line.split(" ")[0], "")
        console.print(Text(line, style=style))


_STYLES = {"Avoid": "yellow", "Note:": "dim"}


def write_whole(target: Path, content: bytes) -> None:
    """Write a file under another name in the same folder, then rename it: readers see the old file or the new one.

    Raises:
        InvalidSettings: the place cannot be written to.
    """
    draft = target.with_name(f".{uuid4().hex}.tmp")
    try:
        draft.write_bytes(content)
        draft.replace(target)
    except OSError as error:
        why = error.strerror or str(error)
        raise InvalidSettings(f"{str(target)!r} cannot be written: {why}.", "Choose another place.") from error
    finally:
        draft.unlink(missing_ok=True)


def pretty_json(document: object) -> bytes:
    """JSON to read: indented, but a list of numbers stays on one line; what is not finite becomes null."""
    text = msgspec.json.format(msgspec.json.encode(document), indent=1).decode()
    # A raw newline cannot occur inside a JSON string, so that only lists of plain values match.
    flat = re.sub(r'\[\n\s*([^\[\]{}"]*?)\n\s*\]', lambda match: f"[{' '.join(match[1].split())}]", text)
    return (flat + "\n").encode()


def _json(result: object) -> bytes:
    to_json: Callable[[], dict[str, Any]] | None = getattr(result, "to_json", None)
    if to_json is None:
        raise _no_form(result, ".json", "a result of microbatch, as Profile or Explanation")
    return pretty_json(to_json())


def _text(result: object) -> bytes:
    if isinstance(result, Explanation):
        return f"{to_text(result)}\n\n{to_details(result)}\n".encode()
    return f"{to_text(result)}\n".encode()


def _csv(result: object) -> bytes:
    profile = result.profile if isinstance(result, Explanation) else result
    if not isinstance(profile, Profile):
        raise _no_form(result, ".csv", "a Profile or an Explanation")
    stream = io.StringIO()
    rows = csv.writer(stream, lineterminator="\n")
    rows.writerow(("batch_size", "seconds"))
    rows.writerows((point.batch_size, repr(seconds)) for point in profile.points for seconds in point.samples)
    return stream.getvalue().encode()


def _html(result: object) -> bytes:
    explanation = _explained(result, ".html")
    from microbatch.reporting.page import to_html

    return to_html(explanation).encode()


def _picture(form: Literal["png", "svg", "pdf"]) -> Callable[[object], bytes]:
    def write(result: object) -> bytes:
        explanation = _explained(result, f".{form}")
        from microbatch.reporting.canvas import image
        from microbatch.reporting.picture import draw

        return image(draw(explanation), form)

    return write


def _explained(result: object, suffix: str) -> Explanation:
    if isinstance(result, Explanation):
        return result
    if not isinstance(result, Profile):
        raise _no_form(result, suffix, "an Explanation or a Profile")
    from microbatch.profiling.explain import explain

    return explain(result)


def _no_form(result: object, suffix: str, takers: str) -> InvalidSettings:
    return InvalidSettings(f"A {type(result).__name__} has no form {suffix}.", f"That form is for {takers}.")


FORMS: dict[str, Callable[[object], bytes]] = {
    ".json": _json,
    ".html": _html,
    ".png": _picture("png"),
    ".svg": _picture("svg"),
    ".pdf": _picture("pdf"),
    ".txt": _text,
    ".csv": _csv,
}
"""The forms by suffix."""
