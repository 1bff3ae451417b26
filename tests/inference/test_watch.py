"""Attention that people look at: the weights with which a layer gathers its values, of the right tokens."""

import itertools

import numpy as np
import pytest
import torch
from support.decoder_rows import MODELS, TEXTS, make_run
from support.mask_rule import allowed

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, DOC, FIELDS, ORD, POSITION_IDS, TOKENS, WEIGHTS
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.inference.attention_probe import AttentionProbe
from megatron_lite.inference.cache import CachedPlan
from megatron_lite.inference.texts import make_text_generator
from megatron_lite.model.batch import Batch
from megatron_lite.model.micro_batch import MicroBatch

CPU = torch.device("cpu")
BEAMS = GenerationConfig(strategy="beam", num_beams=3, length_penalty=0.0, max_length=5, min_length=2)


def asked(run, text):
    """Who answers, what is asked, and what was found, for a run of `make_run`."""
    fills = run.objectives[0].name == "blank_infilling"
    worker = make_text_generator(run, BEAMS, fills)
    context = worker.context([*text, 3, 33, 5] if fills else text)
    return worker, context, worker.hypotheses([context])[0]


def parts_of(run):
    config = run.config.model
    parts = [("encoder", layer, layer) for layer in range(config.num_layers)]
    for layer in range(config.decoder_layers):
        number = config.num_layers + layer
        parts += [("decoder", layer, number), ("cross", layer, number + config.decoder_layers)]
    return parts


