"""Makes torchvision importable beside a torch that its compiled part was not built for.

PyPI's torchvision is built against PyPI's torch, with CUDA. Beside a CPU build of torch its compiled operators cannot
be loaded, and then ``import torchvision`` fails, as do timm and transformers, which import it. Its Python models need
none of those operators. Declaring those that the import asks for, without a kernel, lets everything else work; a model
that does call one is refused by torch, by name.
"""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import suppress

_ASKED_FOR = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[object] = []
"""Libraries live as long as this module: a declaration ends with its object."""


def make_torchvision_importable() -> None:
    """Call it before an import that may lead to torchvision; does nothing where torchvision is missing or sound."""
    if _declared or importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        _declare()
    except ImportError:  # a torchvision for another Python or another torch: whoever needs it will say so
        return


def _declare() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _ASKED_FOR:
        with suppress(RuntimeError):  # declared by somebody else
            library.define(schema)
    _declared.append(library)
