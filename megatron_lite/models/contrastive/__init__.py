"""Vectors of texts, trained by pairs of texts."""
