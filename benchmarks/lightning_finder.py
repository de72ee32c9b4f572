"""What batch size Lightning's own finder names for a model, up to a number of rows.

Needs the package, which the project itself does not: ``pip install --no-deps --target benchmarks/.envs/lightning
pytorch-lightning torchmetrics lightning-utilities tqdm``.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from microbatch.models.loaded import Loaded
from microbatch.models.torchvision_operators import make_torchvision_importable
from microbatch.profiling.workload import Workload

FOLDER = Path(__file__).parent / ".envs" / "lightning"


def is_installed() -> bool:
    """Whether the package lies in its folder."""
    return (FOLDER / "pytorch_lightning").is_dir()


def find(loaded: Loaded, rows: int, mode: str = "power") -> int:
    """The finder's answer for a data set of `rows` rows; `mode` is ``power`` (doubling) or ``binsearch``."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    make_torchvision_importable()  # Lightning's metrics import it where it is installed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pytorch_lightning as lightning  # type: ignore[import-not-found, unused-ignore]
        from pytorch_lightning.tuner.tuning import Tuner  # type: ignore[import-not-found, unused-ignore]

        with Workload(loaded.model, loaded.args, loaded.kwargs) as work:

            class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
                def __init__(self) -> None:
                    super().__init__()
                    self.batch_size, self.model = 2, work.model
                    self.unused = torch.nn.Parameter(torch.zeros(()))

                def training_step(self, batch: Any, _: int) -> torch.Tensor:
                    args, kwargs = batch
                    self.model(*args, **kwargs)
                    return self.unused * 1.0

                def configure_optimizers(self) -> torch.optim.Optimizer:
                    return torch.optim.SGD([self.unused], lr=0.0)

                def train_dataloader(self) -> DataLoader[Any]:
                    collate = lambda indices: work.example(len(indices))  # noqa: E731
                    return DataLoader(range(rows), batch_size=self.batch_size, collate_fn=collate)  # type: ignore[arg-type]

            logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
            with tempfile.TemporaryDirectory() as folder:
                trainer = lightning.Trainer(
                    accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
                )  # fmt: skip
                found = Tuner(trainer).scale_batch_size(Module(), mode=mode, steps_per_trial=3)
    return int(found or 0)
