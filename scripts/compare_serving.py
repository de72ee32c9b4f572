"""Writes docs/compare-serving.md from what benchmarks/serving_peers.py measured; run as scripts.compare_serving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "serving_peers.json"
PAGE = ROOT / "docs" / "compare-serving.md"

Row = dict[str, Any]
MODELS = {
    "mlp": "an fp32 MLP of depth 8 and width 1024, 64 numbers in and 10 out",
    "minilm": "all-MiniLM-L6-v2, texts of mixed length in and vectors of 384 numbers out",
}
TABLES = {
    "same callable": "Same callable, one thread",
    "as installed": "As installed",
}
ABOUT = {
    "same callable": "Every server runs the same Python function, from a list of items to a list of results.",
    "as installed": "Ours is given the model itself, as a user would, with its fast path; the others are as above.",
}

HEAD = """# Serving beside other servers

Made by `python -m scripts.compare_serving` from `benchmarks/results/serving_peers.json`, which
`benchmarks/serving_peers.py` measures in one run; how every server is set up is in `benchmarks/peer_servers/`. The
server has one core and the client another: wrk for closed loops, and for open ones Poisson arrivals from
`microbatch load`, whose latency counts from the moment a request was due. {rounds} rounds of {seconds} s for each load,
twice that for MiniLM, all servers in turn; medians over the rounds, and ratios within rounds. The settings of every
other server were tried first, {tuning} s for each load and twice that; the best for each load is what is measured and
shown. A row whose client was more than 90 % busy is void. Texts: {texts}.

Versions: {versions}. {platform}; load average {low:.1f} to {high:.1f}, at most {stolen:.1%} of the time of its
processors taken by other machines.
"""

NOTES = """
## What to read off, and what is not here

- Plain FastAPI does not batch. infinity serves MiniLM only, and runs it through its own code.
- BentoML adapts its waiting itself and has no window to set; 8 and 32 are its largest batches.
- Requests are JSON for all, each in the form that the server asks for; every server's answers are checked against the
  callable's before it is measured.
- nvidia-pytriton does not load beside this Python; text-embeddings-inference, TorchServe and TF Serving are not in the
  package indexes.
"""


def page(results: Row) -> str:
    """The page of these results."""
    parts = [_head(results)]
    for model, tables in results["tables"].items():
        for table, found in tables.items():
            parts += [
                f"\n## {_upper(MODELS[model])}: {TABLES[table].lower()}\n\n{ABOUT[table]}\n\n",
                _table(results, found),
            ]
            parts.append("\n" + _verdicts(found["against"]))
    parts += [_idle(results["idle"]), _lengths(results.get("lengths")), _tuning(results["settings"])]
    return "".join([*parts, _not_started(results["failed_to_start"]), NOTES])


def _head(results: Row) -> str:
    noise = results["noise"]
    named = [f"{name} {version}" for each in results["versions"].values() if isinstance(each, dict)
             for name, version in each.items()]  # fmt: skip
    spans = {"seconds": results["seconds"]["round"], "tuning": results["seconds"]["tuning"]}
    return HEAD.format(
        rounds=results["rounds"], **{name: f"{seconds:g}" for name, seconds in spans.items()},
        texts=results["texts"], versions=", ".join(dict.fromkeys(named)), platform=results["machine"]["platform"],
        low=noise["load_average"][0], high=noise["load_average"][1], stolen=noise["largest_stolen"],
    )  # fmt: skip


def _table(results: Row, found: Row) -> str:
    loads = results["loads"]
    rows = [
        [name, *(_cell(cells.get(load), "client" in load) for load in loads)] for name, cells in found["cells"].items()
    ]
    head = ["", *(f"{load} ({'answers/s' if 'client' in load else 'p50 / p99, ms'})" for load in loads)]
    return _rows(head, rows)


def _cell(cell: Row | None, closed: bool) -> str:
    """``412 (0 ms × 32)`` or ``5.1 / 17.2 (0 ms × 32)``; a dash without a valid row."""
    if cell is None or "rate" not in cell:
        return "–"
    settings = "; ".join(cell["settings"])
    where = "" if settings == "as it is" else f" ({settings})"
    if closed:
        return f"{cell['rate']:.0f}{where}"
    if cell["behind"]:
        return f"falls behind{where}"
    return f"{1e3 * cell['p50']:.1f} / {1e3 * cell['p99']:.1f}{where}"


def _verdicts(against: Row) -> str:
    lines = []
    for name, row in against.items():
        bar = "" if row["bar"] is None else f", bar {row['bar']:g}: {'kept' if row['kept'] else 'missed'}"
        ratio = "falls behind" if row["ratio"] is None else f"{row['ratio']:.2f} ×"
        lines.append([name, row["best"], ratio + bar])
    return _rows(["ours against the best of the others", "which is", "ratio"], lines) if lines else ""


def _idle(idle: Row) -> str:
    rows = [[name, f"{100 * row['least']:.1f} %", f"{100 * row['most']:.1f} %"] for name, row in idle.items()]
    return "\n## Nothing to do\n\nShare of a core that a server takes when nobody asks, over its settings.\n\n" + _rows(
        ["", "least", "most"], rows
    )


def _lengths(lengths: Row | None) -> str:
    if lengths is None:
        return ""
    rounds = ", ".join(f"{ratio:.2f}" for ratio in lengths["ratios"])
    return (
        "\n## Texts of mixed length\n\nOur server under 32 clients, told how long a text is, answers "
        f"{lengths['ratio']:.2f} times as many requests as in the order of arrival (rounds {rounds}; "
        f"bar {lengths['bar']:g}).\n"
    )


def _tuning(settings: Row) -> str:
    """Every setting that was tried."""
    parts = ["\n## Every setting that was tried\n"]
    for model, peers in settings.items():
        loads = list(dict.fromkeys(load for by in peers.values() for each in by.values() for load in each))
        rows = [
            [name, setting, *(_tried(each.get(load)) for load in loads)]
            for name, by in peers.items()
            for setting, each in by.items()
        ]
        parts.append(
            f"\n{_upper(MODELS[model])}: answers/s, or p50 / p99 in ms.\n\n" + _rows(["", "setting", *loads], rows)
        )
    return "".join(parts)


def _tried(value: Any) -> str:
    if value is None or (isinstance(value, list) and None in value):
        return "–"
    return f"{1e3 * value[0]:.1f} / {1e3 * value[1]:.1f}" if isinstance(value, list) else f"{value:.0f}"


def _not_started(failed: list[Row]) -> str:
    if not failed:
        return ""
    rows = [
        [row["model"], row["peer"], row["setting"], row["why"].replace("|", "/").split("\n")[0][:160]] for row in failed
    ]
    return "\n## Did not start, or answered wrongly\n\n" + _rows(["model", "server", "setting", "why"], rows)


def _rows(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
