"""A decoder reads what its class of transformers makes of the labels: they are shifted right by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.data import recipes
from support.hf.published import T5
from transformers import BartForConditionalGeneration, T5Config, T5ForConditionalGeneration
from transformers.models.bart.modeling_bart import shift_tokens_right

SENTINELS = {"sentinel_first": recipes.SIZE - 1}


def of_t5(labels):
    """T5's class pads with its first token; here `sop` stands for both."""
    config = T5Config(**{**T5, "vocab_size": 8, "pad_token_id": recipes.SPECIAL.sop})
    config.decoder_start_token_id = recipes.SPECIAL.sop
    return T5ForConditionalGeneration(config).prepare_decoder_input_ids_from_labels(labels)


def of_bart(labels):
    assert BartForConditionalGeneration  # whose forward calls it
    return shift_tokens_right(labels, recipes.SPECIAL.pad, recipes.SPECIAL.sop)


def of_mass(labels, before):
    """Labels are a fragment of the text: its decoder reads the token before it first (arXiv:1905.02450, figure 1)."""
    return shift_tokens_right(labels, recipes.SPECIAL.pad, before)


@pytest.mark.parametrize("name", ["t5", "ul2", "bart", "mass"])
def test_a_decoder_reads_its_labels_shifted_right(name):
    section = SENTINELS if name in ("t5", "ul2") else {}
    text = recipes.text_of(30)
    examples = recipes.many(recipes.make(name, 64, **section), text, 40)
    assert max((example.ord > 0).sum() for example in examples) > 4
    for example in examples:
        in_decoder = example.ord > 0
        labels = torch.from_numpy(example.targets[in_decoder].astype(np.int64))[None]
        read = example.tokens[in_decoder]
        assert len(read) > 0 and (example.weights[in_decoder] == 1).all()
        if name == "mass":
            expected = of_mass(labels, int(read[0]))
            whole = [recipes.SPECIAL.cls, *text.tolist()]  # CLS is before the first token
            assert int(read[0]) == whole[whole.index(int(labels[0, 0])) - 1]
        else:
            expected = (of_bart if name == "bart" else of_t5)(labels)
        assert read.tolist() == expected[0].tolist()
