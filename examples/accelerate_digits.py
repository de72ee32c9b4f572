"""Handwritten digits under Accelerate: steps of 256 images, once in pieces of 16 and once whole.

pip install microbatch accelerate scikit-learn
python examples/accelerate_digits.py
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from microbatch.training.integrations.accelerated import train_step

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16), torch.tensor(digits.target))
EPOCHS, BATCH = 5, 256


def loss(output, batch):  # a sum, and what to divide it by
    return cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def train(micro_batch_size):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    scheduler = CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    step = train_step(
        accelerator,
        model,
        optimizer,
        loss,
        forward=lambda model, batch: model(batch[0]),
        micro_batch_size=micro_batch_size,
        max_norm=1.0,
        scheduler=scheduler,
    )
    for _ in range(EPOCHS):
        for batch in loader:
            result = step(batch)
    return accelerator.unwrap_model(model), result


model, result = train(micro_batch_size=16)
whole, _ = train(micro_batch_size=BATCH)
print(f"loss {result.loss:.4f} after {EPOCHS} epochs, {result.num_micro_batches} pieces in the last step")
apart = max((a - b).abs().max() for a, b in zip(model.parameters(), whole.parameters()))
print(f"weights differ from those of whole batches by {apart:.0e}")
