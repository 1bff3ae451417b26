"""The distributed model and the training loop."""
