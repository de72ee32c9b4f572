"""The engine: a queue, workers, and batches on their way from requests to answers."""
