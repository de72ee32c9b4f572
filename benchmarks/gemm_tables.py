"""Predicted against published times of matrix products: how far off, by device and operation?

    python benchmarks/gemm_tables.py [--table FILE.csv] [--device NAME_OR_FILE] [--tokens 2048] [--out results.json]

The table has the columns gpu, operation, k, n, tokens and median_us (others are not read), one (tokens × k)·(k × n)
product of 16-bit values a row. By default it is gemm-latency.csv in the folder MICROBATCH_DATA. `gpu` is looked up in
the catalogue unless `--device` says which device it is. The prediction sees rows, columns, depth, dtype and device.
"Shared" is the same without the constants of the device's own file: what a device without a table gets.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from microbatch.errors import MicrobatchError
from microbatch.hardware.catalogue import load_device
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.gemm import linear_seconds

MEDIAN_BAR, P90_BAR = 0.12, 0.30
COLUMNS = ("gpu", "operation", "k", "n", "tokens", "median_us")

Row = Mapping[str, str]


def read_table(path: Path, largest: int = 2048) -> list[Row]:
    """Rows with at most that many tokens."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise SystemExit(f"{path} has no column {', '.join(missing)}.")
        return [row for row in reader if int(row["tokens"]) <= largest]


def relative_errors(rows: Iterable[Row], spec: DeviceSpec) -> list[float]:
    """Predicted over measured, less one, row by row."""
    dtype = "bf16" if "bf16" in spec.flops else "fp16"
    return [
        linear_seconds(spec, dtype, *(int(row[side]) for side in ("tokens", "n", "k"))) / float(row["median_us"]) * 1e6
        - 1
        for row in rows
    ]


def summary(errors: list[float]) -> dict[str, float]:
    """Median and 90th percentile of the absolute relative error, the bias (median of the signed one), and how many."""
    size = np.abs(errors)
    return {
        "median": float(np.median(size)),
        "p90": float(np.percentile(size, 90)),
        "bias": float(np.median(errors)),
        "rows": len(errors),
    }


def by_device(rows: list[Row], device: str | None) -> dict[str, Any]:
    """Errors of each gpu in the table: in all, with shared constants only, and by operation."""
    result: dict[str, Any] = {}
    for gpu in sorted({row["gpu"] for row in rows}):
        spec, mine = load_device(device or gpu), [row for row in rows if row["gpu"] == gpu]
        operations = {row["operation"]: [other for other in mine if other["operation"] == row["operation"]]
                      for row in mine}  # fmt: skip
        result[gpu] = {
            "device": spec.name,
            "all": summary(relative_errors(mine, spec)),
            "shared": summary(relative_errors(mine, replace(spec, constants={}))),
            "operations": {name: summary(relative_errors(part, spec)) for name, part in sorted(operations.items())},
        }
    return result


def _lines(result: Mapping[str, Any]) -> list[str]:
    lines = [f"{'':34} median    p90   bias   rows"]
    for gpu, part in result.items():
        named = {f"{gpu} ({part['device']})": part["all"], f"{gpu}, shared constants": part["shared"]}
        named |= {f"  {name}": errors for name, errors in part["operations"].items()}
        lines += [
            f"{name:34} {e['median']:5.1%}  {e['p90']:5.1%}  {e['bias']:+5.1%}  {e['rows']:5}"
            for name, e in named.items()
        ]
    return lines


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", type=Path)
    parser.add_argument("--device", help="a device of the catalogue or a TOML file, for every row of the table")
    parser.add_argument("--tokens", type=int, default=2048, help="rows with at most so many tokens")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    table = arguments.table or Path(os.environ.get("MICROBATCH_DATA", ".")) / "gemm-latency.csv"
    if not table.is_file():
        sys.exit(f"There is no table {table}: give --table, or set MICROBATCH_DATA to the folder of gemm-latency.csv.")
    try:
        result = by_device(read_table(table, arguments.tokens), arguments.device)
    except MicrobatchError as error:
        sys.exit(str(error))
    print("\n".join(_lines(result)))
    met = all(part["all"]["median"] <= MEDIAN_BAR and part["all"]["p90"] <= P90_BAR for part in result.values())
    print(f"bar (median {MEDIAN_BAR:.0%}, p90 {P90_BAR:.0%}): {'met' if met else 'not met'}")
    if arguments.out:
        document = {"table": table.name, "largest_tokens": arguments.tokens, "gpus": result}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
