"""``microbatch devices``: the catalogue, or one device."""

from __future__ import annotations

import click

from microbatch.cli.options import as_json_option
from microbatch.cli.output import answer, print_json
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.units import format_bytes, format_rate


@click.command(short_help="The devices that are known.")
@click.argument("name", required=False)
@as_json_option
def command(name: str | None, as_json: bool) -> int:
    """List the devices that microbatch knows, or show one with the source of each figure.

    NAME is a name of the list, a short alias such as a100, or a TOML file of the same form.

    \b
    Example:
      microbatch devices
      microbatch devices h100-sxm --json
    """
    from microbatch.hardware.catalogue import device_names, load_device

    if name is not None:
        answer(load_device(name), (), as_json=as_json)
        return 0
    devices = [load_device(known) for known in device_names()]
    if as_json:
        print_json({"devices": [device.to_json() for device in devices]})
    else:
        print("\n".join(_table(devices)))
    return 0


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
