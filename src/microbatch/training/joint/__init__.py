"""What of a step needs the whole batch at once: joint losses and exact batch normalisation."""
