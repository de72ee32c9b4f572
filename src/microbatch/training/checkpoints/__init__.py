"""A training run saved and gone on with, by any number of ranks and in any pieces."""
