"""Disentangled attention: buckets, packed documents, dropout of the embeddings, FLOPs, and options that do not fit."""

import numpy as np
import pytest
import torch
from support.hf.small_deberta import SIZES, packed, small_model
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from data_utils.common.batch_fields import DOC, TOKENS
from data_utils.common.errors import ConfigError
from data_utils.common.settings import build
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.attention_backends.plan import dense_reason, kernel_of
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.disentangled import distance_buckets
from megatron_lite.transformer.flops import step_flops
from megatron_lite.transformer.kernels import fused
from megatron_lite.transformer.micro_batch import MicroBatch

CPU = torch.device("cpu")


@pytest.mark.parametrize(("buckets", "positions"), [(256, 512), (32, 64), (0, 30), (8, 160), (4, 4)])
def test_buckets_match_the_class_of_transformers(buckets, positions):
    """Also of distances beyond all that the line has."""
    distance = torch.arange(-5 * positions, 5 * positions + 1)
    theirs = make_log_bucket_position(distance, buckets, positions).long() if buckets else distance
    most = buckets or positions
    line = distance_buckets(buckets, positions, CPU)
    found = line[distance.clamp(-2 * positions, 2 * positions) + 2 * positions]
    assert torch.equal(found, (theirs + most).clamp(0, 2 * most - 1))
    assert found.min() == 0 and found.max() == 2 * most - 1


@pytest.mark.parametrize("kernel", ["dense", "cpu"])
@pytest.mark.parametrize("own", [False, True])
def test_packed_documents_are_those_that_are_alone(own, kernel):
    """Loss and every gradient; the second document is twice as long as the longest distance of its own bucket."""
    lengths = [7, 41, 12]
    model = small_model(position_projections=own, output_dropout=0)
    together = model(MicroBatch.from_batch(Batch(packed(lengths, 64)), CPU, model.config, kernel=kernel))[0]
    together.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    whole, alone = packed(lengths, 64), 0.0
    for number, length in enumerate(lengths):
        fields = packed([length], length)
        fields[:, TOKENS] = whole[:, TOKENS][whole[:, DOC] == number]
        one = model(MicroBatch.from_batch(Batch(fields), CPU, model.config, kernel="dense"))[0]
        one.backward()
        alone += one.detach()
    assert torch.allclose(together, alone, rtol=1e-5)
    for name, parameter in model.named_parameters():
        difference = (parameter.grad - found[name]).abs().max()
        assert difference <= 1e-5 * max(1.0, parameter.grad.abs().max()), name


def test_embeddings_are_dropped_out_in_each_layer_and_step_alike_for_all_samples():
    """The other places have no dropout here, so that rows with one text show no other difference."""
    model, fields = small_model(output_dropout=0.5), np.repeat(packed([12], 12), 2, axis=0)
    rows = []
    model.layers[0].attention.query_key_value.register_forward_hook(
        lambda module, given, out: rows.append(given[0]) if len(given[0]) == 16 else None
    )
    model.layers[1].attention.query_key_value.register_forward_hook(
        lambda module, given, out: rows.append(given[0]) if len(given[0]) == 16 else None
    )
    for seed in (1, 1, 2):
        model(MicroBatch.from_batch(Batch(fields), CPU, model.config, dropout_seed=seed))
    first, second, again, _, other, _ = ((x == 0).float() for x in rows)
    assert all(0.3 < x.mean() < 0.7 for x in (first, second, other))
    assert torch.equal(first, again) and not torch.equal(first, second) and not torch.equal(first, other)


def test_flops_count_the_buckets_that_a_token_needs():
    """Two products more for each visible pair, but no more than there are buckets."""
    few, none = (build(ModelConfig, {**SIZES, **o}) for o in ({}, {"relative": "none", **NO_BUCKETS}))
    for keys, counted in ((10, 10), (40, 16)):
        more = step_flops(few, 100, 0, 100 * keys) - step_flops(none, 100, 0, 100 * keys)
        assert more == pytest.approx(6 * 2 * 24 * 2 * 100 * counted)
    own = build(ModelConfig, {**SIZES, "position_projections": True})
    assert step_flops(own, 100, 0, 1000) == step_flops(few, 100, 0, 1000)


def test_cuda_reads_tables_and_says_where_it_computes_all_pairs():
    config, device = small_model().config, torch.device("cuda")
    assert kernel_of(config, device) == "tables" and dense_reason(config, device) is None
    fused.choose_kernels("torch")
    try:
        assert kernel_of(config, device) == "dense"
        assert "model.relative is disentangled" in dense_reason(config, device)
    finally:
        fused.choose_kernels("fused")


NO_BUCKETS = {"position_buckets": 0, "position_norm": False}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"relative": "none"}, "model.position_buckets is 8 with model.relative none; set relative to dis"),
        ({"relative": "none", "position_buckets": 0}, "model.position_norm is True with model.relative none"),
        (
            {"position_buckets": 7},
            "model.position_buckets is 7 with model.max_position (19); it must be even",
        ),
        ({"position_buckets": 40}, "model.position_buckets is 40 with model.max_position (19)"),
        ({"positions": "rotary"}, "model.positions is rotary with model.relative disentangled"),
        ({"num_key_value_heads": 1}, "model.num_key_value_heads is 1 with model.relative disentangled"),
        ({"query_key_norm": True}, "model.query_key_norm is True with model.relative disentangled"),
        ({"decoder_layers": 1}, "model.relative is disentangled with model.decoder_layers"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(options, words):
    with pytest.raises(ConfigError) as error:
        build(ModelConfig, {**SIZES, **options}, "model.")
    assert words in str(error.value) and "\n" not in str(error.value)
