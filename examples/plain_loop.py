"""Handwritten digits in a plain loop: steps of 256 images, once in pieces of 16 and once whole.

pip install microbatch scikit-learn
python examples/plain_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import microbatch

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16), torch.tensor(digits.target))


def loss(output, batch):  # a sum, and what to divide it by
    return cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def train(micro_batch_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    step = microbatch.TrainStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        loss,
        forward=lambda model, batch: model(batch[0]),
        micro_batch_size=micro_batch_size,
        max_norm=1.0,
    )
    for _ in range(5):
        for batch in DataLoader(data, batch_size=256, shuffle=True):
            result = step(batch)
    return model, result


model, result = train(micro_batch_size=16)
whole, _ = train(micro_batch_size=256)
print(f"loss {result.loss:.4f} after 5 epochs, {result.num_micro_batches} pieces in the last step")
apart = max((a - b).abs().max() for a, b in zip(model.parameters(), whole.parameters()))
print(f"weights differ from those of whole batches by {apart:.0e}")
