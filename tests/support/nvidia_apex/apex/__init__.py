"""A stand-in for NVIDIA apex, in plain torch, with the interface of its source (github.com/NVIDIA/apex).

A process that has `tests/support/nvidia_apex` in its path imports this package as `apex`.
"""

from . import multi_tensor_apply, normalization, optimizers  # noqa: F401
