"""What a model does in one call, as functions of the batch and the sequence: operators, FLOPs, bytes. No torch."""
