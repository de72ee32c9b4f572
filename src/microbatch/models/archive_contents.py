"""What a ``torch.export`` archive holds, checked before torch opens it.

`torch.export.load` trusts its file: it unpickles example inputs and constants, imports modules that the file names,
evaluates expressions written as text, and calls whatever a node's target names. None of that may come from a stranger.
So an archive is opened only when it holds nothing but tensors as plain bytes, a graph of torch's own operators, names
that are names, and sizes that are arithmetic.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from microbatch.errors import InvalidModel

EXPORT_AGAIN = "Export it again: torch.export.save(torch.export.export(model, args, dynamic_shapes=...), 'model.pt2')."
OWN_FUNCTION = "If you trust the file, load it in a function of your own, and name that as file.py:callable."


@dataclass(frozen=True, slots=True)
class Contents:
    """A checked archive.

    Attributes:
        path: the file.
        graph: models/….json of the archive.
    """

    path: Path
    graph: dict[str, Any]


def read_archive(path: Path) -> Contents:
    """Reads and checks the archive without running, importing or unpickling anything of it.

    Raises:
        InvalidModel: no such file, no archive, a broken one, one of an older form, or one that holds more than a graph
            of torch's operators and tensors as plain bytes.
    """
    if not path.is_file():
        raise InvalidModel(f"There is no file {str(path)!r}.", "Check the path.")
    try:
        with zipfile.ZipFile(path) as archive:
            return Contents(path, _checked(path, archive))
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidModel(f"{path} is no whole torch.export archive: {reason}.", EXPORT_AGAIN) from error


def _checked(path: Path, archive: zipfile.ZipFile) -> dict[str, Any]:
    entries = archive.infolist()
    if not entries or min(entry.header_offset for entry in entries) != 0:
        raise zipfile.BadZipFile("it is cut off")
    inner = {name.partition("/")[2]: name for name in archive.namelist()}
    if any(name.startswith("data/aotinductor/") for name in inner):
        raise _refusal(path, "compiled code, which would run on this machine")
    graphs = [name for name in inner if re.fullmatch(r"models/[^/]+\.json", name)]
    if len(graphs) != 1:
        raise InvalidModel(f"{path} holds {len(graphs)} exported graphs, and one is needed.", EXPORT_AGAIN)
    for name, full in inner.items():
        if name.startswith("data/sample_inputs/"):
            _check_sample(path, archive.read(full))
        elif re.fullmatch(r"data/(weights|constants)/.*\.json", name):
            _check_payload(path, json.loads(archive.read(full)))
        elif re.fullmatch(r"data/(weights|constants)/.*\.pt", name):
            raise _refusal(path, "pickled weights")
    graph: dict[str, Any] = json.loads(archive.read(inner[graphs[0]]))
    _check_graph(path, graph)
    return graph


def _refusal(path: Path, what: str) -> InvalidModel:
    return InvalidModel(f"{path} holds {what}.", OWN_FUNCTION)


def _check_sample(path: Path, data: bytes) -> None:
    """Example inputs are saved as a pickle; tensors alone are read by torch's own reader, which builds nothing else."""
    try:
        if data:
            torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        raise _refusal(path, "example inputs that are a pickle of more than tensors") from error


def _check_payload(path: Path, config: dict[str, Any]) -> None:
    for entry in config["config"].values():
        if entry["use_pickle"] or not re.fullmatch(r"(weight|tensor)_\d+", entry["path_name"]):
            raise _refusal(path, "a pickled tensor or object")


def _check_graph(path: Path, graph: dict[str, Any]) -> None:
    for key, value in _entries(graph):
        allowed = _ALLOWED.get(key)
        if allowed is not None and isinstance(value, str) and not allowed(value):
            raise _refusal(path, f"{_WHAT.get(key, 'a name')} that is none of torch's: {value[:_SHOWN]!r}")
    for table in ("tensor_values", "sym_int_values", "sym_bool_values", "sym_float_values", "range_constraints"):
        for key, value in _entries(graph):
            if key == table and isinstance(value, dict) and not all(map(_is_name, value)):
                raise _refusal(path, "a name that is none")


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key of every object within, with its value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from _entries(item)
    elif isinstance(value, list):
        for item in value:
            yield from _entries(item)


