"""Every file in examples/ runs as it stands, and the difference to whole batches that it prints is none."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
from pathlib import Path

import pytest

from microbatch.models.torchvision_operators import make_torchvision_importable

make_torchvision_importable()  # transformers and Lightning's metrics import it where it is installed

NEEDS = {
    "plain_loop.py": ("sklearn",),
    "accelerate_digits.py": ("sklearn", "accelerate"),
    "lightning_digits.py": ("sklearn", "pytorch_lightning"),
    "trainer_text.py": ("transformers", "accelerate"),
}
LINES = 60


def test_each_example_is_listed(root: Path) -> None:
    assert {path.name for path in (root / "examples").glob("*.py")} == NEEDS.keys()


@pytest.mark.filterwarnings("ignore")  # the frameworks' advice on workers, devices and logging intervals
@pytest.mark.parametrize("name", NEEDS)
def test_an_example_runs_and_is_exact(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    example = root / "examples" / name
    assert len(example.read_text(encoding="utf-8").splitlines()) < LINES
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(r"loss [\d.]+ ", printed)
    *others, ours = [float(number) for number in re.findall(r"whole batches by (\S+)", printed)]
    assert ours <= 1e-12
    assert len(others) == (name == "trainer_text.py") and all(other > 1e-3 for other in others)  # without us
