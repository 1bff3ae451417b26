"""AttentionProbe: the weights with which a layer averages its values, for the right queries and keys."""

import itertools

import numpy as np
import pytest
import torch
from support.transformer.decoder_rows import MODELS, TEXTS, make_run
from support.transformer.mask_rule import allowed

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, DOC, FIELDS, ORD, POSITION_IDS, TOKENS, WEIGHTS
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.inference.attention_probe import AttentionProbe
from megatron_lite.inference.cache import CachedPlan
from megatron_lite.inference.texts import make_text_generator
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.micro_batch import MicroBatch

CPU = torch.device("cpu")
BEAMS = GenerationConfig(strategy="beam", num_beams=3, length_penalty=0.0, max_length=5, min_length=2)


def generate(run, text):
    """The generator of a run of `make_run`, the text's tokens, and the hypotheses."""
    fills = run.objectives[0].name == "blank_infilling"
    generator = make_text_generator(run, BEAMS, fills)
    context = generator.context([*text, 3, 33, 5] if fills else text)
    return generator, context, generator.hypotheses([context])[0]


def stacks_of(run):
    config = run.config.model
    stacks = [("encoder", layer, layer) for layer in range(config.num_layers)]
    for layer in range(config.decoder_layers):
        number = config.num_layers + layer
        stacks += [("decoder", layer, number), ("cross", layer, number + config.decoder_layers)]
    return stacks


