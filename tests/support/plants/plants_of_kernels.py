"""Planted bugs of GPU kernels, which run in Triton's interpreter."""

from __future__ import annotations

from support.plants.plant import Plant

KERNELS = (
    Plant(
        "the gradient of T5's bias without the last bucket of a tile",
        "megatron_lite/transformer/kernels/triton_attention.py",
        "for bucket in range(tl.min(index), tl.max(index) + 1):",
        "for bucket in range(tl.min(index), tl.max(index)):",
        ("tests/transformer/test_attention_blocks.py::test_a_bias_by_distance_and_its_gradient",),
    ),
    Plant(
        "dropout of attention under the rule equal on all tensor-parallel ranks",
        "megatron_lite/transformer/kernels/triton_attention.py",
        "of_head = (head + dropout.first_head).to(tl.uint32)",
        "of_head = head.to(tl.uint32)",
        (
            "tests/transformer/test_attention_blocks.py::test_kernels_drop_the_weights_that_the_dense_plan_drops",
        ),
    ),
    Plant(
        "gradients of two distances of one bucket written at once",
        "megatron_lite/transformer/kernels/rule_attention.py",
        "turn = torch.where(after - first == 1, 0, rank - first + 1)",
        "turn = torch.where(after - first == 1, 0, rank - rank + 1)",
        ("tests/transformer/test_tables.py::test_gradients_of_every_table",),
    ),
    Plant(
        "a key meets the vector of the distance seen from the other side",
        "megatron_lite/transformer/disentangled.py",
        "apart = torch.arange(longest, -longest - 1, -1)",
        "apart = torch.arange(-longest, longest + 1)",
        ("tests/transformer/test_tables.py::test_a_model_equals_its_dense_reference",),
    ),
    Plant(
        "pairs of an earlier segment read XLNet's numbers of the same",
        "megatron_lite/transformer/attention_backends/tables.py",
        "vector_count(longest) * (segments != 0)",
        "vector_count(longest) * (segments > 0)",
        ("tests/transformer/test_query_tables.py::test_every_gradient",),
    ),
    Plant(
        "a gate that multiplies before the activation",
        "megatron_lite/transformer/kernels/triton_kernels.py",
        "            d_up = dy * value\n",
        "            d_up = dy * slope\n",
        ("tests/transformer/test_kernels.py::test_activations",),
    ),
    Plant(
        "logits in parts have the weight's gradient of the last part alone",
        "megatron_lite/transformer/loss.py",
        "begun=chunk.start > 0",
        "begun=False",
        ("tests/transformer/test_cross_entropy.py",),
    ),
    Plant(
        "rotary positions whose gradient is turned the same way again",
        "megatron_lite/transformer/kernels/triton_qkv_heads.py",
        "token, tokens, -1.0, ROTATED",
        "token, tokens, 1.0, ROTATED",
        ("tests/transformer/test_head_kernels.py::test_operands_and_their_gradients",),
    ),
    Plant(
        "a norm of heads whose gradient leaves out what a head's numbers share",
        "megatron_lite/transformer/kernels/triton_qkv_heads.py",
        "even = (even - x_even * projection) * root",
        "even = even * root",
        ("tests/transformer/test_head_kernels.py::test_operands_and_their_gradients",),
    ),
    Plant(
        "sums over tokens without those of the last turn's programs",
        "megatron_lite/transformer/kernels/triton_kernels.py",
        "for first in range(0, programs, ROWS):",
        "for first in range(0, programs - programs % ROWS if programs > ROWS else programs, ROWS):",
        ("tests/transformer/test_kernels.py::test_sums_of_several_kernels_are_finished_at_once",),
    ),
    Plant(
        "a kernel that takes keys of dropout for other rows",
        "megatron_lite/transformer/kernels/triton_kernels.py",
        "((width,), x_bias, weight, bias), ((rows,), keys))",
        "((width,), x_bias, weight, bias))",
        ("tests/transformer/test_kernels_beside.py::test_every_kernel_refuses_gaps_and_other_sizes",),
    ),
)
