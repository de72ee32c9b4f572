"""Batches: which dimension they are, how to build one of another size, what out-of-memory is."""
