"""Measures one thing at a time: seconds, bytes, load, peaks."""
