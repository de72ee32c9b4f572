"""Generation: continuous batching over a paged cache, with answers that do not depend on the batch."""
