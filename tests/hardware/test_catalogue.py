"""The catalogue against published figures, and the rules that every device file keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from microbatch.errors import InvalidDevice
from microbatch.hardware.catalogue import device_aliases, device_names, load_device, parse_device
from microbatch.units import DTYPE_BYTES

MIB = 2**20

RIDGES = {
    "t4": 217, "v100-16gb-sxm": 139, "v100-32gb-sxm": 139, "a10": 208, "a40": 215, "a100-40gb-sxm": 201,
    "a100-80gb-pcie": 161, "a100-80gb-sxm": 153, "l4": 403, "l40s": 419, "h100-pcie": 378, "h100-nvl": 214,
    "h100-sxm": 295, "h200": 206, "b200": 281, "gb200": 312, "b300": 281, "rtx-4090": 164, "mi210": 113,
    "mi250x": 117, "mi300x": 247, "mi325x": 218, "mi350x": 288, "mi355x": 312, "gaudi2": 176, "gaudi3": 453,
    "trainium2": 230, "tpu-v4": 229, "tpu-v5e": 240, "tpu-v5p": 164, "tpu-v6e": 575,
}  # fmt: skip
"""16-bit ridge, F/BW, as published with the rates."""

REPORTED_MIB = {"a100-80gb-sxm": 81_920, "h100-sxm": 81_559, "h200": 143_771, "b200": 183_359, "mi300x": 196_592,
                "l40s": 46_068, "l4": 23_034, "a10": 23_028}  # fmt: skip

GOOD = """
name = "mine"
rates = "dense"
[flops.bf16]
value = 100e12
source = "measured here"
[flops.tf32]
value = 50e12
source = "measured here"
[bandwidth]
value = 1e12
source = "measured here"
"""


def _half_width_rate(name: str) -> float:
    flops = load_device(name).flops
    return flops.get("bf16") or flops["fp16"]


@pytest.mark.parametrize("name", device_names())
def test_a_device_has_a_source_for_every_figure(name: str) -> None:
    spec = load_device(name)
    assert spec.name == name
    figures = [f"flops.{dtype}" for dtype in spec.flops]
    figures += [f"constants.{name}" for name in spec.constants]
    figures += [key for key in ("bandwidth", "memory_bytes", "multiprocessors", "cache_bytes", "link_bandwidth")
                if getattr(spec, key) is not None]  # fmt: skip
    assert set(spec.sources) == set(figures)
    assert all(source.strip() and "://" not in source for source in spec.sources.values())
    assert set(spec.flops) <= set(DTYPE_BYTES)


@pytest.mark.parametrize(("name", "ridge"), RIDGES.items())
def test_the_16_bit_ridge_is_the_published_one(name: str, ridge: int) -> None:
    intensity = _half_width_rate(name) / load_device(name).bandwidth
    assert round(intensity) == ridge
    assert 10 <= intensity <= 700


def test_the_table_of_ridges_holds_every_device_with_a_16_bit_rate() -> None:
    with_rate = {name for name in device_names() if {"bf16", "fp16"} & set(load_device(name).flops)}
    assert with_rate == set(RIDGES)
    assert len(device_names()) >= 30


@pytest.mark.parametrize("name", [n for n in device_names() if n[0] in "abhl" or n.startswith("gb")])
def test_bf16_is_twice_tf32_on_data_centre_nvidia(name: str) -> None:
    flops = load_device(name).flops
    if "tf32" in flops and "bf16" in flops:
        assert flops["bf16"] / flops["tf32"] == pytest.approx(2, rel=0.025)


@pytest.mark.parametrize(("name", "mib"), REPORTED_MIB.items())
def test_memory_is_what_the_device_reports(name: str, mib: int) -> None:
    assert load_device(name).memory_bytes == mib * MIB


@pytest.mark.parametrize("name", sorted(set(device_names()) - set(REPORTED_MIB) - {"a100-80gb-pcie"}))
def test_memory_from_a_label_is_decimal_and_says_so(name: str) -> None:
    spec = load_device(name)
    assert spec.memory_bytes is not None and spec.memory_bytes % 10**9 == 0
    assert "lower bound" in spec.sources["memory_bytes"]


def test_unverified_figures_are_absent() -> None:
    assert "fp32" not in load_device("b200").flops
    assert "int8" not in load_device("b300").flops
    assert load_device("rtx-5090").flops == {"fp32": 104.8e12}
    assert load_device("h100-nvl").multiprocessors is None
    assert load_device("l40s").cache_bytes is None


def test_the_link_is_one_direction() -> None:
    assert load_device("a100").link_bandwidth == 300e9
    assert load_device("tpu-v5p").link_bandwidth == 90e9


def test_aliases_lead_to_their_device() -> None:
    assert device_aliases() == {"a100": "a100-80gb-sxm", "h100": "h100-sxm"}
    assert load_device("h100") == load_device("h100-sxm")


def test_no_alias_hides_a_device() -> None:
    assert not set(device_aliases()) & set(device_names())


@pytest.mark.parametrize(("name", "near"), [("h10", "h100"), ("A100", "a100"), ("l40", "l40s"), ("mi300", "mi300x")])
def test_an_unknown_name_gets_the_nearest_ones(name: str, near: str) -> None:
    with pytest.raises(InvalidDevice) as caught:
        load_device(name)
    assert repr(name) in caught.value.message and near in caught.value.remedy


@pytest.mark.parametrize("name", ["", "../t4", "devices/t4", "t4\n"])
def test_a_name_is_never_a_path(name: str) -> None:
    with pytest.raises(InvalidDevice, match="no device"):
        load_device(name)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD + '[launch_seconds]\nvalue = 4e-6\nsource = "measured here"\n')
    spec = load_device(path)
    assert (spec.name, spec.flops["bf16"], spec.launch_seconds) == ("mine", 100e12, 4e-6)
    assert load_device(str(path)) == spec


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (GOOD.replace('rates = "dense"', ""), "rates is None"),
        (GOOD.replace('"dense"', '"sparse"'), "rates is 'sparse'"),
        (GOOD.replace("value = 100e12", "value = 200e12"), "flops.bf16 is 4 times flops.tf32"),
        (GOOD.replace('source = "measured here"', "", 1), "flops.bf16 has no source"),
        (GOOD.replace('"measured here"', '"  "', 1), "flops.bf16 has no source"),
        (GOOD.replace("flops.bf16", "flops.bf61"), "unknown key flops.bf61"),
        (GOOD.replace("[bandwidth]", "[bandwith]"), "unknown key bandwith"),
        (GOOD.replace("value = 1e12", "valu = 1e12"), "unknown key bandwidth.valu"),
        (GOOD.replace("value = 1e12", "sparse = true\nvalue = 1e12"), "unknown key bandwidth.sparse"),
        (GOOD.replace("value = 1e12", 'value = "1 TB/s"'), "bandwidth.value is '1 TB/s'"),
        (GOOD.replace("value = 1e12", "value = 0"), "bandwidth.value is 0"),
        (GOOD.replace("value = 1e12", "value = nan"), "bandwidth.value is nan"),
        (GOOD.replace("value = 1e12", "value = true"), "bandwidth.value is True"),
        (GOOD.replace('"mine"', '"My GPU"'), "name 'My GPU'"),
        (GOOD.replace('name = "mine"', ""), "name None"),
        (GOOD.replace('name = "mine"', 'name = "mine"\naliases = "m"'), "aliases is 'm'"),
        (GOOD[: GOOD.index("[flops")] + GOOD[GOOD.index("[bandwidth") :], "flops has no dtype"),
        (GOOD[: GOOD.index("[bandwidth")], "bandwidth is missing"),
        (GOOD[: GOOD.index("[bandwidth")].replace("rates", "bandwidth = 1e12\nrates"), "bandwidth has no source"),
        (GOOD + '[memory_bytes]\nvalue = 1.5\nsource = "x"\n', "memory_bytes.value is 1.5"),
        ("name = ", "not TOML"),
    ],
)
def test_a_broken_file_gives_one_line_with_file_and_key(broken: str, says: str) -> None:
    with pytest.raises(InvalidDevice) as caught:
        parse_device(broken, origin="mine.toml")
    assert caught.value.message.startswith("mine.toml: ") and says in caught.value.message
    assert caught.value.remedy and "\n" not in str(caught.value)


def test_a_catalogue_file_carries_its_own_name() -> None:
    with pytest.raises(InvalidDevice, match="file's own name, 't4'"):
        parse_device(GOOD, origin="t4.toml", name="t4")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidDevice, match="No such file"):
        load_device(tmp_path / "missing.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidDevice, match="not UTF-8"):
        load_device(binary)


def test_json_holds_what_the_command_line_promises() -> None:
    document = json.loads(json.dumps(load_device("t4").to_json()))
    promised = {
        "name",
        "flops",
        "bandwidth",
        "memory_bytes",
        "multiprocessors",
        "cache_bytes",
        "link_bandwidth",
        "sources",
    }
    assert promised <= set(document)
    assert document["link_bandwidth"] is None


def test_the_catalogue_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from microbatch.hardware.catalogue import load_device; load_device('t4');"
        "sys.exit(int(bool({'torch', 'numpy', 'matplotlib'} & set(sys.modules))))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )
