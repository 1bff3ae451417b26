"""Planted bugs of local layers."""

from __future__ import annotations

from support.plants.plant import Plant

WINDOW = "tests/transformer/test_attention_window.py"

WINDOWS = (
    Plant(
        "the window of local layers is one token short",
        "megatron_lite/transformer/attention_backends/layout.py",
        "abs(position - key_position) <= window",
        "abs(position - key_position) < window",
        (f"{WINDOW}::test_the_rule_within_a_window_is_the_one_written_out",),
    ),
    Plant(
        "local layers see all, and global ones what is near",
        "megatron_lite/transformer/attention_backends/window.py",
        "self.local_plan if layer % self.global_every else self.global_plan",
        "self.global_plan if layer % self.global_every else self.local_plan",
        (f"{WINDOW}::test_calls_of_local_layers_equal_softmax_over_the_rule",),
    ),
    Plant(
        "calls of local layers lack the last keys of their blocks",
        "megatron_lite/transformer/attention_backends/window.py",
        "last = query_positions.max() + window",
        "last = query_positions.max()",
        (f"{WINDOW}::test_calls_of_local_layers_equal_softmax_over_the_rule",),
    ),
    Plant(
        "CUDA's window where positions begin again",
        "megatron_lite/transformer/attention_backends/window.py",
        "return _steps_by_one(layout) and all(",
        "return all(",
        (f"{WINDOW}::test_kernels_of_cuda_compute_exactly_the_pairs_of_the_window",),
    ),
    Plant(
        "FLOPs of local layers are those of global ones",
        "megatron_lite/transformer/batch.py",
        "(near - self.visible_keys) * model.local_share",
        "(near - self.visible_keys) * 0",
        (f"{WINDOW}::test_flops_count_what_local_layers_see",),
    ),
)
