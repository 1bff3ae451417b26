"""All published systems, by the model_type of config.json and by `model.system`.

A table (bert.py, gpt.py, ...) is read in both directions. A rule maps one module of ours to one or several of theirs;
which of its parameters (weight, bias) exist follows from the model's options. tensor_map.py, read_config.py and
write_config.py apply the tables; system_table.py defines their types.

Source: the modeling files of transformers 5.23, and NeoBERT's repository.
"""

from __future__ import annotations

from data_utils.common.errors import CheckpointError
from data_utils.common.setting_files import shown
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.common.system_table import PublishedSystem
from megatron_lite.hf.published.bert import (
    ALBERT,
    BERT,
    CAMEMBERT,
    DEBERTA,
    ELECTRA,
    ERNIE,
    ROBERTA,
    XLM_ROBERTA,
)
from megatron_lite.hf.published.encoder_decoders import BART, MT5, T5
from megatron_lite.hf.published.experts import GLM4_MOE, OLMOE, QWEN3_MOE
from megatron_lite.hf.published.glm4 import GLM4, GLM4_0414
from megatron_lite.hf.published.gpt import GPT, GPT2
from megatron_lite.hf.published.llama import LLAMAS
from megatron_lite.hf.published.modernbert import MODERNBERT, MODERNBERT_DECODER
from megatron_lite.hf.published.neobert import NEOBERT
from megatron_lite.hf.published.xlnet import XLNET

PUBLISHED: dict[str, PublishedSystem] = {  # by the model_type of config.json
    system.model_type: system
    for system in (
        *(BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, ELECTRA, DEBERTA, ALBERT, ERNIE, GPT, GPT2, XLNET, BART, T5, MT5),
        *(*LLAMAS, NEOBERT, MODERNBERT, MODERNBERT_DECODER, GLM4, GLM4_0414, GLM4_MOE, QWEN3_MOE, OLMOE),
    )
}  # fmt: skip
SYSTEMS_BY_NAME: dict[str, PublishedSystem] = {  # by `model.system`
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm_roberta": XLM_ROBERTA,
    "camembert": CAMEMBERT,
    "spanbert": BERT,
    "electra": ELECTRA,
    "electra_generator": ELECTRA,
    "deberta_v3": DEBERTA,
    "albert": ALBERT,
    "ernie": ERNIE,
    "ernie2": ERNIE,
    "unilm": BERT,
    "gpt": GPT,
    "gpt2": GPT2,
    "xlnet": XLNET,
    "bart": BART,
    "mass": BART,
    "t5": T5,
    "t5_1_1": T5,
    "mt5": MT5,
    "glm4": GLM4,
    "glm4_0414": GLM4_0414,
    "modernbert_decoder": MODERNBERT_DECODER,
    **{system.model_type: system for system in (*LLAMAS, NEOBERT, MODERNBERT, GLM4_MOE, QWEN3_MOE, OLMOE)},
}


def published_system(config: ModelConfig) -> PublishedSystem:
    """The table of a model. Raises: CheckpointError if it has none."""
    if config.system not in SYSTEMS_BY_NAME:
        raise CheckpointError(
            f"model.system is {shown(config.system)}; set it to one of {', '.join(SYSTEMS_BY_NAME)} to export the "
            "model of a published system."
        )
    return SYSTEMS_BY_NAME[config.system]
