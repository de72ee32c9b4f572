"""A device as the text of a TOML file, in the form that `microbatch.hardware.catalogue` reads."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from microbatch.errors import InvalidDevice
from microbatch.hardware.catalogue import parse_device
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.units import format_bytes, format_rate, format_seconds

_FIGURES = ("bandwidth", "memory_bytes", "multiprocessors", "cache_bytes", "link_bandwidth", "launch_seconds")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""What a comment of TOML may not hold; a tab may, and is not worth keeping."""
_DELETE = {0x7F: "\\u007F"}
"""The one control character that TOML wants escaped and JSON leaves alone."""


def device_toml(spec: DeviceSpec, *, heading: str = "") -> str:
    """The file's text; `parse_device` reads the same device from it.

    Args:
        spec: with a source for every figure that it has.
        heading: lines of comment at the top.

    Raises:
        InvalidDevice: the device breaks a rule of the catalogue, as one without a source.
    """
    text = "\n".join(_lines(spec, heading)) + "\n"
    parse_device(text, origin=spec.name, name=spec.name)
    return text


def write_device(spec: DeviceSpec, path: Path, *, heading: str = "") -> None:
    """Write the file whole or not at all.

    Raises:
        InvalidDevice: as `device_toml`, or a path that does not end in ``.toml``, by which a device's file is known.
    """
    check_path(path)
    text = device_toml(spec, heading=heading)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".toml")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def check_path(path: Path) -> None:
    """Refuse, before anything is measured, a file that could not be read as a device afterwards.

    Raises:
        InvalidDevice: another suffix, a folder, a missing folder, or one that cannot be written to.
    """
    if path.suffix != ".toml":
        raise InvalidDevice(f"{path} does not end in .toml.", f"Write to {path.with_suffix('.toml').name}.")
    if path.is_dir():
        raise InvalidDevice(f"{path} is a folder.", f"Name a file, as in {path / 'here.toml'}.")
    if not path.parent.is_dir():
        raise InvalidDevice(f"The folder {path.parent} does not exist.", f"Create it: mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise InvalidDevice(f"The folder {path.parent} cannot be written to.", "Choose another one.")


def _lines(spec: DeviceSpec, heading: str) -> Iterator[str]:
    yield from (f"# {_CONTROL.sub(' ', line)}".rstrip() for line in heading.splitlines())
    yield f"name = {_quoted(spec.name)}"
    yield 'rates = "dense"'
    yield f"kind = {_quoted(spec.kind)}"
    for dtype, rate in spec.flops.items():
        yield from _table(f"flops.{dtype}", rate, spec, format_rate(rate, "FLOP"))
    for key in _FIGURES:
        value = getattr(spec, key)
        if value is not None:
            yield from _table(key, value, spec, _READABLE.get(key, str)(value))
    for name, value in spec.constants.items():
        yield from _table(f"constants.{name}", value, spec)


def _table(key: str, value: float, spec: DeviceSpec, readable: str = "") -> Iterator[str]:
    yield ""
    yield f"[{key}]"
    yield f"value = {value!r}" + (f"  # {readable}" if readable and readable != repr(value) else "")
    yield f"source = {_quoted(spec.sources.get(key, ''))}"


_READABLE = {
    "bandwidth": lambda value: format_rate(value, "B"),
    "link_bandwidth": lambda value: format_rate(value, "B"),
    "memory_bytes": format_bytes,
    "cache_bytes": format_bytes,
    "launch_seconds": format_seconds,
}


def _quoted(text: str) -> str:
    """A basic string of TOML: JSON's escapes are among its own (toml.io, v1.0.0, String)."""
    return json.dumps(text, ensure_ascii=False).translate(_DELETE)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
