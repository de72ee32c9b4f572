"""The main job: sweep the batch sizes, explain the curve, compare two curves, write other stacks' settings."""
