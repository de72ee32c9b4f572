"""The one owner of what out-of-memory is."""

from __future__ import annotations

import gc
import re

import torch

_TEXTS: tuple[tuple[type[BaseException], str], ...] = (
    # PyTorch's caching allocators raise OutOfMemoryError; older or native paths raise RuntimeError with these texts.
    (RuntimeError, r"\b(CUDA|HIP|XPU|MPS)( backend)? out of memory"),
    (RuntimeError, r"(CUDA|HIP|hip) error: out of memory"),
    (RuntimeError, r"\b(cuda|hip)ErrorOutOfMemory\b|\bCUDA_ERROR_OUT_OF_MEMORY\b|\bhipErrorMemoryAllocation\b"),
    (RuntimeError, r"\b(UR_RESULT_ERROR_OUT_OF(_DEVICE|_HOST)?_(MEMORY|RESOURCES))\b"),
    (RuntimeError, r"\bcuDNN error: CUDNN_STATUS_(NOT_SUPPORTED|ALLOC_FAILED)\b"),
    (RuntimeError, r"\b(CUBLAS|HIPBLAS|CUSOLVER|CUSPARSE|CUFFT)_(STATUS_)?ALLOC_FAILED\b"),
    (RuntimeError, r"DefaultCPUAllocator: (can't allocate memory|not enough memory)"),
    (RuntimeError, r"could not create a (primitive|memory object)|could not execute a primitive: out_of_memory"),
    (RuntimeError, r"\bstd::bad_alloc\b"),
    (OSError, r"\[Errno 12\]"),
)
"""Exception class and pattern, both needed: a ValueError that merely speaks of memory is no allocation failure.

cuDNN answers NOT_SUPPORTED where its workspace did not fit and oneDNN "could not create a primitive" where its
scratchpad did not; both also have other causes, so a caller that sees them at its first size should say so.
"""

_CLASSES: tuple[type[BaseException], ...] = (MemoryError, torch.OutOfMemoryError)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory could not be allocated, on a CPU or an accelerator.

    An exception raised ``from`` an allocation failure counts too: compilers wrap what they caught.
    """
    if isinstance(error, _CLASSES):
        return True
    text = str(error)
    if any(isinstance(error, kind) and re.search(pattern, text) for kind, pattern in _TEXTS):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def release(device: torch.device | str) -> None:
    """Give back what a failed size left behind: reference cycles, then the device's cached blocks.

    Call it after the ``except`` block has ended, else the exception's traceback still holds the tensors.
    """
    gc.collect()
    kind = torch.device(device).type
    if kind != "cpu":
        torch.get_device_module(kind).empty_cache()
