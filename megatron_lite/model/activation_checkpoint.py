"""Activations that the backward pass computes again instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(again: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), which the backward pass computes `again` instead of what it would keep."""
    if again and torch.is_grad_enabled():
        # No random state is saved: dropout is a hash and draws the same again (dropout.py). Not reentrant, so that
        # gradients reach what the function closes over.
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return function(*arguments)
