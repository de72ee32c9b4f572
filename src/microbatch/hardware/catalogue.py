"""The devices that ship with microbatch, and the rules that every device file keeps.

One TOML file per device under ``devices/``; a user's own file has the same form and is held to the same rules::

    name = "t4"
    aliases = []                      # optional: other names that everybody understands
    rates = "dense"                   # compulsory: a sparse rate is no rate of this catalogue
    kind = "gpu"                      # optional: gpu (the default), cpu or accelerator

    [flops.fp16]                      # one table per dtype, FLOP/s (integer dtypes: operations per second)
    value = 65e12
    source = "vendor's specification page"

    [bandwidth]                       # byte/s; compulsory. Optional: memory_bytes, multiprocessors, cache_bytes,
    value = 300e9                     # link_bandwidth (one direction), launch_seconds
    source = "vendor's specification page"

    [constants.gemm_efficiency]       # optional, at most twelve: see microbatch.hardware.constants
    value = 0.85
    source = "fitted to a published table of products"

A figure that is not verified is left out. ``memory_bytes`` is what a device reports where such a report is known;
else the vendor's label is read in decimal units, a lower bound in every report known, and its source says so.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from microbatch.errors import InvalidDevice
from microbatch.hardware.constants import DEFAULTS
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.units import DTYPE_BYTES

_WHOLE = ("memory_bytes", "multiprocessors", "cache_bytes")
_FRACTIONAL = ("bandwidth", "link_bandwidth", "launch_seconds")
_KEYS = ("name", "aliases", "rates", "kind", "flops", "constants", *_WHOLE, *_FRACTIONAL)
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

_HIGHEST_STEP = 2.2
"""16-bit over tf32 rate: dense hardware does at most twice, so about 4 gives a sparse rate away; 10 % for rounding.
Narrower dtypes are not held to this: where 16-bit products accumulate at half rate, int8 honestly does four times."""


def device_names() -> tuple[str, ...]:
    """Names of the catalogue's devices, in alphabetical order."""
    return tuple(sorted(_files()))


def device_aliases() -> dict[str, str]:
    """Short names and the device that each stands for, as in ``{"a100": "a100-80gb-sxm"}``."""
    return {alias: name for name, text in _files().items() for alias in tomllib.loads(text).get("aliases", ())}


def load_device(name: str | Path) -> DeviceSpec:
    """The device of that name or alias; a path that ends in ``.toml`` reads a file of one's own.

    >>> load_device("t4").flops["fp16"]
    65000000000000.0

    Raises:
        InvalidDevice: an unknown name (the nearest ones are named), a file that cannot be read, or a file that breaks
            a rule (the message names file and key).
    """
    if str(name).endswith(".toml"):
        path = Path(name)
        return parse_device(_read(path), origin=str(path))
    files = _files()
    known = str(name) if str(name) in files else device_aliases().get(str(name), "")
    if known not in files:
        raise _unknown(str(name), files)
    return parse_device(files[known], origin=f"{known}.toml", name=known)


def parse_device(text: str, *, origin: str, name: str | None = None) -> DeviceSpec:
    """A device from the text of its TOML file.

    Args:
        text: the file's contents.
        origin: what messages call the file.
        name: the name that the file must carry; None for a file of one's own.

    Raises:
        InvalidDevice: one line that names file and key.
    """
    document = _parse_toml(text, origin)
    _check_keys(document, _KEYS, origin, "")
    _check_name(document, origin, name)
    if document.get("rates") != "dense":
        raise _broken(
            origin,
            f'rates is {document.get("rates")!r}, not "dense"',
            'Give dense rates (a rate "with sparsity" is twice the dense one) and write rates = "dense".',
        )
    sources: dict[str, str] = {}
    kind = _kind(document, origin)
    flops = _rates(document, origin, sources)
    constants = _constants(document, kind, origin, sources)
    figures: dict[str, Any] = {
        key: _figure(document[key], key, origin, sources, whole=key in _WHOLE)
        for key in (*_WHOLE, *_FRACTIONAL)
        if key in document
    }
    if "bandwidth" not in figures:
        raise _broken(origin, "bandwidth is missing", "Add [bandwidth] with value in byte/s and source.")
    return DeviceSpec(name=document["name"], kind=kind, flops=flops, constants=constants, sources=sources, **figures)


