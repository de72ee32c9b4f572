"""The one owner of what out-of-memory is."""

from __future__ import annotations

import errno
import gc
import re
import traceback

import torch

from microbatch.errors import RankOutOfMemory

_RULES: tuple[tuple[str, str], ...] = (
    # PyTorch's caching allocators raise OutOfMemoryError; older or native paths raise RuntimeError with these texts.
    ("CUDA", r"\bCUDA out of memory\b|\bCUDA (driver )?error: out of memory\b"),
    ("CUDA", r"\bcudaErrorMemoryAllocation\b|\bcudaErrorOutOfMemory\b|\bCUDA_ERROR_OUT_OF_MEMORY\b"),
    ("HIP", r"\bHIP out of memory\b|\b(HIP|hip) error: out of memory\b"),
    ("HIP", r"\bhipErrorMemoryAllocation\b|\bhipErrorOutOfMemory\b"),
    ("XPU", r"\bXPU out of memory\b|\bUR_RESULT_ERROR_OUT_OF(_DEVICE|_HOST)?_(MEMORY|RESOURCES)\b"),
    ("MPS", r"\bMPS backend out of memory\b"),
    ("cuDNN", r"\bcuDNN error: CUDNN_STATUS_(NOT_SUPPORTED|ALLOC_FAILED)\b"),
    ("cuBLAS", r"\b(CUBLAS|HIPBLAS|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED\b|\bCUFFT_ALLOC_FAILED\b"),
    ("CPU allocator", r"\bDefaultCPUAllocator: (can't allocate memory|not enough memory)"),
    ("oneDNN", r"\bcould not create a (primitive|memory object)\b(?! descriptor)"),
    ("oneDNN", r"\bcould not execute a primitive: out_of_memory\b"),
    ("bad_alloc", r"^\s*std::bad_alloc\b"),
)
"""Who ran out, and what its RuntimeError says.

cuDNN answers NOT_SUPPORTED where its workspace did not fit and oneDNN "could not create a primitive" where its
scratchpad did not; both also have other causes, so a caller that sees them at its smallest size should say so.
"""


def out_of_memory_rule(error: BaseException) -> str | None:
    """Who could not allocate, as in ``"CUDA"`` or ``"CPU allocator"``; None for any other error.

    The class and the text must both fit: a ValueError that merely speaks of memory is no allocation failure. An
    exception raised ``from`` an allocation failure counts too: compilers wrap what they caught.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if (rule := _own_rule(cause)) is not None:
            return rule
        seen.add(id(cause))
        cause = cause.__cause__
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory could not be allocated, on a CPU or an accelerator."""
    return out_of_memory_rule(error) is not None


def _own_rule(error: BaseException) -> str | None:
    if isinstance(error, RankOutOfMemory):
        return "a rank"
    if isinstance(error, MemoryError):
        return "Python"
    if isinstance(error, OSError):
        return "operating system" if error.errno == errno.ENOMEM else None
    if isinstance(error, torch.OutOfMemoryError):
        return _by_text(error) or "device allocator"
    return _by_text(error) if isinstance(error, RuntimeError) else None


def _by_text(error: BaseException) -> str | None:
    text = str(error)
    return next((name for name, pattern in _RULES if re.search(pattern, text)), None)


def drop_frames(error: BaseException) -> None:
    """Empty the frames that an exception and those behind it hold: their local variables are tensors of the try."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        current.__traceback__ = None
        waiting += [current.__cause__, current.__context__]


def release(device: torch.device | str) -> None:
    """Give back what a failed size left behind: reference cycles, then the device's cached blocks.

    Call it after the ``except`` block has ended, else the exception's traceback still holds the tensors.
    """
    gc.collect()
    kind = torch.device(device).type
    if kind not in ("cpu", "meta"):
        torch.get_device_module(kind).empty_cache()
