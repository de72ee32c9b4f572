"""Out-of-memory, and what only looks like it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch

from microbatch.batch.oom import drop_frames, is_out_of_memory, out_of_memory_rule, release
from microbatch.errors import RankOutOfMemory

pytestmark = pytest.mark.alone

ALLOCATION_FAILURES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    torch.cuda.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB (GPU 0; 15.90 GiB total capacity)"),
    RuntimeError("HIP out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError("XPU out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: 1.00 GB)"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4000000000000 bytes."),
    RuntimeError("could not create a primitive"),
    RuntimeError("could not create a memory object"),
    RuntimeError("could not execute a primitive: out_of_memory"),
    RuntimeError("UR error: UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"),
    RuntimeError("HIP error: out of memory"),
    RuntimeError("hipErrorOutOfMemory"),
    RuntimeError("cuBLAS error: HIPBLAS_STATUS_ALLOC_FAILED"),
    RuntimeError("std::bad_alloc"),
    RankOutOfMemory("Rank 1 ran out of memory.", "All ranks take smaller pieces."),
    MemoryError(),
    MemoryError("Unable to allocate 7.28 TiB for an array"),
    OSError(12, "Cannot allocate memory"),
]

OTHER_FAILURES = [
    ValueError("CUDA out of memory"),
    ValueError("the memory argument must not be None"),
    TypeError("std::bad_alloc"),
    KeyError("out of memory"),
    RuntimeError("could not create a primitive descriptor for a matmul primitive"),
    RuntimeError("could not execute a primitive"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"),
    RuntimeError("The option 'out of memory' is not known"),
    RuntimeError("a handler for std::bad_alloc is already set"),
    RuntimeError("memory format option is only supported by strided tensors"),
    RuntimeError("unable to mmap 128 bytes: file is out of range"),
    RuntimeError("cuda:0 and cpu: expected all tensors to be on the same device"),
    OSError("[Errno 12] in a file's name"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    RuntimeError("the memory bank of this layer is out of date"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    OSError(2, "No such file or directory"),
    KeyboardInterrupt(),
]


def named(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:40]}"


@pytest.mark.parametrize("error", ALLOCATION_FAILURES, ids=named)
def test_allocation_failures_are_known(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHER_FAILURES, ids=named)
def test_nothing_else_is_taken_for_one(error: BaseException) -> None:
    assert not is_out_of_memory(error)


RULES = {
    "CUDA out of memory. Tried to allocate 20.00 MiB.": "CUDA",
    "MPS backend out of memory (MPS allocated: 17.00 GB": "MPS",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling": "cuBLAS",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.": "cuDNN",
    "DefaultCPUAllocator: can't allocate memory": "CPU allocator",
    "could not create a primitive": "oneDNN",
    "std::bad_alloc": "bad_alloc",
    "shapes cannot be multiplied": None,
}


@pytest.mark.parametrize("text", RULES)
def test_the_rule_names_who_ran_out(text: str) -> None:
    assert out_of_memory_rule(RuntimeError(text)) == RULES[text]


def test_causes_that_go_round_end() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    assert not is_out_of_memory(one)


def test_frames_of_an_exception_and_of_its_causes_are_emptied() -> None:
    class Big:
        pass

    kept: list[weakref.ref[Big]] = []

    def inner() -> None:
        big = Big()
        kept.append(weakref.ref(big))
        raise MemoryError

    def outer() -> None:
        big = Big()
        kept.append(weakref.ref(big))
        try:
            inner()
        except MemoryError as error:
            raise RuntimeError("compiler failed") from error

    with pytest.raises(RuntimeError) as caught:
        outer()
    assert all(reference() is not None for reference in kept)
    drop_frames(caught.value)
    assert all(reference() is None for reference in kept)


def test_a_wrapped_failure_is_known() -> None:
    wrapped = RuntimeError("backend compiler failed")
    assert not is_out_of_memory(wrapped)
    wrapped.__cause__ = MemoryError()
    assert is_out_of_memory(wrapped)


def in_capped_memory(root: Path, body: str) -> str:
    """Standard output of some lines in a process whose address space may grow by 400 MB only."""
    lines = """
        import resource, torch
        from microbatch.batch.oom import is_out_of_memory, release
        torch.set_num_threads(1)
        torch.nn.Linear(8, 8)(torch.zeros(2, 8))
        held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + 400_000_000,) * 2)
    """
    code = textwrap.dedent(lines) + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is enforced on Linux only")
def test_real_failures_under_a_capped_address_space(root: Path) -> None:
    output = in_capped_memory(
        root,
        """
        layer = torch.nn.Linear(1000, 1000)
        calls = {
            "tensor": lambda: torch.empty(200_000_000),
            "model": lambda: layer(torch.zeros(60_000, 1000)),
            "python": lambda: bytearray(1_000_000_000),
            "shape": lambda: layer(torch.zeros(2, 999)),
        }
        for name, call in calls.items():
            try:
                call()
                print(name, "worked")
            except BaseException as error:
                failed = is_out_of_memory(error)
                print(name, failed)
            release("cpu")
        print("after", float(layer(torch.ones(1000, 1000)).isfinite().all()))
        """,
    )
    assert output.split("\n")[:-1] == ["tensor True", "model True", "python True", "shape False", "after 1.0"]


def test_release_collects_what_only_a_cycle_holds() -> None:
    class Holder:
        def __init__(self) -> None:
            self.me = self

    import gc

    gc.disable()
    try:
        alive = weakref.ref(Holder())
        assert alive() is not None
        release("cpu")
        assert alive() is None
    finally:
        gc.enable()
