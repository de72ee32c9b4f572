"""What explains a time: overhead, kernels, page faults, layers."""

from __future__ import annotations

import functools
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from microbatch.measure.output import captured, give_back, without_lines
from microbatch.measure.timer import synchronize

_CALL = "microbatch.call"
_NOT_OPERATORS = ("autograd::", "microbatch.")
_COMPILED = "## Call CompiledFxGraph"
"""A graph of torch.compile: its kernels are not recorded one by one, so the whole counts as one operator.
Its full name ends with a hash that differs from size to size."""

Interval = tuple[float, float]


def measure_overhead(call: Callable[[], object], device: torch.device | str = "cpu", *, repeats: int = 5) -> float:
    """Seconds of one call in which no operator ran (on CUDA: no kernel): Python, dispatch, sleeping, waiting.

    From the timeline of torch's profiler: the call's time less the union of its operators' intervals, less what the
    profiler itself spends around an operator and around a call (measured once per process). The least of `repeats`
    calls, since other processes only add to it, after one that warms the profiler up.
    """
    kind = torch.device(device).type
    events = _timeline(call, device, 1 + repeats)
    busy = union(_intervals(event for event in events if _is_work(event, kind)))
    per_operator, per_call = _profiler_costs(kind)
    gaps = [_gap(span, busy, per_operator) for span in _intervals(_calls(events))[1:]]
    return max(0.0, min(gaps) - per_call)


def _gap(span: Interval, busy: list[Interval], cost: float) -> float:
    inside = [(start, end) for start, end in busy if span[0] <= start < span[1]]
    return span[1] - span[0] - sum(end - start + cost for start, end in inside)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same time: (0, 2), (1, 3), (5, 6) → (0, 3), (5, 6)."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def kernel_names(call: Callable[[], object], device: torch.device | str = "cpu") -> tuple[str, ...]:
    """What did the work in one call, the most expensive first.

    On CUDA the kernels. On a CPU the operators by their own time, then the implementations that oneDNN chose, as in
    ``matmul brg_matmul:avx512_core_bf16``; MKL tells nothing about its choice.
    """
    kind = torch.device(device).type
    events = [event for event in _timeline(call, device) if _is_work(event, kind)]
    spans = [(event.start_thread_id(), event.start_ns(), event.end_ns(), event.name()) for event in events]
    names = tuple(
        dict.fromkeys(_COMPILED if name.startswith(_COMPILED) else name for name in _by_value(own_times(spans)))
    )
    return names if kind != "cpu" else names + implementations(_verbose(call))


def own_times(spans: Iterable[tuple[int, int, int, str]]) -> dict[str, int]:
    """Time by name, less what nested spans of the same thread took; a span is (thread, start, end, name)."""
    totals: dict[str, int] = defaultdict(int)
    open_spans: list[tuple[int, int, str]] = []
    for thread, start, end, name in sorted(spans, key=lambda span: (span[0], span[1], -span[2])):
        while open_spans and (open_spans[-1][0] != thread or open_spans[-1][1] <= start):
            open_spans.pop()
        totals[name] += end - start
        if open_spans:
            totals[open_spans[-1][2]] -= end - start
        open_spans.append((thread, end, name))
    return dict(totals)


def implementations(verbose: Iterable[str]) -> tuple[str, ...]:
    """``primitive implementation`` of oneDNN's verbose lines, the most expensive first.

    A line is ``onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx2,...,milliseconds``; older versions have
    no ``v1,primitive``.
    """
    seconds: dict[str, float] = defaultdict(float)
    for line in verbose:
        fields = line.strip().split(",")
        if "exec" in fields:
            at = fields.index("exec")
            seconds[f"{fields[at + 2]} {fields[at + 3]}"] += float(fields[-1])
    return _by_value(seconds)


