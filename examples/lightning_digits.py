"""Handwritten digits under Lightning: steps of 256 images, once in pieces of 16 and once whole.

pip install microbatch pytorch-lightning scikit-learn
python examples/lightning_digits.py
"""

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from microbatch.training.integrations.lightning_module import ExactSteps

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16), torch.tensor(digits.target))
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Digits(ExactSteps, LightningModule):
    def __init__(self, micro_batch_size):
        super().__init__()
        self.micro_batch_size = micro_batch_size
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()

    def sum_and_weight(self, batch):  # instead of training_step
        images, targets = batch
        return cross_entropy(self.layers(images), targets, reduction="sum"), len(targets)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(micro_batch_size):
    seed_everything(0, verbose=False)
    model = Digits(micro_batch_size)
    trainer = Trainer(max_epochs=5, accelerator="cpu", gradient_clip_val=1.0, log_every_n_steps=1, **QUIET)
    trainer.fit(model, DataLoader(data, batch_size=256, shuffle=True))
    return model, trainer.callback_metrics["train_loss"]


model, loss = train(micro_batch_size=16)
whole, _ = train(micro_batch_size=256)
print(f"loss {loss:.4f} after 5 epochs, {model.done.sizes.num_micro_batches} pieces in the last step")
apart = max((a - b).abs().max() for a, b in zip(model.parameters(), whole.parameters()))
print(f"weights differ from those of whole batches by {apart:.0e}")
