"""Training: the optimizer step of the whole batch, computed in micro-batches."""