def count_page_faults(call: Callable[[], object], *, repeats: int = 3) -> float:
    """Minor page faults of one call, the mean of `repeats`: memory that the allocator fetched anew."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(repeats):
        call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / repeats


def count_allocator_retries(call: Callable[[], object], device: torch.device | str = "cpu") -> int | None:
    """Times in one call that the CUDA allocator gave its cache back and tried again; None on other devices."""
    if torch.device(device).type != "cuda":
        return None
    before = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    call()
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0) - before)


def layer_seconds(model: nn.Module, call: Callable[[], object], device: torch.device | str = "cpu") -> dict[str, float]:
    """Forward seconds of one call by module name, for modules that called no other module.

    A module's calls add up. Modules are timed by wrapping ``forward``, since hooks would switch off the fast path of
    nn.TransformerEncoderLayer; such a layer is then reported as one. On CUDA each module waits for the device, so
    the sum is above the time of the whole.

    Args:
        model: the module that `call` runs, not compiled.
    """
    seconds: dict[str, float] = {}
    parents: set[str] = set()
    with _timed(model, seconds, parents, device):
        call()
    return {name: value for name, value in seconds.items() if name not in parents}


def _by_value(values: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(sorted(values, key=lambda name: -values[name]))


@contextmanager
def _timed(model: nn.Module, seconds: dict[str, float], parents: set[str], device: Any) -> Iterator[None]:
    running: list[str] = []
    wrapped = []
    for name, module in model.named_modules():
        own = module.__dict__.get("forward")
        module.forward = _timing(name, module.forward, seconds, parents, running, device)
        wrapped.append((module, own))
    try:
        yield
    finally:
        for module, own in wrapped:
            del module.forward
            if own is not None:
                module.forward = own


def _timing(
    name: str,
    forward: Callable[..., Any],
    seconds: dict[str, float],
    parents: set[str],
    running: list[str],
    device: Any,
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def timed(*args: Any, **kwargs: Any) -> Any:
        parents.update(running)
        running.append(name)
        synchronize(device)
        start = time.perf_counter()
        try:
            result = forward(*args, **kwargs)
            synchronize(device)
        finally:
            running.pop()
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
        return result

    return timed


def _timeline(call: Callable[[], object], device: torch.device | str, repeats: int = 1) -> list[Any]:
    """The profiler's events of some calls, each within a span named `_CALL`."""
    activities = [ProfilerActivity.CPU]
    if torch.device(device).type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    synchronize(device)
    with (
        without_lines(2, "USDT:"),  # torch 2.13 announces its profiler on standard error
        torch.profiler.profile(activities=activities, acc_events=True) as profiler,
    ):
        for _ in range(repeats):
            with record_function(_CALL):
                call()
                synchronize(device)
    inner = profiler.profiler
    assert inner is not None and inner.kineto_results is not None
    return list(inner.kineto_results.events())


def _calls(events: Iterable[Any]) -> list[Any]:
    """The spans of the calls on the host (on CUDA the profiler repeats them for the device)."""
    host = DeviceType.CPU
    return [event for event in events if event.name() == _CALL and event.device_type() == host]


def _intervals(events: Iterable[Any]) -> list[Interval]:
    return sorted((event.start_ns() * 1e-9, event.end_ns() * 1e-9) for event in events)


def _is_work(event: Any, kind: str) -> bool:
    if kind == "cuda":
        return bool(event.device_type() == DeviceType.CUDA) and event.name() != _CALL
    name = event.name()
    return ("::" in name and not name.startswith(_NOT_OPERATORS)) or name.startswith(_COMPILED)


@functools.cache
def _profiler_costs(kind: str) -> tuple[float, float]:
    """Seconds that the profiler spends outside of the interval of one operator, and within an empty call.

    A hundred operators of next to no work, with the profiler and without: the difference falls before the start
    and after the end that the profiler notes. Zero on a device whose kernels run beside the host.
    """
    if kind != "cpu":
        return 0.0, 0.0
    count, tiny = 100, torch.zeros(1)  # short enough that many of the repeats are not interrupted

    def calls() -> None:
        for _ in range(count):
            tiny.abs_()

    plain = min(_wall(calls) for _ in range(50))
    empty = _profiled_wall(lambda: None)
    return max(0.0, (_profiled_wall(calls) - empty - plain) / count), empty


def _wall(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _profiled_wall(call: Callable[[], object]) -> float:
    return min(end - start for start, end in _intervals(_calls(_timeline(call, "cpu", 50))))


def _verbose(call: Callable[[], object]) -> list[str]:
    """What oneDNN says during a call; it writes from C, so the file descriptor is captured."""
    if not torch.backends.mkldnn.is_available():
        return []
    with captured(1) as output, torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        call()
    lines = output.text.splitlines(keepends=True)
    give_back(1, [line for line in lines if not line.startswith(("onednn_verbose", "dnnl_verbose"))])
    return [line for line in lines if line.startswith(("onednn_verbose", "dnnl_verbose"))]
