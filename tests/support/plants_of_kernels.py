"""Planted bugs of GPU kernels, which run in Triton's interpreter."""

from __future__ import annotations

from support.plant import Plant

KERNELS = (
    Plant(
        "the gradient of T5's bias without the last bucket of a tile",
        "megatron_lite/model/kernels/triton_attention.py",
        "for bucket in range(tl.min(found), tl.max(found) + 1):",
        "for bucket in range(tl.min(found), tl.max(found)):",
        ("tests/model/test_attention_blocks.py::test_a_bias_by_distance_and_its_gradient",),
    ),
    Plant(
        "dropout of attention under the rule equal on all tensor-parallel ranks",
        "megatron_lite/model/kernels/triton_attention.py",
        "stays = _stays(keys, salt, query, keyed, head + first_head, tokens, THRESHOLD)\n            dropped",
        "stays = _stays(keys, salt, query, keyed, head, tokens, THRESHOLD)\n            dropped",
        ("tests/model/test_attention_blocks.py::test_kernels_drop_the_weights_that_the_dense_plan_drops",),
    ),
    Plant(
        "gradients of two distances of one bucket written at once",
        "megatron_lite/model/kernels/rule_attention.py",
        "turn = torch.where(after - first == 1, 0, place - first + 1)",
        "turn = torch.where(after - first == 1, 0, place - place + 1)",
        ("tests/model/test_tables.py::test_gradients_of_every_table",),
    ),
    Plant(
        "a key meets the vector of the distance seen from the other side",
        "megatron_lite/model/layers/disentangled.py",
        "apart = torch.arange(longest, -longest - 1, -1)",
        "apart = torch.arange(-longest, longest + 1)",
        ("tests/model/test_tables.py::test_a_model_equals_its_dense_reference",),
    ),
    Plant(
        "a gate that multiplies before the activation",
        "megatron_lite/model/kernels/triton_kernels.py",
        "            d_up = dy * value\n",
        "            d_up = dy * slope\n",
        ("tests/model/test_kernels.py::test_activations",),
    ),
    Plant(
        "logits in parts have the weight's gradient of the last part alone",
        "megatron_lite/model/trunk/loss_in_parts.py",
        "begun=part.start > 0",
        "begun=False",
        ("tests/model/test_cross_entropy.py",),
    ),
)
