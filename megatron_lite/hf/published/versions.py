"""The oldest version of transformers that computes an export correctly, found by tests/hf/test_other_transformers.py.

Fields of config.json that versions name differently are in the systems' tables (`FormerField`), and both are written.
The table here lists what no file can mend: classes that a version lacks, or whose architecture differs in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lite.config.model import ModelConfig

OLDEST = "4.46"
# Beginning of the name of a class -> the first version, of those tried, that has it and has it right.
_CLASSES = {
    "EuroBert": "5.8", "ModernBertDecoder": "4.55", "ModernBert": "4.48", "Glm4": "4.51", "Qwen3": "4.51",
}  # fmt: skip


def oldest_version(class_name: str, config: ModelConfig, config_json: Mapping[str, Any]) -> str:
    """The first version of transformers, of those tried, that computes an export with this config.json."""
    found = next((version for name, version in _CLASSES.items() if class_name.startswith(name)), OLDEST)
    if class_name == "ModernBertForQuestionAnswering":
        return "4.51"
    if class_name == "DebertaV2ForMaskedLM" and not config_json.get("legacy", True):
        return "5.20"  # before, the head of these names takes the bias of its layer for that of words
    if class_name.startswith("ModernBertDecoder") and config.rotary_base_local not in (
        None,
        config.rotary_base,
    ):
        return "5.0"  # before, local layers turn by the base of global ones
    if class_name.startswith("T5") and config.scale_head and not config.tie_word_embeddings:
        return "5.0"  # before, one field decides both
    if (
        class_name.startswith("GlmFor")
        and config.head_size * config.num_attention_heads != config.hidden_size
    ):
        return "4.48"
    return found
