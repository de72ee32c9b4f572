"""What runs in a worker process. Loads no torch by itself: a function that does not need it starts in a moment."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from microbatch.errors import ModelFailed
from microbatch.serving.engine.carrier import Carrier
from microbatch.serving.engine.out_of_memory import free_again, ran_out

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ByName:
    """A function that is found again in another process by its name.

    Attributes:
        module: as it is imported.
        name: in the module, as in ``Class.method``.
    """

    module: str
    name: str

    def load(self) -> Callable[[list[Any]], Any]:
        """The function itself, also where a decorator has taken its place."""
        found: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        return getattr(found, "batched_function", found)  # type: ignore[no-any-return]


def main(connection: Connection, parent: int, spec: Any) -> None:
    """Answer batches until the other end closes.

    Args:
        connection: to the server.
        parent: its process id.
        spec: a `ByName`, or what runs a list of items.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the server ends its workers itself
    carrier = Carrier(connection, parent)
    try:
        run = spec.load() if isinstance(spec, ByName) else spec
        carrier.send((True, os.getpid()))
    except Exception as error:
        carrier.send((False, portable(error)))
        return
    while True:
        try:
            items = carrier.receive()
            _answer(carrier, run, items)
        except (EOFError, OSError):
            return
        except Exception as error:  # an item that cannot be unpickled here
            carrier.send((False, portable(error)))


def _answer(carrier: Carrier, run: Callable[[list[Any]], Any], items: list[Any]) -> None:
    empty = False
    try:
        message = (True, run(items))
    except Exception as error:
        message, empty = (False, portable(error)), ran_out(error)
    if empty:
        free_again(getattr(run, "device", "cpu"))
    try:
        carrier.send(message)
    except OSError:
        raise
    except Exception as error:  # results that cannot be pickled
        carrier.send((False, portable(error)))


def portable(error: Exception) -> Exception:
    """The error as it can be sent, with its traceback as a note; its text alone where it cannot be pickled."""
    error.add_note(f"In the worker process:\n{''.join(traceback.format_exception(error))}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ModelFailed(f"{type(error).__name__}: {error}")
    return error
