"""The web front: one application over any engine."""
