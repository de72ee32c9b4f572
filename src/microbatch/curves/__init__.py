"""Curves of time against batch size: the data, the fit, the cliffs, the choice. No torch in here."""
