"""The row of ``gpu_check.py`` for pipelines: exact on every device that there is, and timed by the device's clock."""

from __future__ import annotations

from typing import Any


def pipeline(device: str, *, tiny: bool) -> dict[str, Any]:
    """A pipeline over two devices, or with two stages on the only one: gradients of one process, times that add up.

    Args:
        device: cuda or cpu.
        tiny: small sizes, for a CPU.
    """
    import torch

    from microbatch.pipeline.execution.launch import launch

    ranks = 1 if device != "cpu" and torch.cuda.device_count() < 2 else 2
    found: dict[str, Any] = launch(_steps, ranks, tiny)[0]
    assert found["exact"], f"gradients differ by {found['largest_difference']}"
    assert 0 < found["makespan"] <= 1.1 * found["step_seconds"], f"{found} does not add up"
    found["compiled"] = launch(_compiled, ranks, tiny)[0]
    assert found["compiled"]["exact"], f"gradients of compiled stages differ: {found['compiled']}"
    return found


def _steps(tiny: bool) -> dict[str, Any]:
    """What each rank does."""
    from microbatch.training.pipeline_run import Wanted, run_pipeline

    size = "depth=4,width=32" if tiny else "depth=8,width=4096"
    run = run_pipeline(
        Wanted(model=f"mlp:{size}", schedule="interleaved", chunks=2, num_micro_batches=4,
               batch_size=16 if tiny else 1024, check=True)
    )  # fmt: skip
    assert run.exact is not None
    return {
        "device": run.device, "exact": run.exact.exact, "largest_difference": run.exact.largest_difference,
        "makespan": run.timeline.makespan, "step_seconds": run.seconds, "simulated_seconds": run.simulated_seconds,
        "peak_bytes": [one.peak for one in run.memory],
    }  # fmt: skip


def _compiled(tiny: bool) -> dict[str, Any]:
    """Two steps with compiled layers, timed at the second, and their gradients held against one process."""
    import time

    import torch
    from torch import nn

    from microbatch.pipeline.execution.pipeline import Pipeline
    from microbatch.training.pipeline_run import _device
    from microbatch.training.step import TrainStep

    torch.manual_seed(0)
    width, items = (32, 16) if tiny else (4096, 1024)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(4)]
    batch = torch.randn(items, width)
    pipe = Pipeline(
        nn.Sequential(*layers), batch, schedule="interleaved", chunks=2, num_micro_batches=4, device=_device()
    )
    pipe.compile(backend="aot_eager" if tiny else "inductor")
    step = TrainStep(pipe, torch.optim.AdamW, lambda output, batch: (output.square().sum(), len(batch)))
    step(batch)
    began = time.perf_counter()
    step(batch)
    seconds = time.perf_counter() - began
    report = step.check(batch)
    return {"exact": report.exact, "largest_difference": report.largest_difference, "step_seconds": seconds}
