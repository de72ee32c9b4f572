"""Every code block of the README and of the docs runs, in the order of its page and in one folder per page.

A block that cannot run carries its reason in a comment on the line before: ``<!-- not run: installs ... -->``.
A Python block whose first line is a file's name (``# my_model.py``) is saved under that name.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = "--budget 4s --max-batch 4 --threads 1"
"""What `profile` gets where a page leaves its minute: few sizes, each measured often, so that noise averages out."""

TOO_NOISY = r"(?m)^error: One call varies|TooNoisy: "
"""The one honest way for a block to fail: the library refuses to guess, on the command line and from Python."""

COMMAND = f"""#!/bin/sh
# The installed command, made small where the page leaves the budget out.
case "$1 $*" in
    profile*--budget*) ;;
    "profile "*--max-batch*) set -- "$@" {SMALL.replace("--max-batch 4 ", "")} ;;
    "profile "*) set -- "$@" {SMALL} ;;
esac
exec "{sys.executable}" -m microbatch "$@"
"""

LONGEST = 240
"""Seconds that one block may take."""

_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?^```(?P<kind>python|sh)\n(?P<code>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `reason` is empty when it runs."""

    kind: str
    code: str
    reason: str


def blocks_of(text: str) -> list[Block]:
    return [Block(m["kind"], m["code"], (m["reason"] or "").strip()) for m in _BLOCK.finditer(text)]


def run_block(block: Block, folder: Path) -> None:
    """Run one block in `folder`, or save it there when it is a file."""
    saved = re.match(r"# (\w+\.py)\n", block.code)
    if saved:
        (folder / saved[1]).write_text(block.code, encoding="utf-8")
        return
    environment = os.environ | {
        "PATH": os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT / "src"),
        "MPLBACKEND": "Agg",
    }
    status, output = (run_python if block.kind == "python" else run_shell)(block.code, folder, environment)
    if status and re.search(TOO_NOISY, output):
        pytest.skip(f"this machine is too noisy now: {output.splitlines()[-1]}")
    assert status == 0, f"{block.code}\nended with {status}:\n{output}"


def run_shell(code: str, folder: Path, environment: Mapping[str, str]) -> tuple[int | None, str]:
    done = subprocess.run(
        ["sh", "-euc", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False
    )
    return done.returncode, done.stdout + done.stderr


def run_python(code: str, folder: Path, environment: Mapping[str, str]) -> tuple[int | None, str]:
    """A process of its own, forked from one that has done no more than import torch, which takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    output = folder / "output.txt"
    process = context.Process(target=_as_main, args=(code, str(folder), dict(environment), str(output)))
    process.start()
    process.join(LONGEST)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, output.read_text(encoding="utf-8")


def _as_main(code: str, folder: str, environment: dict[str, str], output: str) -> None:
    """What ``python -c`` does with the code, in the folder."""
    with open(output, "wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, "")
    sys.argv = ["-c"]
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(code, "<block>", "exec"), main.__dict__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    command = tmp_path / "bin" / "microbatch"
    command.parent.mkdir()
    command.write_text(COMMAND)
    command.chmod(0o755)
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if not block.reason:
            run_block(block, tmp_path)


def test_the_readme_reaches_success_before_line_25(root: Path) -> None:
    lines = (root / "README.md").read_text(encoding="utf-8").splitlines()[:24]
    assert any(line.startswith("microbatch profile ") for line in lines)
    assert any(re.match(r"Use batch [\d\u202f]+\.", line) for line in lines)


def test_blocks_and_reasons_are_found() -> None:
    text = "```sh\nls\n```\n<!-- not run: needs a GPU -->\n```python\n1 / 0\n```\n```text\nUse batch 8.\n```\n"
    assert blocks_of(text) == [Block("sh", "ls\n", ""), Block("python", "1 / 0\n", "needs a GPU")]


def test_a_block_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_block(Block("python", "1 / 0\n", ""), tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []


def test_every_page_is_in_the_table_of_contents(root: Path) -> None:
    listed = set(re.findall(r"^[\w-]+$", (root / "docs" / "index.md").read_text(encoding="utf-8"), re.M))
    pages = {page.stem for page in (root / "docs").glob("*.md")} - {"index"}
    assert pages == listed
