"""The GPU check's own script, tried on the CPU with tiny sizes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import ROWS, Setting, Skipped, catalogue_name, run

pytestmark = pytest.mark.alone

TINY = Setting(device="cpu", tiny=True)
ALIKE = ("profile mlp bf16", "profile cnn fp32", "profile cnn bf16")
"""Rows made by the same function as "profile mlp fp32"; one of them is enough here."""


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ALIKE])
def test_every_row_runs_on_a_cpu(name: str) -> None:
    outcome = run(name, ROWS[name], TINY)
    assert outcome.status == "passed" or (outcome.status == "skipped" and outcome.reason), outcome
    json.dumps(outcome.found, allow_nan=False)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (AssertionError("3 is not 4"), "failed", "AssertionError: 3 is not 4"),
        (Skipped("no such thing"), "skipped", "no such thing"),
        (ModuleNotFoundError("No module", name="msgspec"), "skipped", "msgspec is not installed here"),
        (ModuleNotFoundError("No module", name="microbatch.gone"), "failed", "microbatch.gone is not installed here"),
    ],
)
def test_a_row_reports_its_own_end(error: Exception, status: str, reason: str) -> None:
    def row(_: Setting) -> dict[str, object]:
        raise error

    outcome = run("any", row, TINY)
    assert (outcome.status, outcome.reason, outcome.found) == (status, reason, {})


@pytest.mark.parametrize(("breaks", "status"), [(False, 0), (True, 1)])
def test_the_exit_status_and_the_file(
    breaks: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(_: Setting) -> dict[str, object]:
        assert not breaks
        return {"figure": 2}

    monkeypatch.setattr(gpu_check, "ROWS", {"second": second, "device": ROWS["device"]})
    assert gpu_check.main(["--device", "cpu", "--out", str(tmp_path / "new")]) == status
    document = json.loads((tmp_path / "new" / "cpu.json").read_text())
    assert document["torch"] == torch.__version__
    assert [row["status"] for row in document["rows"]] == ["failed" if breaks else "passed", "passed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu_check.main(["--out", str(tmp_path)]) == 3
    assert "no CUDA device" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100-16gb-sxm"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_the_catalogue_entry_of_a_reported_name(reported: str, name: str | None) -> None:
    assert catalogue_name(reported) == name


def test_the_script_itself_loads_neither_torch_nor_microbatch() -> None:
    code = (
        "import sys; import benchmarks.gpu_check;"
        "sys.exit(int(any(name.split('.')[0] in ('torch', 'microbatch') for name in sys.modules)))"
    )
    root = Path(gpu_check.__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_every_row_has_a_short_name() -> None:
    assert all(re.fullmatch(r"[a-z0-9 ]{3,18}", name) for name in ROWS)
