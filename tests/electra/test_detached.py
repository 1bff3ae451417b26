"""DeBERTa-v3's pretraining: disentangled attention in both stacks, and words whose gradients are apart."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from support.hf.own_models import NO_DROPOUT
from support.systems.electra import DETACHED, batch_of, electra_config
from torch.func import functional_call

from data_utils.common.batch_fields import DOC, TARGETS, TOKENS
from data_utils.common.errors import ConfigError
from data_utils.common.losses import REPLACED
from data_utils.objectives import LOSSES
from megatron_lite.hf.published.systems import DEBERTA
from megatron_lite.hf.published.tensor_map import tensor_mappings
from megatron_lite.models.electra.config import generator_of
from megatron_lite.train.loss_normalizer import mean_scales
from megatron_lite.transformer.build import build_model, model_spec
from megatron_lite.transformer.micro_batch import prepare

CPU = torch.device("cpu")
WORDS = "deberta.embeddings.word_embeddings.weight"


def config_of(**changes):
    model = {**NO_DROPOUT, **DETACHED["model"], **changes.pop("model", {})}
    return electra_config(
        model=model, electra={**DETACHED["electra"], "generator_size": 1.0, "generator_heads": 4, **changes}
    )


def their_stack(stack, std=0.15):
    """A class of transformers with random weights; the discriminator's head is not used."""
    described = transformers.DebertaV2Config(
        vocab_size=stack.vocab_size, hidden_size=stack.hidden_size, num_hidden_layers=stack.num_layers,
        num_attention_heads=stack.num_attention_heads, intermediate_size=stack.inner_size, legacy=False,
        max_position_embeddings=stack.max_position + 1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        relative_attention=True, pos_att_type="p2c|c2p", position_biased_input=False, share_att_key=True,
        norm_rel_ebd="layer_norm", position_buckets=stack.position_buckets, pad_token_id=None,
    )  # fmt: skip
    model = transformers.DebertaV2ForMaskedLM(described).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * std)
    return model


def names_of(config):
    """Our parameter -> number of the stack and the parts of theirs."""
    found = {}
    for number, (prefix, stack) in enumerate(
        (("generator.", generator_of(config)), ("encoder.", config.model))
    ):
        shapes = {
            name.removeprefix(prefix): shape
            for name, shape in model_spec(config).shapes(config).items()
            if name.startswith(prefix)
        }
        for theirs, part in tensor_mappings(DEBERTA, shapes, stack).items():
            found.setdefault(f"{prefix}{part.ours}", (number, []))[1].append(theirs)
    return found


def texts_of(fields):
    return [
        (row, np.flatnonzero(documents == number))
        for row, documents in enumerate(fields[:, DOC])
        for number in set(documents[documents >= 0])
    ]


def by_texts(texts, tokens, call):
    """Results of `call` for texts as rows of their own [texts, longest, n], at their places in [B, S, n]."""
    longest = max(len(places) for _, places in texts)
    ids, mask = torch.zeros(2, len(texts), longest, dtype=torch.int64)
    for number, (row, places) in enumerate(texts):
        ids[number, : len(places)], mask[number, : len(places)] = tokens[row, places], 1
    out = call(input_ids=ids, attention_mask=mask)
    whole = out.new_zeros(*tokens.shape, out.shape[-1])
    for (row, places), found in zip(texts, out, strict=True):
        whole[row, places] = found[: len(places)]
    return whole


def test_losses_and_gradients_match_a_plain_model():
    """The generator's words learn from its own loss alone, and the difference to them from the discriminator's."""
    config, batch = config_of(), batch_of(3)
    torch.manual_seed(0)
    model, names = build_model(config, len(LOSSES)), names_of(config)
    assert not model.encoder.embedding.word_embeddings.weight.any()
    assert {name for name, _ in model.named_parameters()} == set(model_spec(config).shapes(config))
    assert model_spec(config).count(config) == sum(p.numel() for p in model.parameters())
    pair = their_stack(generator_of(config)), their_stack(config.model)
    states = [dict(each.named_parameters()) for each in pair]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in names:
                number, theirs = names[name]
                whole = torch.cat([states[number][part] for part in theirs])
                parameter.zero_()[: len(whole)] = whole
            else:
                parameter.normal_(0.0, 0.2)  # of the head that finds replaced tokens
    made = prepare(batch, CPU, config.model)
    factors = np.ones(len(LOSSES))
    factors[REPLACED.number] = 50.0
    made.scale_weights(mean_scales(factors, batch.loss_divisors(len(LOSSES))))
    inputs = made.to(CPU)
    with torch.no_grad():
        _, drawn = model.generated(inputs)
    loss, _ = model(inputs)
    loss.backward()

    fields = batch.fields
    tokens = torch.from_numpy(fields[:, TOKENS].astype(np.int64))
    chosen = torch.from_numpy(batch.weights > 0)
    order = made.plan.order
    rows = order[(order >= 0) & (batch.weights.reshape(-1)[order] > 0)]
    new = tokens.clone().flatten()
    new[torch.from_numpy(rows)] = drawn[: len(rows)]
    texts, targets = texts_of(fields), torch.from_numpy(fields[:, TARGETS].astype(np.int64))
    logits = by_texts(texts, tokens, lambda **given: pair[0](**given).logits)
    words = states[0][WORDS].detach() + states[1][WORDS]
    body = lambda **given: functional_call(pair[1].deberta, {WORDS[8:]: words}, (), given).last_hidden_state  # noqa: E731
    hidden = by_texts(texts, new.view_as(tokens), body)
    head = {
        name.removeprefix("replaced."): p.detach().clone() for name, p in model.replaced.named_parameters()
    }
    inner = F.gelu(F.linear(hidden, head["dense.weight"], head["dense.bias"]))
    scores = F.linear(inner, head["classifier.weight"], head["classifier.bias"])[..., 0]
    label = (new.view_as(tokens) != torch.where(chosen, targets, tokens)).float()
    real = torch.from_numpy(fields[:, DOC] >= 0)
    found = F.binary_cross_entropy_with_logits(scores[real], label[real])
    expected = F.cross_entropy(logits[chosen], targets[chosen]) + 50.0 * found
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    largest = max(p.grad.abs().max() for state in states for p in state.values() if p.grad is not None)
    for name, parameter in model.named_parameters():
        if name in names:
            number, theirs = names[name]
            whole = torch.cat([states[number][part].grad for part in theirs])
            assert (parameter.grad[: len(whole)] - whole).abs().max() <= 1e-5 * largest, name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"segments": 2}}, "electra.embeddings is detached, but model.positions is none"),
        ({"generator_layers": 3}, "electra.generator_layers (3) is above model.num_layers (2)"),
        ({"model": {"relative": "xlnet", "position_buckets": 0, "position_norm": False}}, "model.relative is xlnet"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(changes, words):
    with pytest.raises(ConfigError) as error:
        config_of(**changes)
    assert words in str(error.value) and "\n" not in str(error.value)