def _is_name(text: str) -> bool:
    return re.fullmatch(r"[\w.]*", text) is not None


def _is_operator(text: str) -> bool:
    """An operator of a list; the names that read or write files are not on it."""
    if text.startswith("torch.ops."):
        space, _, rest = text.removeprefix("torch.ops.").partition(".")
        return space in _SPACES and _is_name(rest) and not _TOUCHES_FILES.search(rest)
    return text in _FUNCTIONS or re.fullmatch(r"torch\.(_)?sym_\w+", text) is not None


def _is_arithmetic(text: str) -> bool:
    """Symbols, numbers, and functions of sympy and torch for sizes: nothing that could be called to another end."""
    bare = re.sub(r"Symbol\('z?[a-z]{1,3}\d+'", "Symbol(", text)
    names = re.findall(r"[A-Za-z_]\w*", re.sub(r"\b\d+(\.\d*)?(e[+-]?\d+)?", " ", bare))
    known = all(name in _SIZE_WORDS or re.fullmatch(r"z?[a-z]{1,3}\d+", name) for name in names)
    plain = re.fullmatch(r"[\w\s+\-*/%().,<>=!&|~]*", bare) is not None
    return known and plain and not re.search(r"\.\s*[A-Za-z_]", bare)


def _is_structure(text: str) -> bool:
    """How inputs and outputs are nested: plain containers, and the outputs of transformers."""
    if not text:
        return True
    _, schema = json.loads(text)
    return (
        all(
            value is None or value in _CONTAINERS or re.fullmatch(r"transformers\.modeling_outputs\.\w+", str(value))
            for key, value in _entries(schema)
            if key == "type"
        )
        and "__enum__" not in text
    )


_SPACES = frozenset({"aten", "prims", "torchvision", "quantized_decomposed", "higher_order"})
_TOUCHES_FILES = re.compile(r"^(from_file|save|load|_import|_export)|triton|wrapper_(functional|mutation)")
_FUNCTIONS = frozenset(
    {
        "_operator.getitem",
        "_operator.add",
        "_operator.sub",
        "_operator.mul",
        "_operator.neg",
        "_operator.pow",
        "_operator.mod",
        "_operator.floordiv",
        "_operator.truediv",
        "_operator.eq",
        "_operator.ne",
        "_operator.lt",
        "_operator.le",
        "_operator.gt",
        "_operator.ge",
        "_operator.and_",
        "_operator.or_",
        "math.ceil",
        "math.floor",
        "math.trunc",
        "math.sqrt",
    }
)
_SIZE_WORDS = frozenset(
    """
    Symbol positive negative nonnegative nonpositive zero nonzero integer real rational finite even odd commutative
    Add Mul Pow Mod Abs Max Min Integer Rational Float Eq Ne Lt Le Gt Ge And Or Not Equality Unequality
    StrictLessThan LessThan StrictGreaterThan GreaterThan Piecewise ExprCondPair True False true false oo int_oo
    FloorDiv CleanDiv CeilDiv PythonMod ModularIndexing Where Identity IntTrueDiv FloatTrueDiv FloatPow
    PowByNatural ToFloat TruncToInt TruncToFloat RoundToInt FloorToInt CeilToInt BooleanTrue BooleanFalse
    """.split()  # noqa: SIM905 - a list of words reads as words
)
_CONTAINERS = frozenset({"builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"})
_SHOWN = 60

_ALLOWED: dict[str, Callable[[str], bool]] = {
    "target": _is_operator,
    "as_operator": _is_operator,
    "expr_str": _is_arithmetic,
    "in_spec": _is_structure,
    "out_spec": _is_structure,
    **dict.fromkeys(
        ("name", "as_name", "parameter_name", "buffer_name", "tensor_constant_name", "custom_obj_name", "fqn"), _is_name
    ),
}
"""Which texts of the graph torch would act upon, and which of them are harmless."""
_WHAT = {
    "target": "an operator",
    "as_operator": "an operator",
    "expr_str": "a size",
    "in_spec": "an input",
    "out_spec": "an output",
}
