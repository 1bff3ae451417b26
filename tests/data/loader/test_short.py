"""Short samples: how many, how long, from where; as pure functions of sample numbers, for every objective."""

import math

import numpy as np
import pytest
from support.data.chi_square import chi_square, chi_square_limit
from support.project import ROOT
from support.training.training import open_data

from data_utils.common.batch_fields import DOC
from data_utils.common.errors import ConfigError
from data_utils.common.settings import merge
from data_utils.loader.short_samples import Shortener
from megatron_lite.config.tree import load_config


def shortened(share, chunks, samples, first=0):
    """(sample, chunk) -> the kept tokens, which are their places in the chunk."""
    counts = np.full(samples, len(chunks))
    text = np.tile(np.concatenate([np.arange(size) for size in chunks]), samples).astype(np.int32)
    given = (text, np.tile(chunks, samples), counts, np.arange(first, first + samples))
    tokens, lengths, same = Shortener(share, 5)(*given)
    assert np.array_equal(same, counts)
    cut = np.split(tokens, np.cumsum(lengths)[:-1])
    return {(i // len(chunks), i % len(chunks)): one for i, one in enumerate(cut)}


def test_a_tenth_of_the_parts_is_short_with_uniform_lengths_and_places():
    """Histogram of 40,000 parts of 12 tokens: each length from 2 within 3 sigma, each place of a length alike."""
    parts, count = shortened(0.1, [12, 12], 20_000), 40_000
    sizes = np.array([len(one) for one in parts.values()])
    each = count * 0.1 / 11
    histogram = np.bincount(sizes, minlength=13)
    assert not histogram[:2].any()
    for size in range(2, 12):
        assert abs(histogram[size] - each) <= 3 * math.sqrt(each), size
    assert histogram[12] == count - histogram[2:12].sum()
    places = np.zeros(9)
    for one in parts.values():
        assert (np.diff(one) == 1).all()
        if len(one) == 4:
            places[one[0]] += 1
    assert chi_square(places, np.full(9, places.sum() / 9)) < chi_square_limit(8)


def test_parts_of_two_tokens_stay_and_probabilities_of_0_and_1_hold():
    assert all(len(one) == 2 for one in shortened(1.0, [2, 2], 200).values())
    assert all(len(one) == 30 for one in shortened(0.0, [30], 200).values())
    sizes = {len(one) for one in shortened(1.0, [5], 500).values()}
    assert sizes == {2, 3, 4, 5}


def test_a_part_is_a_function_of_its_sample_number():
    whole, later = shortened(0.5, [20, 9], 100), shortened(0.5, [20, 9], 60, first=40)
    assert all(np.array_equal(one, whole[i + 40, k]) for (i, k), one in later.items())


def test_what_stands_beside_tokens_goes_with_them():
    tokens = np.stack([np.arange(40), np.arange(40) + 100]).astype(np.int32)
    (kept, beside), lengths, _ = Shortener(1.0, 5)(tokens, np.array([20, 20]), np.array([1, 1]), np.arange(2))
    assert np.array_equal(kept + 100, beside) and lengths.sum() == len(kept) < 40


def loader_of(settings, **more):
    return open_data(merge(settings, more))[1].train


@pytest.mark.parametrize("name", ["blank_infilling", "causal", "masked_lm", "t5"])
def test_loaders_shorten_the_samples_of_every_objective(settings, name):
    """In any batch alike, and none where the probability is 0."""
    more = {"objectives": {name: 1.0}, "model": {"max_position": 80}, "data": {"sequence_length": 60}}
    if name == "t5":  # words of the vocabulary, which has no <extra_id_0>
        more["t5"] = {"sentinel_first": 30, "sentinel_count": 9}
    plain = loader_of(settings, **more)
    short = loader_of(settings, **merge(more, {"data": {"short_prob": 0.5}}))
    indices = np.arange(60)
    rows = short.batch(indices)
    assert np.array_equal(short.batch(indices[40:])[3], rows[43])
    used = [(loader.batch(indices)[:, DOC] >= 0).sum() for loader in (plain, short)]
    assert 0.5 < used[1] / used[0] < 0.95


def test_phases_may_shorten_and_a_restart_goes_on(settings):
    """Shortening holds in every phase; the samples after its first equal one phase's."""
    more = {"data": {"short_prob": 0.5}}
    one = loader_of(settings, **more)
    two = loader_of(settings, **more, phases=[{"steps": 1}, {"steps": 5, "loss_weights": {"token": 1.0}}],
                    training={"loss_normalization": "per_objective"})  # fmt: skip
    assert len(two.mixtures) == 2
    assert np.array_equal(two.batch(np.arange(8, 16)), one.batch(np.arange(8, 16)))


def test_published_recipes_have_their_shares():
    for name, share in (("bert-base", 0.1), ("albert-base", 0.1), ("glm-2b", 0.02), ("glm-10b-1024", 0.5)):
        assert load_config([ROOT / f"configs/{name}.yaml"]).data.short_prob == share


def test_bad_values_are_one_line():
    with pytest.raises(ConfigError, match=r"data.short_prob is 1.5; it must be"):
        load_config([ROOT / "configs/tiny.yaml"], ["data.short_prob=1.5"])
    with pytest.raises(
        ConfigError, match=r"data.short_prob is 0.1, but samples of optimus are rows of whole sent"
    ):
        load_config([ROOT / "configs/optimus-tiny.yaml"], ["data.short_prob=0.1"])
