"""Dropout: one hash on every device, the right shares, no pattern, and the same for a token wherever it is computed."""

import numpy as np
import pytest
import torch
from support.data.recipes import collate, make, text_of

from data_utils.common.settings import build
from data_utils.objectives import LOSS_NAMES
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.kernels.dropout import (
    SITES,
    Dropout,
    drop,
    hash_pairs,
    hashed,
    is_kept,
    keep_features,
    salts,
    token_keys,
)
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.position_bias import Distances
from megatron_lite.transformer.transformer import Transformer

KEYS = torch.from_numpy(token_keys(7, np.arange(8), 500).reshape(-1))
SALTS = torch.from_numpy(salts(24))
GOLDEN_KEYS = [[1118792275, 746058198], [335574981, 36048486]]
GOLDEN_SALTS = [-1638510160, -1364241666, 143069886, 1358259325]
GOLDEN_KEPT = ["111101000100010011111010", "110010011000111010001111"]


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.1, 0.5, 0.999])
def test_compiled_loops_equal_the_formula_in_torch(p):
    ours = keep_features(KEYS, SALTS[3, 2], 64, p)
    golden = np.uint32(0x9E3779B9).view(np.int32).item()
    features = torch.arange(64, dtype=torch.int32) * golden
    assert torch.equal(ours, is_kept(hashed((KEYS ^ SALTS[3, 2])[:, None] + features), p))
    dropout = Dropout(KEYS, SALTS, 0, first_head=2).attention(p, 5)
    pairs = dropout.keep(KEYS[:70], KEYS[50:150], 3)
    heads = torch.arange(2, 5, dtype=torch.int32)[:, None, None]
    hashes = hash_pairs(KEYS[None, :70, None], KEYS[None, None, 50:150], dropout.salt, heads)
    assert torch.equal(pairs, is_kept(hashes, p))


def test_golden_values():
    """They must not change: a resumed run would no longer repeat the unbroken one."""
    assert token_keys(1234, np.array([0, 10**12]), 2).tolist() == GOLDEN_KEYS
    assert salts(2)[-1].tolist()[:4] == GOLDEN_SALTS  # of the first places
    kept = keep_features(KEYS[:2], SALTS[0, 2], 24, 0.5)
    assert ["".join(str(int(x)) for x in row) for row in kept] == GOLDEN_KEPT


def test_the_share_that_stays_and_its_independence():
    """4,000 tokens x 256 features; 5 standard deviations everywhere, 6.5 for the largest of many correlations."""
    p = 0.1
    dropped = 1.0 - keep_features(KEYS, SALTS[0, 2], 256, p).double()
    deviation = (p * (1 - p)) ** 0.5
    assert abs(dropped.mean() - p) < 5 * deviation / dropped.numel() ** 0.5
    for dim in (0, 1):
        count = dropped.shape[dim]
        assert (dropped.mean(dim) - p).abs().max() < 5.5 * deviation / count**0.5
    centred = (dropped - p) / deviation
    features = (centred.T @ centred / len(centred)).fill_diagonal_(0)
    assert features.abs().max() < 6.5 / len(centred) ** 0.5
    other = (1.0 - keep_features(KEYS, SALTS[1, 2], 256, p).double() - p) / deviation
    assert abs((centred * other).mean()) < 5 / centred.numel() ** 0.5


def test_pairs_differ_by_query_key_and_head():
    stays = Dropout(KEYS, SALTS, 0).attention(0.5, 1).keep(KEYS[:200], KEYS[:200], 4).double() * 2 - 1
    assert abs(stays.mean()) < 5 / stays.numel() ** 0.5
    for other in (stays.transpose(1, 2), stays.roll(1, 0), stays.roll(1, 1), stays.roll(1, 2)):
        assert abs((stays * other).mean()) < 6 / stays.numel() ** 0.5


def test_a_token_drops_the_same_in_any_batch_and_order():
    samples = np.array([5, 900, 2**40])
    whole = token_keys(3, samples, 40)
    assert (token_keys(3, samples[1:2], 25)[0] == whole[1, :25]).all()
    order = np.random.default_rng(0).permutation(whole.size)
    kept = keep_features(torch.from_numpy(whole.reshape(-1)), SALTS[2, 1], 16, 0.3)
    again = keep_features(torch.from_numpy(whole.reshape(-1)[order]), SALTS[2, 1], 16, 0.3)
    assert torch.equal(again, kept[order])
    assert len(np.unique(whole)) == whole.size and (token_keys(4, samples, 40) != whole).all()


