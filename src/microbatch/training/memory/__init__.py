"""The size of a piece: predicted, searched, and found again when memory runs out."""
