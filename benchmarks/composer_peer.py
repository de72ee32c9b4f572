"""Composer's loop, where the package lies in its folder. It asks for torch below 2.7.1; without dependencies it runs.

    pip install --no-deps --target benchmarks/.envs/composer mosaicml "mosaicml-cli<0.8" torch_optimizer tenacity \\
        pytorch_ranger "coolname<3" tabulate "py-cpuinfo<10" "importlib_metadata<9" zipp argcomplete arrow backoff \\
        "gql<5" graphql-core prompt_toolkit "questionary<2.2" validators termcolor protobuf websockets wcwidth six
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.peer_job import IGNORED, Batch, Run, mean

FOLDER = Path(__file__).parent / ".envs" / "composer"


def is_installed() -> bool:
    """Whether the package lies in its folder."""
    return (FOLDER / "composer").is_dir()


def composer(run: Run) -> None:
    """``device_train_microbatch_size``; pieces weigh by their items."""
    _fit(run)


def composer_auto(run: Run) -> None:
    """``device_train_microbatch_size="auto"``."""
    _fit(run, device_train_microbatch_size="auto")


def composer_by_tokens(run: Run) -> None:
    """``accumulate_train_batch_on_tokens``, told how many targets a batch has."""
    _fit(run, accumulate_train_batch_on_tokens=True)


def _fit(run: Run, **settings: Any) -> None:
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    from composer import ComposerModel, DataSpec, Trainer  # type: ignore[import-not-found, unused-ignore]

    class Module(ComposerModel):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model

        def forward(self, batch: Batch) -> Any:
            return self.model(batch["tokens"])

        def loss(self, outputs: Any, batch: Batch) -> Tensor:
            return mean(outputs["logits"], batch["labels"])

    data = DataSpec(
        DataLoader(run.data, batch_size=run.rows * run.pieces),
        get_num_tokens_in_batch=lambda batch: int((batch["labels"] != IGNORED).sum()),
    )
    trainer = Trainer(
        model=Module(), train_dataloader=data, optimizers=run.optimizer, max_duration=f"{run.steps}ba", device="cpu",
        progress_bar=False, **({"device_train_microbatch_size": run.rows} | settings),
    )  # fmt: skip
    trainer.fit()
    trainer.close()
