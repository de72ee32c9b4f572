"""What holds for each command, whichever there are: the tests come from the files in ``cli/commands/``."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import click
import pytest

from microbatch.cli.app import DEFECT, application, command_names, load_command, run
from tests.cli.examples import CSV

pytestmark = pytest.mark.alone

COMMANDS = command_names()


def help_of(name: str) -> str:
    command = load_command(name)
    with click.Context(command, info_name=name) as context:
        return command.get_help(context)


def example_lines(name: str) -> list[str]:
    return re.findall(rf"^\s+(microbatch {name}\b.*)$", help_of(name), re.MULTILINE)


def test_the_commands_are_the_files() -> None:
    assert {"article", "compare", "devices", "explain", "profile"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_every_option_and_shows_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    printed = capsys.readouterr().out
    assert "Example:" in printed
    assert example_lines(name)
    undocumented = [p.name for p in load_command(name).params if isinstance(p, click.Option) and not p.help]
    assert undocumented == []


@pytest.mark.parametrize("line", [line for name in COMMANDS for line in example_lines(name)])
def test_every_example_is_a_command_line_that_parses(line: str) -> None:
    words = shlex.split(line.split(" > ")[0])[1:]
    command = load_command(words[0])
    context = command.make_context(words[0], words[1:])
    assert context.params


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_answers_machines(name: str) -> None:
    flags = {option for parameter in load_command(name).params for option in parameter.opts}
    assert "--json" in flags


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--no-such-option"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "--no-such-option" in printed.err
    assert f"microbatch {name} --help" in printed.err


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_one_document_for_machines(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--no-such-option", "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.err == ""
    error = json.loads(printed.out)["error"]
    assert set(error) == {"type", "message", "remedy"}
    assert all(error.values())


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profyle"]) == 2
    printed = capsys.readouterr()
    assert "profyle" in printed.err
    assert printed.err.count("\n") == 1


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", printed, re.MULTILINE) for name in COMMANDS)
    assert "Exit status" in printed


def test_the_summaries_in_the_list_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--help"])
    listed = capsys.readouterr().out.split("Commands:")[1]
    assert "..." not in listed


def test_a_defect_is_told_apart_from_a_no(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("microbatch.hardware.catalogue.device_names", broken)
    assert run(["devices", "--json"]) == DEFECT
    printed = capsys.readouterr()
    assert "Traceback" in printed.err
    assert json.loads(printed.out)["error"]["message"] == "ZeroDivisionError: division by zero"


def test_an_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("microbatch.hardware.catalogue.device_names", interrupted)
    assert run(["devices"]) == 130
    printed = capsys.readouterr()
    assert printed.out.strip() == ""
    assert printed.err.strip() == ""


def opened_by_reader(pipe: Path, process: subprocess.Popen[bytes]) -> int:
    """The writing end of a named pipe, as soon as the process has opened it to read."""
    while process.poll() is None:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            os.sched_yield()
    raise AssertionError(f"the command ended with {process.returncode} before it read")


def test_ctrl_c_ends_a_real_process_quietly(tmp_path: Path) -> None:
    pipe = tmp_path / "curve.csv"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "microbatch", "explain", str(pipe)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A background job inherits the signal ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 (no threads here)
    ) as process:
        try:
            writer = opened_by_reader(pipe, process)
            out, err = interrupted(process)
        finally:
            process.kill()
    os.close(writer)
    assert (process.returncode, out.strip(), err.strip()) == (130, b"", b"")


def interrupted(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """What a process printed that was interrupted; again where the signal fell just before a blocking read."""
    for _ in range(5):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=6)
    raise AssertionError("the process did not end")


def fresh(code: str, cwd: Path) -> str:
    """What a fresh interpreter prints last."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()[-1]


QUICK = (
    ["--help"],
    ["devices"],
    ["devices", "t4", "--json"],
    ["explain", "times.csv"],
    ["explain", "--help"],
    ["simulate", "one_f_one_b", "--stages", "4", "--micro-batches", "8"],
    ["simulate", "zb_v", "--json"],
    ["simulate", "--help"],
)


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_quick_commands_load_neither_torch_nor_matplotlib(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "times.csv").write_text(CSV)
    code = (
        f"import sys; from microbatch.cli.app import run; status = run({arguments!r});"
        "print(status, [m for m in ('torch', 'matplotlib') if m in sys.modules])"
    )
    assert fresh(code, tmp_path) == "0 []"


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_quick_commands_answer_in_time(arguments: list[str], tmp_path: Path) -> None:
    """Under 0.4 s on a quiet machine; processor time is asserted, which other work on the machine hardly changes."""
    (tmp_path / "times.csv").write_text(CSV)
    code = (
        f"import os; from microbatch.cli.app import run; assert run({arguments!r}) == 0;"
        "t = os.times(); print(t.user + t.system)"
    )
    assert any(float(fresh(code, tmp_path)) < 0.4 for _ in range(5))


def test_python_dash_m_is_the_same_command() -> None:
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "microbatch", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("microbatch, version ")
    assert time.perf_counter() - started < 30
    assert application.name == "application"