def weights_of_outputs(run, stack, layer, replay):
    """The weights of a layer, [H, queries, keys], from its output, with a unit vector as each key's value.

    A head has fewer features than there are keys, so that the keys take turns: `replay` runs once for each turn.
    """
    config, model = run.config.model, run.model
    block = model.layers[layer if stack == "encoder" else config.num_layers + layer]
    attention = block.cross_attention if stack == "cross" else block.attention
    size, kept, outputs, turn, offsets = config.head_size, {}, {}, 0, {}

    def units(first, count):
        """Values of the keys from `first` on: unit vectors for the keys of this turn, else zero."""
        which = torch.arange(first, first + count)[:, None] - turn * size
        return (which == torch.arange(size)).float()

    def note(module, inputs):
        _, context, number = inputs
        assert isinstance(context.plan, CachedPlan)
        offsets["first"] = context.plan.cached[number].shape[1] if number in context.plan.cached else 0

    def replace(module, inputs, output):
        first = 0 if stack == "cross" else offsets["first"]
        values = output.shape[1] // 2 if stack == "cross" else config.key_value_heads * size
        kept[turn] = first + len(output)
        made = units(first, len(output)).repeat(1, values // size)
        return torch.cat([output[:, :-values], made], 1)

    def read(module, inputs):
        outputs.setdefault(turn, []).append(inputs[0].view(len(inputs[0]), -1, size))

    hooks = [attention.dense.register_forward_pre_hook(read)]
    if stack == "cross":
        hooks.append(attention.key_value.register_forward_hook(replace))
    else:
        hooks.append(attention.register_forward_pre_hook(note))
        hooks.append(attention.query_key_value.register_forward_hook(replace))
    for turn in range(5):  # noqa: B007  (the hooks read it)
        replay()
    for hook in hooks:
        hook.remove()
    whole = torch.cat([torch.cat(outputs[number]) for number in range(5)], 2)  # [queries, H, keys]
    assert max(kept.values()) <= 5 * size
    return whole.transpose(0, 1)


@pytest.mark.parametrize("objective", MODELS)
def test_outputs_are_the_values_averaged_with_the_weights(objective):
    run = make_run(objective)
    generator, context, found = generate(run, TEXTS[2])
    best = [each[0] for each in found]
    found_weights = []
    for stack, layer, number in stacks_of(run):
        probe = AttentionProbe(stack, number)
        queries, keys = generator.replay(context, best, probe).tokens[stack]
        weights = probe.matrix(len(keys))
        assert weights.shape == (4, len(queries), len(keys))
        torch.testing.assert_close(weights.sum(-1), torch.ones(4, len(queries)))
        expected = weights_of_outputs(run, stack, layer, lambda: generator.replay(context, best))
        torch.testing.assert_close(weights, expected[:, :, : len(keys)], rtol=0, atol=1e-6)
        assert expected[:, :, len(keys) :].abs().sum() == 0
        found_weights.append(weights)
    assert not any(
        one.shape == other.shape and one.equal(other) for one, other in itertools.pairwise(found_weights)
    )


@pytest.mark.parametrize("objective", MODELS)
def test_queries_and_keys_are_the_tokens_that_the_model_reads(objective):
    run, taken = make_run(objective), []
    generator, context, found = generate(run, TEXTS[2])
    hook = run.model.embedding.register_forward_pre_hook(
        lambda module, inputs: taken.extend(inputs[0].tolist())
    )
    best = [each[0] for each in found]
    tokens = generator.replay(context, best).tokens
    hook.remove()
    read = {stack: [query.token for query in queries] for stack, (queries, _) in tokens.items()}
    assert taken == read["encoder"] + read.get("decoder", [])
    if objective.startswith("unilm"):  # a mask predicts the token that takes its place
        assert {query.token for query in tokens["encoder"][0] if query.predicts} == {3}
        assert tokens["encoder"][1] == [token for token in taken if token != 3] + [3]
    else:
        assert all(keys == read[stack] for stack, (_, keys) in tokens.items() if stack != "cross")
    if "cross" in tokens:
        assert tokens["cross"] == (tokens["decoder"][0], context)


@pytest.mark.parametrize("objective", MODELS)
def test_a_replayed_completion_has_the_probability_that_the_search_found(objective):
    run = make_run(objective)
    for text in TEXTS:
        generator, context, found = generate(run, text)
        for index in range(len(found[0])):  # later blanks were filled after the best span of earlier ones
            chosen = [found[0][index], *(each[0] for each in found[1:])]
            replay = generator.replay(context, chosen)
            scores = [logits.log_softmax(-1) for logits in replay.logits]
            for span, log_p in zip(chosen[: 1 if index else None], scores, strict=False):
                assert len(log_p) == len(span.tokens) + span.ended
                total = sum(float(each[token]) for each, token in zip(log_p, span.tokens, strict=False))
                ends = [float(log_p[-1, end]) for end in generator.search.ends] if span.ended else [0.0]
                assert any(span.log_p == pytest.approx(total + end, abs=1e-4) for end in ends)
            for queries, _ in replay.tokens.values():
                predicting = sum(query.predicts for query in queries)
                assert predicting in (0, sum(map(len, scores)))


@pytest.mark.parametrize(
    "model", [{}, {"positions": "rotary", "num_key_value_heads": 2}], ids=["learned", "rotary"]
)
def test_the_weights_of_filled_blanks_match_training_written_out(model):
    """Softmax of queries times keys under the rule of training, from the weights of the layer alone."""
    run = make_run("blank_infilling", model=model)
    config = run.config.model
    generator, context, found = generate(run, TEXTS[1])
    best = [each[0] for each in found]
    queries, _ = generator.replay(context, best).tokens["encoder"]
    blanks = [position for position, token in enumerate(context) if token in (3, 5)]
    fields = np.zeros((1, len(FIELDS), len(queries)), np.int32)
    fields[0, TOKENS] = [query.token for query in queries]
    fields[0, POSITION_IDS, : len(context)] = range(len(context))
    end, order = len(context), 0
    for position, span in zip(blanks, best, strict=True):
        count = len(span.tokens) + 1
        tokens = slice(end, end + count)
        fields[0, POSITION_IDS, tokens], fields[0, BLOCK_POSITION_IDS, tokens] = position, range(1, count + 1)
        fields[0, ORD, tokens] = range(order + 1, order + count + 1)
        end, order = end + count, order + count
    fields[0, WEIGHTS, -1] = np.float32(1.0).view(np.int32)
    inputs = MicroBatch.from_batch(Batch(fields), CPU, config)
    pairs = list(zip(fields[0, POSITION_IDS].tolist(), fields[0, BLOCK_POSITION_IDS].tolist(), strict=True))
    ids = list(zip(*inputs.ids[:2].tolist(), strict=True))
    order = [ids.index(pair) for pair in pairs]  # of the batch
    visible = torch.from_numpy(allowed(fields[0, DOC], fields[0, ORD], np.zeros(len(queries), np.int32)))
    for layer, block in enumerate(run.model.layers):
        taken = []
        hook = block.attention.register_forward_pre_hook(
            lambda module, inputs, taken=taken: taken.append(inputs[0])
        )
        with torch.no_grad():
            run.model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)
        hook.remove()
        fused = block.attention.query_key_value
        qkv = torch.nn.functional.linear(taken[0][order], fused.weight, fused.bias).detach()
        q, k = (
            qkv[:, :32].view(-1, 4, 8),
            qkv[:, 32 : 32 + 8 * config.key_value_heads].view(len(queries), -1, 8),
        )
        k = k.repeat_interleave(4 // config.key_value_heads, 1)
        if config.positions == "rotary":
            angles = torch.tensor([sum(pair) for pair in pairs])[:, None] / config.rotary_base ** (
                torch.arange(0, config.rotary_size, 2) / config.rotary_size
            )
            q, k = rotated(q, angles[:, None]), rotated(k, angles[:, None])
        scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
        expected = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        probe = AttentionProbe("encoder", layer)
        generator.replay(context, best, probe)
        torch.testing.assert_close(probe.matrix(len(queries)), expected, rtol=0, atol=1e-5)


def rotated(heads, angles):
    """Rotary positions by complex numbers: each pair of features times e to the angle."""
    pairs = torch.view_as_complex(heads[..., : 2 * angles.shape[-1]].unflatten(-1, (-1, 2)).contiguous())
    whole = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return torch.cat([whole, heads[..., 2 * angles.shape[-1] :]], -1)