def test_every_bit_of_seed_and_sample_tells_keys_apart():
    """Keys of samples that agree in their lowest bits, however many, would drop the same elements."""
    length, bits = 16, range(62)
    samples = np.array([5, *(5 ^ 1 << bit for bit in bits)])
    of_samples = token_keys(3, samples, length)
    of_seeds = np.concatenate([token_keys(3 ^ 1 << bit, samples[:1], length) for bit in bits])
    keys = np.concatenate([of_samples, of_seeds])
    assert (
        len(np.unique(keys)) == keys.size
    )  # 2,000 numbers of 32 bits: none twice, by chance, 2,000 times of 2,001


def test_a_rank_with_half_of_the_heads_drops_its_half():
    whole = Dropout(KEYS, SALTS, 0).attention(0.3, 1).keep(KEYS[:9], KEYS[:9], 8)
    half = Dropout(KEYS, SALTS, 0, first_head=4).attention(0.3, 1).keep(KEYS[:9], KEYS[:9], 4)
    assert torch.equal(whole[4:], half)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_adds_the_residual_and_passes_gradients_where_elements_stay(dtype):
    generator = torch.Generator().manual_seed(0)
    x, residual, grad = (torch.randn(4000, 8, generator=generator).to(dtype) for _ in range(3))
    x.requires_grad_(), residual.requires_grad_()
    kept = keep_features(KEYS, SALTS[1, SITES.index("attended")], 8, 0.25)
    dropout = Dropout(KEYS, SALTS, 0).features(0.25, 1, "attended")
    out = drop(x, residual, dropout)
    expected = residual.double() + x.double() * kept / 0.75
    # One rounding of the result; inputs are exact.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-6)
    gradients = torch.autograd.grad(out, (x, residual), grad)
    torch.testing.assert_close(gradients[0].double(), grad.double() * kept / 0.75, rtol=tolerance, atol=1e-6)
    assert torch.equal(gradients[1], grad)
    alone = drop(x, None, dropout)
    torch.testing.assert_close(alone.double(), x.double() * kept / 0.75, rtol=tolerance, atol=1e-6)


def test_distances_are_dropped_alike_for_all_samples_of_a_step():
    """XLNet's sinusoids: a function of step, distance and feature, whichever distances a batch has."""
    line = torch.arange(-300, 301, dtype=torch.int32)
    kept = {step: keep_features(*of_step(step, line)) for step in (0, 1)}
    assert abs(kept[0].double().mean() - 0.7) < 5 * (0.3 * 0.7 / kept[0].numel()) ** 0.5
    assert (kept[0] != kept[1]).double().mean() > 0.3
    assert torch.equal(keep_features(*of_step(0, line[290:311])), kept[0][290:311])
    assert Dropout(KEYS, SALTS, 0).distances(0.0, line) is None


def of_step(step: int, line: torch.Tensor) -> tuple[torch.Tensor, int, int, float]:
    dropped = Dropout(KEYS[:3], SALTS, 0, step=step).distances(0.3, line)
    assert dropped is not None
    return dropped.keys, dropped.salt, 64, dropped.p


def test_the_sinusoids_of_xlnet_are_dropped_out_in_training(monkeypatch):
    """The same for other rows of the step, and in every pass of the model."""
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 50, "init_std": 0.5}
    off = {"attention_dropout": 0.0, "output_dropout": 0.0}
    config = build(ModelConfig, {**sizes, **off, "system": "xlnet", "embedding_dropout": 0.4})
    rows = collate(make("xlnet", 40), [[text_of(30, False)]] * 4)
    rows[:, 0] %= 50
    inputs = [
        MicroBatch.from_batch(Batch(part, numbers), torch.device("cpu"), config, dropout_seed=3)
        for part, numbers in ((rows, np.arange(4)), (rows[2:], np.arange(2, 4)))
    ]
    tables = [Distances.of(config, batch.ids, batch.plan, batch.dropout).sinusoids for batch in inputs]
    whole = Distances.of(config, inputs[0].ids, inputs[0].plan, None).sinusoids
    assert torch.equal(*tables)
    stays = tables[0] != 0
    assert abs(stays.double().mean() - 0.6) < 5 * (0.24 / stays.numel()) ** 0.5 + (whole == 0).double().mean()
    torch.testing.assert_close(tables[0][stays], whole[stays] / 0.6)
    model = Transformer(config, num_losses=len(LOSS_NAMES))
    initialize_parameters(model.named_parameters(), config, 1)
    asked, of = [], Distances.of
    monkeypatch.setattr(Distances, "of", lambda *given: asked.append(given[3]) or of(*given))
    with torch.no_grad():
        model(inputs[0])
    assert asked == [inputs[0].dropout]
