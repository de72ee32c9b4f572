"""``microbatch devices``: the catalogue, one device, or this machine measured."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from microbatch.cli.options import as_json_option
from microbatch.cli.output import answer, print_json
from microbatch.errors import InvalidSettings
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.units import format_bytes, format_rate

_HEADING = "This machine, measured by `microbatch devices --measure`."


@click.command(short_help="The devices that are known, or this machine measured.")
@click.argument("name", required=False)
@click.option(
    "--measure",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Measure this machine, for about a minute, and write it to FILE (.toml).",
)
@click.option("--device", help="What to measure: cpu (the default) or a CUDA device, as in cuda:0.")
@click.option("--threads", type=int, metavar="N", help="Measure torch with so many threads.")
@as_json_option
def command(name: str | None, measure: Path | None, device: str | None, threads: int | None, as_json: bool) -> int:
    """List the devices that microbatch knows, or show one with the source of each figure.

    NAME is a name of the list, a short alias such as a100, or a TOML file of the same form, as --measure writes it.

    \b
    Example:
      microbatch devices
      microbatch devices h100-sxm --json
      microbatch devices --measure here.toml
    """
    from microbatch.hardware.catalogue import device_names, load_device

    if measure is not None:
        _check_alone(name)
        return _measure(measure, device or "cpu", threads, as_json=as_json)
    _check_measured(device, threads)
    if name is not None:
        answer(load_device(name), (), as_json=as_json)
        return 0
    devices = [load_device(known) for known in device_names()]
    if as_json:
        print_json({"devices": [device.to_json() for device in devices]})
    else:
        print("\n".join(_table(devices)))
    return 0


def _measure(path: Path, device: str, threads: int | None, *, as_json: bool) -> int:
    from microbatch.hardware.writer import check_path, write_device

    check_path(path)
    from microbatch.cli.progress import measuring
    from microbatch.measure.calibrate import measure_device

    with measuring() as progress:
        spec, warnings = measure_device(device, threads=threads, progress=progress)
    write_device(
        spec, path, heading="\n".join(("This machine, measured by `microbatch devices --measure`.", *warnings))
    )
    answer(spec, (), as_json=as_json)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if not as_json:
        print(f"Wrote {path}")
    return 0


def _check_alone(name: str | None) -> None:
    if name is not None:
        raise InvalidSettings(
            f"--measure measures this machine, not {name!r}.", f"Leave {name!r} out, or leave --measure out."
        )


def _check_measured(device: str | None, threads: int | None) -> None:
    for option, value in (("--device", device), ("--threads", threads)):
        if value is not None:
            raise InvalidSettings(f"{option} {value} says what to measure.", "Add --measure FILE.")


def _table(devices: list[DeviceSpec]) -> list[str]:
    from microbatch.reporting.table import Table
    from microbatch.reporting.text import align

    rows = tuple((d.name, *_peak(d), format_rate(d.bandwidth, "B"), _memory(d)) for d in devices)
    columns = ("device", "fastest dense rate", "dtype", "bandwidth", "memory")
    return align(Table(title=f"{len(devices)} devices", columns=columns, rows=rows))


def _peak(device: DeviceSpec) -> tuple[str, str]:
    dtype = max(device.flops, key=lambda name: device.flops[name])
    return format_rate(device.flops[dtype], "FLOP" if dtype.startswith(("fp", "bf", "tf")) else "OP"), dtype


def _memory(device: DeviceSpec) -> str:
    return "" if device.memory_bytes is None else format_bytes(device.memory_bytes)
