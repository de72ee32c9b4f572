"""Rows of the table of routes, and how a path finds its row.

Not a framework's router: with Starlette's the same server answered a third fewer requests (docs/decisions.md), and all
that is needed of one is a dictionary and a list of prefixes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from microbatch.errors import InvalidRequest
from microbatch.web.statuses import Answer, own_form

if TYPE_CHECKING:
    from microbatch.web.application import Application
    from microbatch.web.request import Request
    from microbatch.web.response import Response

Handler = Callable[["Request"], Awaitable["Response"]]
Describe = Callable[["Application"], dict[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path.

    Attributes:
        method: of HTTP. HEAD is answered as GET, without the body.
        path: literal, or with one parameter at its end, ``/predict/{name}``, which takes the rest of the path.
        handler: makes the response, or raises an error that `microbatch.web.statuses` knows how to answer.
        operation: from the application to the OpenAPI operation of this route, successes only; or to several, by the
            paths that a parameter stands for; None leaves it out.
        open: whether it is answered without an API key.
        error_body: the document of an error; `own_form` unless another API is spoken.
    """

    method: str
    path: str
    handler: Handler
    operation: Describe
    open: bool = False
    error_body: Callable[[Answer], Any] = own_form

    @property
    def parameter(self) -> str | None:
        """The name of the path's parameter."""
        return self.path[self.path.index("{") + 1 : -1] if self.path.endswith("}") else None

    @property
    def prefix(self) -> str:
        """The literal part of the path."""
        return self.path.partition("{")[0]


NO_PARAMETERS: Mapping[str, str] = {}


class Router:
    """Finds rows by method and path."""

    def __init__(self, routes: Iterable[Route]) -> None:
        rows = tuple(routes)
        self._literal = {(row.method, row.path): row for row in rows if row.parameter is None}
        self._open_ended = [row for row in rows if row.parameter is not None]

    def find(self, method: str, path: str) -> tuple[Route, Mapping[str, str]]:
        """The row of a request and the parameters in its path.

        Raises:
            InvalidRequest: nothing is there (404), or not by this method (405).
        """
        method = "GET" if method == "HEAD" else method
        row = self._literal.get((method, path))
        if row is not None:
            return row, NO_PARAMETERS
        for row in self._open_ended:
            if row.method == method and (rest := _rest(row, path)):
                return row, {row.parameter or "": rest}
        raise self._not_found(method, path)

    def at(self, path: str) -> list[Route]:
        """All rows of a path."""
        rows = [row for (_, literal), row in self._literal.items() if literal == path]
        return rows + [row for row in self._open_ended if _rest(row, path)]

    def _not_found(self, method: str, path: str) -> InvalidRequest:
        there = self.at(path)
        if not there:
            known = ", ".join(sorted({row.path for row in (*self._literal.values(), *self._open_ended)}))
            return InvalidRequest(f"There is nothing at {path[:200]!r}.", f"There is {known}.", status=404)
        methods = sorted({row.method for row in there} | ({"HEAD"} if any(r.method == "GET" for r in there) else set()))
        allowed = ", ".join(methods)
        return InvalidRequest(
            f"{path[:200]!r} does not take {method[:20]}.", f"Use {allowed}.", status=405,
            headers=((b"allow", allowed.encode()),),
        )  # fmt: skip


def _rest(row: Route, path: str) -> str:
    return path[len(row.prefix) :] if path.startswith(row.prefix) else ""
