"""Our model computes what the class of transformers does, and its tensors come back bit-equal, for every system."""

import copy

import numpy as np
import pytest
import torch
import transformers
from support.data.recipes import collate, make, text_of, windows
from support.hf.published import CASES, as_in_files, write_random, xlnet_logits
from transformers.models.t5.modeling_t5 import T5Attention

from data_utils.common.batch_fields import (
    DOC,
    FIELDS,
    GRP,
    ORD,
    PADDING_DOC,
    POSITION_IDS,
    SEGMENT_IDS,
    TOKENS,
)
from data_utils.common.settings import build
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.common.weights import Weights
from megatron_lite.hf.published.segment_memory import read_segment
from megatron_lite.hf.published.source import open_published
from megatron_lite.hf.published.tensor_map import to_ours
from megatron_lite.hf.published.verify_inputs import our_output, scatter_targets, text_batch, their_output
from megatron_lite.transformer.attention_backends.layout import allowed
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.micro_batch import prepare
from megatron_lite.transformer.transformer import Transformer

# fp32, the same sums in another order; times the largest value beyond 1. Where the class itself rounds off more, twice
# that: two computations that are both right differ by the sum of their errors.
TOLERANCE = 1e-5


def loaded(source, **options):
    """Our model with the weights of a directory. Args: options: besides those that it has."""
    model = Transformer(build(ModelConfig, {**source.settings, "attention_dropout": 0.0, **options}))
    weights = to_ours(source.theirs, source.mappings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_()
            if name not in weights.shapes:
                continue
            read = weights.read(name)
            parameter[: len(read)] = read  # rows that pad the vocabulary stay 0
    return model


@pytest.fixture(scope="module", params=list(CASES))
def both(request, tmp_path_factory):
    """Their model, its directory as we read it, and ours with its weights."""
    path = tmp_path_factory.mktemp("published")
    theirs = write_random(request.param, path)
    source = open_published(path)
    return theirs, source, loaded(source)


def scores_of_class(theirs, config, batch, real):
    """The logits of the class at the positions `real`, then those of its head on pairs of sentences."""
    out = their_output(theirs, config, batch)
    expected = out["logits"] if "logits" in out else out["prediction_logits"]
    if config.decoder_layers:
        expected = scatter_targets(expected, batch)
    sentences = [out[name] for name in ("seq_relationship_logits", "sop_logits") if name in out]
    return [expected[real], *sentences]


def weighted_sum(scores):
    """A loss in which each score has a weight of its own."""
    total = 0.0
    for score in scores:
        weights = torch.from_numpy(np.random.default_rng(1).normal(size=tuple(score.shape))).to(score)
        total = total + (score * weights / score.numel() ** 0.5).sum()
    return total


def gradients(module):
    # XLNet's query vector has none where no row predicts.
    named = dict(module.named_parameters(remove_duplicate=False))
    return as_in_files({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()})


def test_logits_and_gradients_match_the_class(both):
    theirs, source, model = both
    config = model.config
    batch = text_batch(config)
    batch[:, TOKENS] += 4 * (batch[:, TOKENS] < 4)  # their padding row has no gradient from the input side
    real = torch.from_numpy(batch[:, DOC] != PADDING_DOC)
    if config.decoder_layers:
        real &= torch.from_numpy(batch[:, ORD] > 0)
    # What fp32 rounds off in the class itself: random weights of some classes make steep functions.
    exact = copy.deepcopy(theirs).double()

    hidden, logits = our_output(model, batch)
    ours = [logits[real]]
    if config.sentence_classes:
        ours.append(model.heads.sentence(model.final_layernorm(hidden[:, 0])))
    expected, exactly = (scores_of_class(module, config, batch, real) for module in (theirs, exact))
    for actual, score, exact_score in zip(ours, expected, exactly, strict=True):
        rounding = (score - exact_score).abs().max()
        limit = max(TOLERANCE * max(1.0, score.abs().max()), 2 * rounding)
        assert (actual - score).abs().max() <= limit

    for scores in (ours, expected, exactly):
        weighted_sum(scores).backward()
    of_theirs, of_exact = gradients(theirs), gradients(exact)
    largest = max(grad.abs().max() for grad in of_theirs.values())
    rounding = max((grad - of_exact[name]).abs().max() for name, grad in of_theirs.items())
    limit = max(TOLERANCE * largest, 2 * rounding)
    expected_grads = to_ours(Weights(source.theirs.shapes, of_theirs.__getitem__), source.mappings)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # moved by counts
            continue
        expected_grad = expected_grads.read(name)
        assert (parameter.grad[: len(expected_grad)] - expected_grad).abs().max() <= limit, name


def test_both_streams_of_xlnet(tmp_path):
    """Rows that predict begin from one vector, see the others in the drawn order, and are seen by nobody."""
    theirs = write_random("xlnet", tmp_path)
    source = open_published(tmp_path)
    model = loaded(source)
    length, targets = 13, [2, 8, 5, 11]
    rank = np.zeros(length, np.int32)
    rank[targets] = np.arange(1, 5)
    batch = np.zeros((2, len(FIELDS), length + 4), np.int32)
    rng = np.random.default_rng(3)
    batch[:, TOKENS, :length] = rng.integers(5, 97, (2, length))
    batch[:, POSITION_IDS] = [*range(length), *targets]
    batch[:, SEGMENT_IDS] = batch[:, POSITION_IDS] > 6
    batch[:, ORD] = [*rank, *(-rank[targets])]
    order = torch.from_numpy(rank)
    hidden = ((order[None] > 0) & (order[None] >= order[:, None])).float()
    mapping = torch.zeros(2, 4, length)
    mapping[:, range(4), targets] = 1.0
    out = theirs(
        torch.from_numpy(batch[:, TOKENS, :length].astype(np.int64)),
        perm_mask=hidden.expand(2, length, length),
        target_mapping=mapping,
        token_type_ids=torch.from_numpy(batch[:, SEGMENT_IDS, :length].astype(np.int64)),
    ).logits
    for kernel in ("dense", "cpu"):
        prepared = prepare(Batch(batch), torch.device("cpu"), model.config, kernel=kernel)
        inputs = prepared.to(torch.device("cpu"))
        logits = model.logits(model.hidden_states(inputs.tokens, inputs.ids, inputs.plan))
        ours = logits.new_empty(logits.shape).index_copy(0, torch.from_numpy(prepared.plan.order), logits)
        ours = ours.view(2, length + 4, -1)[:, length:]
        assert (ours - out).abs().max() <= TOLERANCE * max(1.0, out.abs().max()), kernel


def test_rows_of_the_xlnet_objective_are_what_the_class_pretrains_on(tmp_path):
    """Several documents in a row, with SEP and CLS within the order, segments 0 to 2 and texts from elsewhere."""
    theirs = write_random("xlnet", tmp_path)
    model = loaded(open_published(tmp_path))
    rows = collate(make("xlnet", 60, tokens_per_target=3), windows(6, 60, seed=1))
    rows[:, TOKENS] %= 97
    is_query = torch.from_numpy((rows[:, DOC] >= 0) & (rows[:, ORD] < 0))
    assert {0, 1, 2} == set(rows[:, SEGMENT_IDS][is_query.logical_not().numpy()]) and is_query.sum() > 50
    # The first of all ranks in a document of targets sees nothing; the class then sees everything.
    is_query &= torch.from_numpy(allowed(rows[:, DOC], rows[:, ORD], rows[:, GRP]).any(-1))
    _, logits = our_output(model, rows)
    expected, _ = xlnet_logits(theirs, rows)
    difference = (logits - expected)[is_query].abs().max()
    assert difference <= TOLERANCE * max(1.0, expected.abs().max())
    no_segments = rows.copy()
    no_segments[:, SEGMENT_IDS] = 0
    assert (our_output(model, no_segments)[1] - expected)[is_query].abs().max() > 0.1


@pytest.mark.parametrize("kernel", ["dense", "cpu"])
@pytest.mark.parametrize(("longest", "reused"), [(None, None), (20, None), (7, 5)])
@torch.no_grad()
def test_the_memory_of_xlnet(longest, reused, kernel, tmp_path):
    """Segments of one text, one after another: logits, and the memory itself, which each of them hands on."""
    theirs = write_random("xlnet, odd", tmp_path)
    theirs.transformer.mem_len, theirs.transformer.reuse_len = longest, reused
    model = loaded(open_published(tmp_path))
    rng = np.random.default_rng(8)
    memory, mems = None, None
    for length in (13, 9, 17, 13):
        fields = np.zeros((2, len(FIELDS), length), np.int32)
        fields[:, TOKENS] = rng.integers(5, 131, (2, length))
        fields[:, POSITION_IDS] = np.arange(length)
        fields[:, SEGMENT_IDS] = np.arange(length) // 5
        inputs = {"input_ids": fields[:, TOKENS], "token_type_ids": fields[:, SEGMENT_IDS]}
        out = theirs(
            **{k: torch.from_numpy(x.astype(np.int64)) for k, x in inputs.items()}, mems=mems, use_mems=True
        )
        hidden, after = read_segment(model, fields, memory, longest=longest, reused=reused, kernel=kernel)
        logits = model.logits(hidden)
        assert (logits - out.logits).abs().max() <= TOLERANCE * max(1.0, out.logits.abs().max())
        if memory is not None and memory[0].shape[1]:
            alone, _ = read_segment(model, fields)
            assert (model.logits(alone) - out.logits).abs().max() > 0.1
        memory, mems = after, out.mems
        for ours, expected in zip(memory, mems, strict=True):
            expected = expected.transpose(0, 1)
            assert ours.shape == expected.shape
            assert not ours.numel() or (ours - expected).abs().max() <= TOLERANCE * max(
                1.0, expected.abs().max()
            )


@torch.no_grad()
def test_the_query_stream_sees_the_memory_and_leaves_none(tmp_path):
    theirs = write_random("xlnet", tmp_path)
    model = loaded(open_published(tmp_path))
    made = make("xlnet", 40)
    memory, mems = None, None
    for number in range(3):
        rows = np.stack([collate(made, [[text_of(30, False)]], sample)[0] for sample in (number, number + 9)])
        rows = rows[:, :, rows[0, DOC] == 0]
        rows[:, TOKENS] %= 97
        expected, mems = xlnet_logits(theirs, rows, mems)
        hidden, memory = read_segment(model, rows, memory)
        is_query = torch.from_numpy(rows[:, ORD] < 0)
        difference = (model.logits(hidden) - expected)[is_query].abs().max()
        assert difference <= TOLERANCE * max(1.0, expected.abs().max())
        assert [state.shape[1] for state in memory] == [33 * (number + 1)] * 3


def test_rows_that_no_memory_serves_are_refused(tmp_path):
    write_random("xlnet", tmp_path)
    model = loaded(open_published(tmp_path))
    packed = collate(make("xlnet", 40), windows(2, 40, seed=1))
    with pytest.raises(ValueError, match="one text in each sequence"):
        read_segment(model, packed)
    other = Transformer(
        build(ModelConfig, {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 9})
    )
    with pytest.raises(ValueError, match=r"model\.relative is none"):
        read_segment(other, packed)


def test_unilmv2_is_bert_with_a_bias_of_distances(tmp_path):
    """Its [P] and [M] repeat positions. BERT's class takes bias and visibility as a mask with a value for each head."""
    class_name, sizes = CASES["bert, masked LM"]
    sizes = {**sizes, "type_vocab_size": 6, "max_position_embeddings": 300}
    cls = getattr(transformers, class_name)
    torch.manual_seed(1)
    theirs = cls(cls.config_class(**sizes, attn_implementation="eager")).eval()
    theirs.save_pretrained(tmp_path)
    source = open_published(tmp_path)
    model = loaded(source, relative="buckets")
    table = torch.randn(32, 3)
    with torch.no_grad():
        model.relative_bias.weight.copy_(table)
    length, places, steps = 250, [3, 4, 200], [1, 1, 2]
    batch = np.zeros((2, len(FIELDS), length + 6), np.int32)
    batch[:, TOKENS] = np.random.default_rng(3).integers(5, 131, (2, length + 6))
    batch[:, POSITION_IDS] = [*range(length), *places, *places]
    batch[:, ORD, length:] = [*steps, *(-np.array(steps))]
    batch[:, GRP, length + 3 :] = steps
    tokens, positions = (torch.from_numpy(batch[:, p].astype(np.int64)) for p in (TOKENS, POSITION_IDS))
    distance = positions[:, None, :] - positions[:, :, None]
    bias = table[T5Attention._relative_position_bucket(distance, True, 32, 128)].permute(0, 3, 1, 2)
    visible = torch.from_numpy(allowed(batch[:, DOC], batch[:, ORD], batch[:, GRP]))[:, None]
    masked = bias.masked_fill(~visible, torch.finfo(torch.float32).min)
    expected = theirs(tokens, position_ids=positions, attention_mask=masked).logits
    _, logits = our_output(model, batch)
    assert (logits - expected).abs().max() <= TOLERANCE * max(1.0, expected.abs().max())
