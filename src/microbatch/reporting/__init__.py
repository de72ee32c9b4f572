"""Results as text, pictures, one HTML page, JSON."""
