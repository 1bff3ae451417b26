"""muP: the parameters that are scaled with the width, so that a learning rate tuned on a narrow model transfers.

m is the width over that of the base model. Matrices whose two sides grow with the width (those of blocks, and of heads
before their last one) have 1 / sqrt(m) of the usual initial deviation, and their learning rates follow
(lr_multipliers.py). Other parameters are unchanged. Logits are divided by m (lm_head.py), and scores by the width of a
head instead of its root (`ModelConfig.query_factor`). At m = 1 nothing changes. The widths of the FFN and of all heads
together must grow in proportion to m.

Source: arXiv:2203.03466, table 8; microsoft/mup, MuSharedReadout.
"""

from __future__ import annotations


def is_hidden(name: str) -> bool:
    """Whether a parameter is a matrix whose two sides both grow with the width."""
    if name.startswith("heads."):
        return name.endswith(("dense.weight", "pooler.weight", "pool.weight"))
    is_matrix = name.startswith("layers.") and name.endswith(".weight")
    return is_matrix and "layernorm" not in name and not name.endswith("_adapter.up.weight")
