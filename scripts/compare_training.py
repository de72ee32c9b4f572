"""Writes docs/compare-training.md from what benchmarks/training_peers.py measured; run as scripts.compare_training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "training_peers.json"
PAGE = ROOT / "docs" / "compare-training.md"

Row = dict[str, Any]

NOTES = """
## What to read off, and what is not here

- A loop by hand, and a Trainer whose loss function divides by the number that it is told, are as exact as this library.
  What the library adds is that nobody has to write it, and what happens when memory ends.
- Lightning's doubling finds a size in fewer passes, and its bisection a larger one. It looks for the largest that fits,
  before training, and does not change `accumulate_grad_batches`; `auto` here looks for the fastest and keeps the batch.
- `HF Trainer + microbatch` spends four more passes, of one or two samples each, on how the model's loss is to be read.
- What starts again has trained samples twice or thrown its first updates away: `find_executable_batch_size` makes model
  and optimizer anew, `auto_find_batch_size` keeps the weights and begins at step 0.
- Composer asks for torch below 2.7.1; it was run beside this torch without its dependencies, as
  `benchmarks/composer_peer.py` says. By tokens it is as exact as weights in float32 are. Its automatic micro-batches,
  which keep the batch after an out-of-memory, run on CUDA only, so it has no row in the search.
"""

HEAD = """# Training steps beside other frameworks

Made by `python -m scripts.compare_training` from `benchmarks/results/training_peers.json`, which
`benchmarks/training_peers.py` measures in one run; the job and every way that was tried are in `benchmarks/peer_job.py`
and `benchmarks/peer_loops.py`. Versions: {versions}. One thread of {platform}.
"""

GRADIENTS = """
## Is the gradient that of the whole batch?

64 sequences of log-uniform length in 8 pieces of 8, a loss over tokens. The largest difference of the first update's
gradient to one pass over the whole batch in float64, over the largest gradient. Sorted: the data lies by length.

"""

OUT_OF_MEMORY = """
## What is trained after an out-of-memory?

Five updates of 64 samples in pieces of 8. From the 21st piece on, which lies in the third update, memory holds 5
samples only. The samples behind each update that was made, and in all; the data has 320:

"""

SEARCH = """
## What does finding a size cost?

A batch of 128, memory for 20 samples. Forward passes and failures among them before the passes of the first update (or
before a finder is done), the size found, and the samples behind that update, of 128 wanted. What microbatch runs on
fake tensors, which takes no memory, is counted too.

"""

TIME = """
## What does a step cost?

8 pieces of 8 sequences; every way in turn with the loop by hand, {pairs} times. The ratio of the medians; seconds per
piece above the loop by hand, paired, with the upper 95 % bound in brackets.

"""


def page(results: Row) -> str:
    """The page of these results."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if version)
    parts = [
        HEAD.format(versions=versions, platform=results["machine"]["platform"]),
        GRADIENTS + _gradients(results["gradients"]),
        OUT_OF_MEMORY + _out_of_memory(results["out_of_memory"]),
        SEARCH + _search(results["search"]),
    ]
    if times := results.get("time"):
        parts.append(TIME.format(pairs=times[0]["pairs"]) + _time(times))
    return "".join([*parts, _notes(results)])


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _gradients(rows: list[Row]) -> str:
    kinds = [name for name in rows[0] if name != "name"]
    return _table(["", *kinds], [[row["name"], *(f"{row[kind]:.1e}" for kind in kinds)] for row in rows])


def _out_of_memory(rows: list[Row]) -> str:
    return _table(
        ["", "samples per update", "in all", "failures", ""],
        [
            [row["name"], _listed(row["samples"]), str(sum(row["samples"])), str(row["failures"]), _end(row)]
            for row in rows
        ],
    )


def _search(rows: list[Row]) -> str:
    return _table(
        ["", "passes", "failures", "size", "samples of the first update"],
        [
            [row["name"], *(str(row[key]) for key in ("passes", "failures", "size")), _listed(row["samples"]) or "–"]
            for row in rows
        ],
    )


def _time(rows: list[Row]) -> str:
    jobs = list(dict.fromkeys(row["job"] for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows))
    by_place = {(row["name"], row["job"]): row for row in rows}
    return _table(
        ["", *(column for job in jobs for column in (job, "above the loop"))],
        [[name, *(cell for job in jobs for cell in _cost(by_place[name, job]))] for name in names],
    )


def _cost(row: Row) -> tuple[str, str]:
    extra, most = (1e3 * seconds for seconds in row["extra_per_piece"])
    return f"{row['step_over_hand']:.3f} ×", f"{extra:.2f} ms ({most:.2f})"


def _notes(results: Row) -> str:
    return NOTES if results.get("time") else NOTES + "- Times have not been measured yet on a quiet machine.\n"


def _listed(samples: list[int]) -> str:
    """Runs of equal numbers as one.

    >>> _listed([64, 64, 40, 40, 40])
    '64 × 2, 40 × 3'
    """
    runs: list[list[int]] = []
    for sample in samples:
        if runs and runs[-1][0] == sample:
            runs[-1][1] += 1
        else:
            runs.append([sample, 1])
    return ", ".join(str(sample) if times == 1 else f"{sample} × {times}" for sample, times in runs)


def _end(row: Row) -> str:
    died: str = row["died"] or ""
    return "stops with the error" if "allocate memory" in died else died.partition(": ")[2]


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
