"""Exact steps where people already are: transformers, Lightning, Accelerate."""
