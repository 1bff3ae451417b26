"""Activation checkpointing: the backward pass computes activations again instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(enabled: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments). With `enabled` the backward pass calls the function again, and no activations are kept."""
    if enabled and torch.is_grad_enabled():
        # No random state is saved: dropout is a hash and draws the same again (dropout.py). Not reentrant, so that
        # gradients reach the variables that the function closes over.
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return function(*arguments)
