"""The container file, read as text: what it copies, installs and starts is there, and it does not run as root."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from microbatch.cli.commands import serve
from microbatch.web.application import all_routes


@dataclass(frozen=True)
class Instruction:
    """One instruction, its lines joined."""

    name: str
    value: str

    @property
    def words(self) -> list[str]:
        """Of the form with brackets."""
        found: list[str] = json.loads(self.value)
        return found


@pytest.fixture(scope="module")
def stages(root: Path) -> list[list[Instruction]]:
    """The instructions of each stage; the last one is what runs."""
    lines = [line for line in (root / "Containerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found: list[list[Instruction]] = []
    for line in filter(None, joined.splitlines()):
        name, value = line.split(None, 1)
        if name == "FROM":
            found.append([])
        found[-1].append(Instruction(name, value))
    return found


def values(stage: list[Instruction], name: str) -> list[str]:
    return [each.value for each in stage if each.name == name]


def test_every_stage_has_a_python_that_is_supported(root: Path, stages: list[list[Instruction]]) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    supported = {each.rsplit(" ", 1)[-1] for each in project["classifiers"] if "Python :: 3." in each}
    for stage in stages:
        version = re.search(r"python:(\d+\.\d+)-", stage[0].value)
        assert version is not None
        assert version[1] in supported


def test_the_extras_it_installs_exist_and_hold_the_web_server(root: Path, stages: list[list[Instruction]]) -> None:
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installs = [run for run in values(stages[-1], "RUN") if "pip install" in run]
    wanted = [name for run in installs for found in re.findall(r"\)\[([\w,]+)\]", run) for name in found.split(",")]
    assert "serve" in wanted
    assert set(wanted) <= set(extras)
    assert all("-c /wheels/constraints.txt" in run for run in installs)


def test_what_it_copies_is_there_and_is_let_in(root: Path, stages: list[list[Instruction]]) -> None:
    let_in = {line[1:] for line in (root / ".containerignore").read_text().splitlines() if line.startswith("!")}
    copied = [name for stage in stages for value in values(stage, "COPY") for name in _sources(value)]
    assert set(copied) == let_in
    assert all((root / name).exists() for name in copied)
    needed = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert {needed["readme"], *needed["license-files"], "pyproject.toml", "src"} <= set(copied)


def _sources(value: str) -> list[str]:
    return [] if "--from=" in value else value.split()[:-1]


def test_it_does_not_run_as_root(stages: list[list[Instruction]]) -> None:
    names = [each.name for each in stages[-1]]
    assert values(stages[-1], "USER") == ["10001"]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert max(place for place, name in enumerate(names) if name == "RUN") < names.index("USER")


def test_it_starts_the_server_with_options_that_there_are(stages: list[list[Instruction]]) -> None:
    entry = next(each for each in stages[-1] if each.name == "ENTRYPOINT").words
    assert entry[:2] == ["microbatch", "serve"]
    known = {name for option in serve.command.params for name in option.opts}
    options = [word for word in entry if word.startswith("--")]
    assert options
    assert set(options) <= known
    assert entry[entry.index("--port") + 1] == values(stages[-1], "EXPOSE")[0]
    assert values(stages[-1], "STOPSIGNAL") == ["SIGTERM"]


def test_its_health_is_asked_for_where_the_server_tells_it(stages: list[list[Instruction]]) -> None:
    check = values(stages[-1], "HEALTHCHECK")[0]
    command = json.loads(check[check.index("CMD") + 3 :])
    address = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", command[-1])
    assert address is not None
    assert address[1] == values(stages[-1], "EXPOSE")[0]
    assert address[2] in {route.path for route in all_routes() if route.open}
    compile(command[-1], "<healthcheck>", "exec")


def test_the_way_to_run_it_keeps_to_this_machine(root: Path) -> None:
    commands = [line for line in (root / "Containerfile").read_text().splitlines() if " run " in line and "-p" in line]
    assert commands
    assert all("-p 127.0.0.1:" in line for line in commands)
