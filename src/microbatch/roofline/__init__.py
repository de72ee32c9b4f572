"""Time from arithmetic: tiles, waves, roofs. No torch in here."""
