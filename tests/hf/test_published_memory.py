"""Training with XLNet's memory: loss and gradients of the class, which reads the memory first, without a gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.data.recipes import collate, make, text_of
from support.hf.published import random_model, xlnet_inputs

from data_utils.common.batch_fields import (
    BLOCK_POSITION_IDS,
    DOC,
    FIELDS,
    PADDING_DOC,
    SEGMENT_IDS,
    TARGETS,
    TOKENS,
    WEIGHTS,
)
from data_utils.common.settings import build
from data_utils.objectives import LOSSES
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.common.weights import Weights
from megatron_lite.hf.published.source import open_published
from megatron_lite.hf.published.tensor_map import to_ours
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.transformer import Transformer

# fp32, the same sums in another order; of the largest value.
TOLERANCE = 1e-5
SIZES = {"xlnet": 97, "xlnet, odd": 131}


@pytest.fixture(scope="module", params=list(SIZES))
def classes(request, tmp_path_factory):
    """Their model, and its directory as we read it."""
    path = tmp_path_factory.mktemp("published")
    theirs = random_model(request.param)
    theirs.save_pretrained(path)
    return theirs, open_published(path)


def rows(size):
    """Three texts in a row, of which two have a memory and some have exchanged their second parts."""
    window = [text_of(40, False), text_of(15, True, 1100), text_of(35, False, 1200)]
    fields = collate(make("xlnet", 110, memory_length=14, tokens_per_target=4), [window] * 3)
    fields[:, TOKENS] %= size
    fields[:, TARGETS] %= size
    return fields


def their_loss(theirs, fields):
    """The sum over all documents, each in two calls: the memory, and the rest with what the first has left."""
    total = torch.zeros(())
    for row in fields:
        for number in range(row[DOC].max() + 1):
            document = row[:, row[DOC] == number]
            is_memory = document[BLOCK_POSITION_IDS] == 1
            mems = None
            if is_memory.any():
                read = document[:, is_memory].astype(np.int64)
                inputs = {"input_ids": read[TOKENS], "token_type_ids": read[SEGMENT_IDS]}
                with torch.no_grad():
                    batch = {name: torch.from_numpy(x)[None] for name, x in inputs.items()}
                    mems = theirs(**batch, use_mems=True).mems
                assert len(mems[0]) == is_memory.sum()
            rest = document[:, ~is_memory]
            inputs, is_query = xlnet_inputs(rest[None])
            logits = theirs(**inputs, mems=mems, use_mems=True).logits[0]
            targets = torch.from_numpy(rest[TARGETS, is_query[0]].astype(np.int64))
            total = total + F.cross_entropy(logits, targets, reduction="sum")
    return total


def our_gradients(source, fields, *, has_memory, recompute="none", kernel="auto"):
    """Loss sum, and the gradients by name."""
    config = build(ModelConfig, {**source.settings, "attention_dropout": 0.0})
    model = Transformer(config, num_losses=len(LOSSES), has_memory=has_memory, recompute=recompute)
    weights = to_ours(source.theirs, source.mappings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_()
            parameter[: len(weights.read(name))] = weights.read(name)
    batch = Batch(fields)
    loss, _ = model(MicroBatch.from_batch(batch, torch.device("cpu"), config, kernel=kernel))
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def largest_difference(source, grads, theirs):
    """Of all gradients, over the largest of theirs."""
    of_theirs = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    expected = to_ours(Weights(source.theirs.shapes, of_theirs.__getitem__), source.mappings)
    largest = max(grad.abs().max() for grad in of_theirs.values())
    differences = [
        (grad[: len(expected.read(name))] - expected.read(name)).abs().max() / largest
        for name, grad in grads.items()
    ]
    return float(max(differences))


def test_loss_and_gradients_match_the_class(classes):
    theirs, source = classes
    fields = rows(theirs.config.vocab_size)
    assert fields.shape[1] == len(FIELDS) and (fields[:, DOC] == PADDING_DOC).any()
    assert (fields[:, WEIGHTS] != 0).sum() > 40
    theirs.zero_grad()
    expected = their_loss(theirs, fields)
    expected.backward()
    for options in ({}, {"recompute": "full"}, {"kernel": "dense"}):
        loss, grads = our_gradients(source, fields, has_memory=True, **options)
        assert loss == pytest.approx(expected.item(), rel=TOLERANCE)
        assert largest_difference(source, grads, theirs) <= TOLERANCE, options
    # What the memory is made of would learn too.
    loss, grads = our_gradients(source, fields, has_memory=False)
    assert loss == pytest.approx(expected.item(), rel=TOLERANCE)
    assert largest_difference(source, grads, theirs) > 1e-2
    # And it is read: without it the loss is another one.
    alone = fields.copy()
    alone[:, DOC][fields[:, BLOCK_POSITION_IDS] == 1] = PADDING_DOC
    assert abs(our_gradients(source, alone, has_memory=True)[0] / expected.item() - 1) > 1e-2
