"""muP: which parameters follow the width, so that settings found on a narrow model serve a wide one.

With m the width over that of the base model, matrices between two widths that grow (those of blocks, and of heads
before their last one) begin with 1 / sqrt(m) of the usual deviation, and their rates follow (lr_multipliers.py). All
other parameters are as usual. Logits are divided by m (lm_head.py), and scores by the width of a head instead of its
root (`ModelConfig.query_factor`). At m = 1 nothing changes. The FFN and all heads together keep their proportion to m.

Source: arXiv:2203.03466, table 8; microsoft/mup, MuSharedReadout.
"""

from __future__ import annotations


def is_hidden(name: str) -> bool:
    """Whether a parameter is a matrix whose two sides both grow with the width."""
    if name.startswith("heads."):
        return name.endswith(("dense.weight", "pooler.weight", "pool.weight"))
    is_matrix = name.startswith("layers.") and name.endswith(".weight")
    return is_matrix and "layernorm" not in name and not name.endswith("_adapter.up.weight")
