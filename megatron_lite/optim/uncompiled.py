"""torch's optimizers without their wrappers for torch.compile, which nothing here uses.

The wrappers import torch._dynamo, and sympy with it: 3 CPU seconds and 100 MB in each process.
"""

from __future__ import annotations

import inspect

import torch


class Optimizer(torch.optim.Optimizer):
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class AdamW(Optimizer, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))  # type: ignore[assignment]