def _files() -> dict[str, str]:
    folder = resources.files("microbatch.hardware") / "devices"
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }


def _unknown(name: str, files: Iterable[str]) -> InvalidDevice:
    names = [*files, *device_aliases()]
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5) or sorted(names)[:3]
    return InvalidDevice(
        f"There is no device {name!r} in the catalogue.",
        f"Nearest: {', '.join(near)}. `microbatch devices` lists all; a path to a .toml file of your own works too.",
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidDevice(f"The device file {path} cannot be read: {reason}.", "Check the path.") from error


def _parse_toml(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _broken(origin, f"it is not TOML: {error}", "Correct the file.") from error


def _check_keys(table: dict[str, Any], allowed: tuple[str, ...], origin: str, where: str) -> None:
    for key in table:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Allowed: {', '.join(allowed)}."
            raise _broken(origin, f"unknown key {where}{key}", hint)


def _check_name(document: dict[str, Any], origin: str, expected: str | None) -> None:
    names = [document.get("name"), *_aliases(document, origin)]
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _broken(origin, f"name {name!r} is not lower case with dashes", 'Write it like "a100-80gb-sxm".')
    if expected is not None and names[0] != expected:
        raise _broken(origin, f"name is {names[0]!r}", f"It must be the file's own name, {expected!r}.")


def _aliases(document: dict[str, Any], origin: str) -> list[Any]:
    aliases = document.get("aliases", [])
    if not isinstance(aliases, list):
        raise _broken(origin, f"aliases is {aliases!r}", 'Write a list, as in aliases = ["a100"].')
    return aliases


def _kind(document: dict[str, Any], origin: str) -> str:
    kind = document.get("kind", "gpu")
    if kind not in DEFAULTS:
        raise _broken(origin, f"kind is {kind!r}", f"Choose one of {', '.join(DEFAULTS)}.")
    return str(kind)


def _constants(document: dict[str, Any], kind: str, origin: str, sources: dict[str, str]) -> dict[str, float]:
    tables = document.get("constants", {})
    if not isinstance(tables, dict):
        raise _broken(origin, f"constants is {tables!r}", "Write tables such as [constants.gemm_efficiency].")
    _check_keys(tables, tuple(DEFAULTS[kind]), origin, "constants.")
    return {key: _figure(table, f"constants.{key}", origin, sources, whole=False) for key, table in tables.items()}


def _rates(document: dict[str, Any], origin: str, sources: dict[str, str]) -> dict[str, float]:
    tables = document.get("flops")
    if not isinstance(tables, dict) or not tables:
        raise _broken(origin, "flops has no dtype", "Add a table such as [flops.bf16] with value and source.")
    _check_keys(tables, tuple(DTYPE_BYTES), origin, "flops.")
    rates = {key: _figure(table, f"flops.{key}", origin, sources, whole=False) for key, table in tables.items()}
    for narrow in ("bf16", "fp16"):
        step = rates[narrow] / rates["tf32"] if "tf32" in rates and narrow in rates else 1.0
        if step > _HIGHEST_STEP:
            raise _broken(
                origin,
                f"flops.{narrow} is {step:.2g} times flops.tf32, which looks like a sparse rate",
                "Give the dense rate, half of the sparse one.",
            )
    return rates


def _figure(table: Any, key: str, origin: str, sources: dict[str, str], *, whole: bool) -> Any:
    """The value of one ``{value, source}`` table; its source goes into `sources`."""
    if not isinstance(table, dict):
        raise _broken(origin, f"{key} has no source", f"Write it as a table: [{key}] with value and source.")
    _check_keys(table, ("value", "source"), origin, f"{key}.")
    value, source = table.get("value"), table.get("source")
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 and math.isfinite(value)):
        raise _broken(origin, f"{key}.value is {value!r}", "Give a number above zero.")
    if whole and value != int(value):
        raise _broken(origin, f"{key}.value is {value!r}", "Give a whole number.")
    if not isinstance(source, str) or not source.strip():
        raise _broken(origin, f"{key} has no source", "Say where the figure comes from.")
    sources[key] = source
    return int(value) if whole else float(value)


def _broken(origin: str, what: str, remedy: str) -> InvalidDevice:
    return InvalidDevice(f"{origin}: {what}.", remedy)
