"""jinja2 for templates of strangers: sandboxed, and bounded in steps, time and text. Loads no torch.

jinja2's sandbox keeps a template from Python's insides; it does not keep it from running for ever. Here every turn of
a loop, every call, filter and piece of output is counted, and no value may grow beyond a size, so that what Python does
between two counts is short.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeGuard

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MOST_STEPS = 2_000_000
"""Turns of loops, calls, filters, pieces of output, and values looked at; a conversation of 1,000 messages takes some
ten thousand."""
MOST_SECONDS = 5.0
MOST_TEXT = 32_000_000
"""Characters that all outputs together may write, and that one operation may make."""
WIDEST = 1_000_000
"""The largest number that a call or filter may be given: as a width it makes so much text."""
_WIDE = re.compile(r"\d{5}")
_STAR = re.compile(r"%(\([^)]*\))?[-+ #0]*(\d*\.)?\*")
_NESTED = re.compile(r"\{[^{}]*[:!][^{}]*\{")
"""Widths that are not in the format itself, but among what is put into it: ``%*d`` and ``{:{}}``."""
MOST_INDENT = 16
"""Of JSON: it is written once for each level of every line."""
_FORMATTED = 10_000
"""Characters that one field of a format makes at most, where no width has five digits."""
_GROWING = frozenset(
    {"center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace", "rjust", "to_bytes"}
    | {"tojson", "translate", "zfill"}
)
"""Methods and filters whose result may be as large as the product of what they are given."""
_NOT_OFFERED = ("pprint", "urlize", "wordwrap", "xmlattr")
"""Filters that no chat template needs and that are hard to bound."""


class Refused(TemplateError):
    """The template called ``raise_exception``."""


class TooMuch(TemplateError):
    """The template went beyond its bounds."""


@dataclass(slots=True)
class _Work:
    """What one rendering has done."""

    until: float
    steps: int = 0
    text: int = 0

    def add(self, text: int = 0) -> None:
        """One step, that made so many characters."""
        self.steps += 1
        self.text += text
        if self.steps > MOST_STEPS:
            raise TooMuch(f"more than {MOST_STEPS:,} steps.")
        if self.text > MOST_TEXT:
            raise TooMuch(f"more than {MOST_TEXT:,} characters of text.")
        if time.monotonic() > self.until:
            raise TooMuch(f"more than {MOST_SECONDS:g} seconds.")

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """The values, each a step."""
        for each in values:
            self.add()
            yield each

    def size(self, value: Any) -> int:
        """Characters in a value, with one for each part of it: what its text would have at least."""
        waiting, found = [value], 0
        while waiting:
            each = waiting.pop()
            found += 1 + (len(each) if isinstance(each, str | bytes | range) else 0)
            if isinstance(each, list | tuple | dict):
                waiting += [*each.keys(), *each.values()] if isinstance(each, dict) else each
            self.steps += 1
            if self.steps > MOST_STEPS or found > MOST_TEXT:
                raise TooMuch("values of too many parts.")
        return found


_WORK: ContextVar[_Work] = ContextVar("work of this rendering")


def compiled(source: str) -> Any:
    """A template, ready for `rendered`.

    Raises:
        jinja2.TemplateError: it cannot be read.
    """
    return _ENVIRONMENT.from_string(_Counting().visit(_ENVIRONMENT.parse(source)))


def rendered(template: Any, values: Mapping[str, Any]) -> str:
    """The text of a template.

    Raises:
        Refused: the template says so.
        TooMuch: it is too long, or takes too long.
        SecurityError: it does what it must not.
        Exception: what its expressions raise.
    """
    token = _WORK.set(_Work(time.monotonic() + MOST_SECONDS))
    try:
        text: str = template.render(values)
    finally:
        _WORK.reset(token)
    return text


class _Counting(NodeTransformer):
    """Puts a step into whatever may run often, and a measure on whatever makes values of values."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """One node, after those inside it."""
        self.generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            node.body.insert(0, _step(node, 0))
        elif isinstance(node, nodes.Output):
            # The template's own text; what expressions give is counted by `_written`.
            fixed = sum(len(each.data) for each in node.nodes if isinstance(each, nodes.TemplateData))
            return [_step(node, fixed), node]
        elif isinstance(node, nodes.Concat):  # a ~ b, which jinja2 would join unseen
            return _call("concatenated", node, *node.nodes)
        elif _makes_values(node):
            return _call("measured", node, node)
        return node


def _makes_values(node: nodes.Node) -> TypeGuard[nodes.Expr]:
    """Whether it writes a value of values down, or is a slice, which jinja2 makes unseen."""
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Slice)
    return isinstance(node, nodes.List | nodes.Tuple | nodes.Dict) and getattr(node, "ctx", "load") == "load"


def _call(name: str, near: nodes.Node, *args: nodes.Expr) -> nodes.Expr:
    """A call of a method of the environment, which no name of the template can hide."""
    made = nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)
    made.set_lineno(near.lineno)
    return made


def _step(near: nodes.Node, text: int) -> nodes.Node:
    return nodes.ExprStmt(_call("step", near, nodes.Const(text))).set_lineno(near.lineno)


class _Generation(Extension):
    """``{% generation %}``: marks what the assistant says. As in transformers, it is a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - as the class above declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The statements inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, counting."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template comes through here."""
        if obj == self.step:
            return self.step(*args)
        bare = getattr(obj, "__wrapped__", obj)  # jinja2 wraps str.format
        subject, name = getattr(bare, "__self__", None), getattr(bare, "__name__", "")
        subject = subject if isinstance(subject, str | bytes | int) else None
        work = functools.partial(super().call, context, obj, *args, **kwargs)
        return _bounded(work, name, subject, (*args, *kwargs.values()))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Operators that make something larger than what they are given."""
        work = _WORK.get()
        if isinstance(left, int | float) and isinstance(right, int | float):
            _check_numbers(operator, left, right)
        elif operator == "*":
            _check_size(*(abs(each) if isinstance(each, int) else work.size(each) for each in (left, right)))
        elif operator == "%":
            if _STAR.search(str(left)):
                raise TooMuch("a format with a computed width.")
            _check_size(_fields(left), work.size(right))
        result = super().call_binop(context, operator, left, right)
        work.add(work.size(result))
        return result

    def step(self, text: int) -> str:
        """One turn of a loop, one entry of a macro, or a piece of the template's own text."""
        _WORK.get().add(text)
        return ""

    def measured(self, value: Any) -> Any:
        """A list, tuple, object or slice that the template made; `call` measures it."""
        return value

    def concatenated(self, *parts: Any) -> str:
        """``a ~ b``."""
        return "".join(map(str, parts))