def gathered(run, part, layer, replay):
    """The weights of a layer, [H, queries, keys], read off its output: each key's value is a unit vector.

    A head has fewer features than there are keys, so that the keys take turns: `replay` runs once for each turn.
    """
    config, model = run.config.model, run.model
    block = model.layers[layer if part == "encoder" else config.num_layers + layer]
    of = block.cross_attention if part == "cross" else block.attention
    size, kept, rows, turn, places = config.head_size, {}, {}, 0, {}

    def units(first, count):
        """Values of keys `first`, ...: in this turn's places."""
        which = torch.arange(first, first + count)[:, None] - turn * size
        return (which == torch.arange(size)).float()

    def note(module, inputs):
        _, context, number = inputs
        assert isinstance(context.plan, CachedPlan)
        places["first"] = context.plan.cached[number].shape[1] if number in context.plan.cached else 0

    def replace(module, inputs, output):
        first = 0 if part == "cross" else places["first"]
        values = output.shape[1] // 2 if part == "cross" else config.key_value_heads * size
        kept[turn] = first + len(output)
        made = units(first, len(output)).repeat(1, values // size)
        return torch.cat([output[:, :-values], made], 1)

    def read(module, inputs):
        rows.setdefault(turn, []).append(inputs[0].view(len(inputs[0]), -1, size))

    hooks = [of.dense.register_forward_pre_hook(read)]
    if part == "cross":
        hooks.append(of.key_value.register_forward_hook(replace))
    else:
        hooks.append(of.register_forward_pre_hook(note))
        hooks.append(of.query_key_value.register_forward_hook(replace))
    for turn in range(5):  # noqa: B007  (the hooks read it)
        replay()
    for hook in hooks:
        hook.remove()
    whole = torch.cat([torch.cat(rows[number]) for number in range(5)], 2)  # [queries, H, keys]
    assert max(kept.values()) <= 5 * size
    return whole.transpose(0, 1)


@pytest.mark.parametrize("objective", MODELS)
def test_the_weights_are_those_with_which_values_are_gathered(objective):
    run = make_run(objective)
    worker, context, found = asked(run, TEXTS[2])
    best = [each[0] for each in found]
    looked = []
    for part, layer, number in parts_of(run):
        watch = AttentionProbe(part, number)
        rows, keys = worker.replay(context, best, watch).shown[part]
        weights = watch.rows(len(keys))
        assert weights.shape == (4, len(rows), len(keys))
        torch.testing.assert_close(weights.sum(-1), torch.ones(4, len(rows)))
        expected = gathered(run, part, layer, lambda: worker.replay(context, best))
        torch.testing.assert_close(weights, expected[:, :, : len(keys)], rtol=0, atol=1e-6)
        assert expected[:, :, len(keys) :].abs().sum() == 0
        looked.append(weights)
    assert not any(one.shape == other.shape and one.equal(other) for one, other in itertools.pairwise(looked))


@pytest.mark.parametrize("objective", MODELS)
def test_rows_are_named_by_the_tokens_that_the_model_reads(objective):
    run, taken = make_run(objective), []
    worker, context, found = asked(run, TEXTS[2])
    hook = run.model.embedding.register_forward_pre_hook(
        lambda module, inputs: taken.extend(inputs[0].tolist())
    )
    best = [each[0] for each in found]
    shown = worker.replay(context, best).shown
    hook.remove()
    read = {part: [row.token for row in rows] for part, (rows, _) in shown.items()}
    assert taken == read["encoder"] + read.get("decoder", [])
    if objective.startswith("unilm"):  # a mask predicts the token that takes its place
        assert {row.token for row in shown["encoder"][0] if row.predicts} == {3}
        assert shown["encoder"][1] == [token for token in taken if token != 3] + [3]
    else:
        assert all(keys == read[part] for part, (_, keys) in shown.items() if part != "cross")
    if "cross" in shown:
        assert shown["cross"] == (shown["decoder"][0], context)


@pytest.mark.parametrize("objective", MODELS)
def test_an_answer_that_is_read_again_has_the_probability_that_it_was_found_with(objective):
    run = make_run(objective)
    for text in TEXTS:
        worker, context, found = asked(run, text)
        for place in range(len(found[0])):  # later blanks were asked after the best answer to earlier ones
            chosen = [found[0][place], *(each[0] for each in found[1:])]
            replay = worker.replay(context, chosen)
            scores = [logits.log_softmax(-1) for logits in replay.logits]
            for answer, log_p in zip(chosen[: 1 if place else None], scores, strict=False):
                assert len(log_p) == len(answer.tokens) + answer.ended
                total = sum(float(row[token]) for row, token in zip(log_p, answer.tokens, strict=False))
                ends = [float(log_p[-1, end]) for end in worker.search.ends] if answer.ended else [0.0]
                assert any(answer.log_p == pytest.approx(total + end, abs=1e-4) for end in ends)
            for rows, _ in replay.shown.values():
                predicting = sum(row.predicts for row in rows)
                assert predicting in (0, sum(map(len, scores)))


@pytest.mark.parametrize(
    "model", [{}, {"positions": "rotary", "num_key_value_heads": 2}], ids=["learned", "rotary"]
)
def test_the_weights_of_filled_blanks_are_those_of_training_written_out(model):
    """Softmax of queries times keys under the rule of training, from the weights of the layer alone."""
    run = make_run("blank_infilling", model=model)
    config = run.config.model
    worker, context, found = asked(run, TEXTS[1])
    best = [each[0] for each in found]
    rows, _ = worker.replay(context, best).shown["encoder"]
    blanks = [place for place, token in enumerate(context) if token in (3, 5)]
    fields = np.zeros((1, len(FIELDS), len(rows)), np.int32)
    fields[0, TOKENS] = [row.token for row in rows]
    fields[0, POSITION_IDS, : len(context)] = range(len(context))
    end, order = len(context), 0
    for place, answer in zip(blanks, best, strict=True):
        count = len(answer.tokens) + 1
        span = slice(end, end + count)
        fields[0, POSITION_IDS, span], fields[0, BLOCK_POSITION_IDS, span] = place, range(1, count + 1)
        fields[0, ORD, span] = range(order + 1, order + count + 1)
        end, order = end + count, order + count
    fields[0, WEIGHTS, -1] = np.float32(1.0).view(np.int32)
    inputs = MicroBatch.from_batch(Batch(fields), CPU, config)
    pairs = list(zip(fields[0, POSITION_IDS].tolist(), fields[0, BLOCK_POSITION_IDS].tolist(), strict=True))
    ids = list(zip(*inputs.ids[:2].tolist(), strict=True))
    places = [ids.index(pair) for pair in pairs]  # the batch's order
    seen = torch.from_numpy(allowed(fields[0, DOC], fields[0, ORD], np.zeros(len(rows), np.int32)))
    for layer, block in enumerate(run.model.layers):
        taken = []
        hook = block.attention.register_forward_pre_hook(
            lambda module, inputs, taken=taken: taken.append(inputs[0])
        )
        with torch.no_grad():
            run.model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)
        hook.remove()
        fused = block.attention.query_key_value
        qkv = torch.nn.functional.linear(taken[0][places], fused.weight, fused.bias).detach()
        q, k = qkv[:, :32].view(-1, 4, 8), qkv[:, 32 : 32 + 8 * config.key_value_heads].view(len(rows), -1, 8)
        k = k.repeat_interleave(4 // config.key_value_heads, 1)
        if config.positions == "rotary":
            angles = torch.tensor([sum(pair) for pair in pairs])[:, None] / config.rotary_base ** (
                torch.arange(0, config.rotary_size, 2) / config.rotary_size
            )
            q, k = turned(q, angles[:, None]), turned(k, angles[:, None])
        scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
        expected = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        watch = AttentionProbe("encoder", layer)
        worker.replay(context, best, watch)
        torch.testing.assert_close(watch.rows(len(rows)), expected, rtol=0, atol=1e-5)


def turned(heads, angles):
    """Each pair of features as a complex number, times e to the angle."""
    pairs = torch.view_as_complex(heads[..., : 2 * angles.shape[-1]].unflatten(-1, (-1, 2)).contiguous())
    whole = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return torch.cat([whole, heads[..., 2 * angles.shape[-1] :]], -1)
