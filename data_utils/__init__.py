"""From text on disk to batches: tokenizers, indexed datasets, samplers, objectives, collation."""