def _bounded(work: Callable[[], Any], name: str, subject: Any, given: tuple[Any, ...]) -> Any:
    """A call or filter that can make nothing too large, and whose result is counted."""
    doing = _WORK.get()
    numbers = [abs(each) for each in given if isinstance(each, int)]
    if max(numbers, default=0) > WIDEST:
        raise TooMuch(f"a call with a number beyond {WIDEST:,}.")
    size = doing.size(given)
    if name in _GROWING:
        if name.startswith("format") and (_NESTED.search(_bare(subject)) or _STAR.search(_bare(subject))):
            raise TooMuch("a format with a computed width.")
        fields = _fields(subject) if name.startswith("format") else doing.size(subject)
        _check_size(fields, max(size, *numbers, 1))
    if name == "sum" and any(isinstance(each, list | tuple | str) for each in given):
        raise TooMuch("a sum of lists, which copies them again and again.")
    result = work()
    if isinstance(result, Iterator | KeysView | ValuesView | ItemsView):  # else they would come unseen
        result = list(doing.counted(result))
    doing.add(doing.size(result))
    return result


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter, bounded: its subject comes first, after what jinja2 hands to some of them."""
    leading = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        work = functools.partial(function, *args, **kwargs)
        return _bounded(work, name, args[leading], (*args[leading + 1 :], *kwargs.values()))

    return bounded


def _check_numbers(operator: str, left: float, right: float) -> None:
    """Whole numbers have no bound of their own in Python."""
    bits = [each.bit_length() if isinstance(each, int) else 64 for each in (left, right)]
    if max(bits) > 1024 or (operator == "**" and bits[0] * abs(right) > 1024):
        raise TooMuch("numbers of more than 1,024 bits.")


def _check_size(*factors: float) -> None:
    if functools.reduce(lambda a, b: a * b, factors) > MOST_TEXT:
        raise TooMuch(f"an operation that may make more than {MOST_TEXT:,} characters.")


def _bare(text: Any) -> str:
    """A format without its braces that stand for braces."""
    return str(text).replace("{{", "").replace("}}", "")


def _fields(text: Any) -> int:
    """Characters that a format may have without what is put into it."""
    if _WIDE.search(text if isinstance(text, str) else repr(text)):
        raise TooMuch("a format with a width of five digits.")
    return (1 + str(text).count("%") + str(text).count("{")) * _FORMATTED


@pass_context
def _written(context: Context, value: Any) -> Any:  # noqa: ARG001 - with it, jinja2 folds no constants unseen
    """What an expression between ``{{`` and ``}}`` gives."""
    work = _WORK.get()
    work.add(work.size(value))
    return value


def _raise_exception(message: str) -> None:
    raise Refused(str(message))


def _strftime_now(form: str) -> str:
    _check_size(_fields(form))
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the escapes for HTML that jinja2's own has, and with the options that transformers offers."""
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > MOST_INDENT:
        raise TooMuch(f"an indent beyond {MOST_INDENT}.")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """``dict(...)``, without the class's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(Namespace):
    """``namespace(...)``; names that begin with an underscore would lead into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        found = dict(*rest, **kwargs)
        for name in found:
            _check_name(name)
        Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace with the attribute {name!r:.60}.")


def _environment() -> _Environment:
    made = _Environment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=_written, extensions=[_Generation, loopcontrols]
    )
    offered = {**made.filters, "tojson": _to_json}
    made.filters = {name: _filter(name, each) for name, each in offered.items() if name not in _NOT_OFFERED}
    made.globals.pop("lipsum")
    made.globals |= {
        "raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": _Dict(), "namespace": _Namespace,
    }  # fmt: skip
    return made


_ENVIRONMENT = _environment()
