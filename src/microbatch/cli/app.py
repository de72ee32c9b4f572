"""Finds the commands, runs one, and turns every error into one clear line and an exit status."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback
from collections.abc import Sequence

import click

from microbatch import __version__
from microbatch.cli import commands
from microbatch.cli.output import print_json
from microbatch.errors import InvalidSettings, MicrobatchError, NoAnswer

DONE, ANSWER_IS_NO, USER_ERROR, NO_ANSWER = 0, 1, 2, 3
DEFECT = 70
"""A crash of microbatch itself (EX_SOFTWARE of sysexits.h), so that no script takes it for "the answer is no"."""
INTERRUPTED = 130

EXIT_STATUS_HELP = """\b
Exit status:
  0  done
  1  the answer is no: a regression, not exact
  2  a mistake in the request; one line says which
  3  no honest answer: too noisy, or too small a budget"""


class Commands(click.Group):
    """The files in ``commands/``, each imported only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in alphabetical order."""
        return command_names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command of that name, or None."""
        return load_command(cmd_name) if cmd_name in command_names() else None


def command_names() -> list[str]:
    """Every command, by the files that there are."""
    return sorted(module.name for module in pkgutil.iter_modules(commands.__path__))


def load_command(name: str) -> click.Command:
    """The ``command`` of ``commands/<name>.py``."""
    command: click.Command = importlib.import_module(f"{commands.__name__}.{name}").command
    return command


@click.group(cls=Commands, epilog=EXIT_STATUS_HELP)
@click.version_option(__version__, prog_name="microbatch")
def application() -> None:
    """Measure how a model answers to its batch size, explain it, and name the size to use.

    \b
    Example:
      microbatch profile mlp:depth=8,width=1024 --out mlp.html
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status. Nothing but a defect of microbatch shows a traceback."""
    as_json = "--json" in arguments
    try:
        status = application.main(list(arguments) or ["--help"], prog_name="microbatch", standalone_mode=False)
    except click.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        return _fail(InvalidSettings(error.format_message(), _help_hint(error)), as_json)
    except MicrobatchError as error:
        return _fail(error, as_json)
    except OSError as error:
        return _fail(InvalidSettings(_sentence(error), "Check the path and its permissions."), as_json)
    except Exception as error:
        traceback.print_exc()
        remedy = "This is a defect of microbatch; please report it with the traceback."
        _fail(MicrobatchError(f"{type(error).__name__}: {error}", remedy), as_json)
        return DEFECT
    return int(status or DONE)


def _fail(error: MicrobatchError, as_json: bool) -> int:
    if as_json:
        print_json(error.to_json())
    else:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return NO_ANSWER if isinstance(error, NoAnswer) else USER_ERROR


def _help_hint(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"See {context.command_path if context else 'microbatch'} --help."


def _sentence(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}." if error.filename and error.strerror else f"{error}."
