"""Offline inference over a data set, in the fastest pieces that fit."""
