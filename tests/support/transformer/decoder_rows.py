"""Small models of the objectives that write, and by hand the row of training that predicts an answer's token."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from data_utils.common.batch_fields import DOC, FIELDS, GRP, ORD, POSITION_IDS, SEGMENT_IDS, TOKENS, WEIGHTS
from data_utils.objectives import OBJECTIVES
from data_utils.tokenizers.special_tokens import SpecialTokens
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.transformer import Transformer

TWO_STACKS = {"decoder_layers": 2, "segments": 2}
# Objective -> options of its model. T5 and UniLMv2 have relative positions; BART's layers are post-norm.
MODELS = {
    "causal": {},
    "prefix_lm": {"positions": "rotary", "num_key_value_heads": 2},
    "unilm": {"segments": 6, "norm": "post", "embedding_norm": True},
    "unilmv2": {"segments": 2, "relative": "buckets", "norm": "post", "embedding_norm": True},
    "t5": {**TWO_STACKS, "positions": "none", "relative": "buckets", "unscaled_scores": True, "segments": 1},
    "bart": {**TWO_STACKS, "norm": "post", "embedding_norm": True, "scale_embedding": True},
    "mass": {**TWO_STACKS, "embedding_norm": True},
    "blank_infilling": {"positions": "learned_blocks"},
}


SPECIAL = SpecialTokens(cls=1, sep=2, mask=3, smask=4, gmask=5, sop=6, eop=7, eos=8, pad=0, unk=9, dblock=10)
TEXTS = [[20, 21, 22], [30], [11, 12, 13, 14, 15, 16, 17], [25, 26, 27, 28]]


def make_run(objective, lacking=(), special=SPECIAL, model=None, **section):
    sizes = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": 40,
        "max_position": 30,
    }
    config = ModelConfig(
        **{"positions": "learned", **sizes, "init_std": 0.3, **MODELS[objective], **(model or {})}
    )
    model = Transformer(config).eval()
    initialize_parameters(model.named_parameters(), config, 5)
    choice = SimpleNamespace(name=objective, section=OBJECTIVES[objective].config_class(**section))
    return SimpleNamespace(
        config=SimpleNamespace(model=config), model=model, objectives=(choice,),
        tokenizer=SimpleNamespace(special=special, lacking=frozenset(lacking)),
        checkpoint=SimpleNamespace(path="runs/some"),
    )  # fmt: skip


def row(objective, special, text, answer):
    """The training row in which the next token is predicted: tokens, positions, ord, grp, segments, by hand."""
    n = len(answer)
    if objective == "causal":
        tokens = [special.eos, *text, *answer]
        return tokens, range(len(tokens)), range(len(tokens)), None, None
    if objective == "prefix_lm":
        tokens = [special.cls, *text, special.sop, *answer]
        return tokens, range(len(tokens)), [*[0] * (1 + len(text)), *range(1, n + 2)], None, None
    source = {"t5": [*text, special.eos], "bart": [special.cls, *text, special.eos]}.get(
        objective, [special.cls, *text, special.sep]
    )
    none = [0] * len(source)
    if objective.startswith("unilm"):
        last = n + 1
        tokens, order = [*source, *answer, special.mask], [*none, *range(1, last), last]
        grp = None
        if objective == "unilmv2":  # a pseudo mask is seen by none but itself
            order[-1], grp = -last, [*[0] * (len(tokens) - 1), last]
        kinds = (4, 5) if objective == "unilm" else (0, 1)
        segments = [*[kinds[0]] * len(source), *[kinds[1]] * last]
        return tokens, range(len(tokens)), order, grp, segments
    start = special.cls if objective == "mass" else special.sop
    segments = None if objective == "t5" else [*none, *[1] * (n + 1)]
    return (
        [*source, start, *answer],
        [*range(len(source)), *range(n + 1)],
        [*none, *range(1, n + 2)],
        None,
        segments,
    )


@torch.no_grad()
def next_logits(run, text, answer):
    tokens, positions, order, grp, segments = row(run.objectives[0].name, run.tokenizer.special, text, answer)
    fields = np.zeros((1, len(FIELDS), len(tokens)), np.int32)
    fields[0, TOKENS], fields[0, POSITION_IDS], fields[0, ORD] = tokens, list(positions), list(order)
    fields[0, GRP] = 0 if grp is None else grp
    fields[0, SEGMENT_IDS] = 0 if segments is None else segments
    fields[0, DOC] = 0
    fields[0, WEIGHTS, -1] = np.float32(1.0).view(np.int32)
    inputs = MicroBatch.from_batch(Batch(fields), torch.device("cpu"), run.model.config)
    hidden = run.model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)
    return run.model.logits(hidden[inputs.loss_positions.tokens.long()])[0].float()
