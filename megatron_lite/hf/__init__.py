"""GLM for the transformers library: configuration, model, tokenizers, and conversion both ways."""
