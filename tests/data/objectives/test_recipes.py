"""Every objective: its mask against the paper's, no leak, the text rebuilt, rows that never overflow."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from support.data.recipes import (
    FIRST_TEXT_TOKEN,
    RECIPES,
    SPECIAL,
    Recipe,
    collate,
    is_exchanged,
    make,
    many,
    text_of,
    windows,
)
from support.project import ROOT
from support.transformer.mask_rule import allowed, leaks

from data_utils.common.batch_fields import FIELDS, Example
from data_utils.common.errors import ConfigError, DataError
from data_utils.common.losses import CLASS_LEVEL
from data_utils.loader.loader import collate as fill_rows
from data_utils.objectives import LOSS_NAMES, OBJECTIVES
from data_utils.objectives.ul2 import DenoiserConfig

CASES = 500
SEQUENCE_LENGTH = 20
EACH = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def paper_mask(row: Example, recipe: Recipe) -> np.ndarray:
    """The mask of a packed and padded row: every document for itself."""
    mask = np.zeros((len(row.doc), len(row.doc)), bool)
    for number in range(row.doc.max(initial=-1) + 1):
        here = np.flatnonzero(row.doc == number)
        document = Example.from_fields(np.stack([getattr(row, f).view(np.int32)[here] for f in FIELDS]))
        mask[np.ix_(here, here)] = recipe.mask(document)
    return mask


def token_level(example: Example) -> np.ndarray:
    """Weights of the rows that predict text: not a class at CLS, not eos or another special token."""
    labels = CLASS_LEVEL
    special = np.isin(example.objective, labels) | (example.targets < FIRST_TEXT_TOKEN)
    shown = np.zeros_like(special)
    if (example.objective == LOSS_NAMES.index("denoising")).any():  # what BART's context shows is copied
        shown = np.isin(example.targets, example.tokens[example.ord == 0])
    return np.where(special | shown, 0.0, example.weights)


@EACH
def test_the_rule_gives_the_mask_of_the_paper_and_nothing_leaks(recipe):
    """500 random packed and padded rows, at the tightest row length."""
    made = make(recipe.name, SEQUENCE_LENGTH, **recipe.config)
    made = make(
        recipe.name,
        SEQUENCE_LENGTH,
        row_length=made.config.least_row_length(SEQUENCE_LENGTH),
        **recipe.config,
    )
    samples = windows(CASES, SEQUENCE_LENGTH, 1)
    padded = 0
    for fields, chunks in zip(collate(made, samples), samples, strict=True):
        row = Example.from_fields(fields)
        mask = allowed(row.doc, row.ord, row.grp)
        assert (mask == paper_mask(row, recipe)).all()
        assert not leaks(row.tokens, row.targets, token_level(row), mask)
        padding = row.doc < 0
        padded += padding.any()
        assert (np.diff(padding.astype(int)) >= 0).all() and (row.tokens[padding] == SPECIAL.pad).all()
        for name in set(FIELDS) - {"tokens", "doc"}:
            assert not getattr(row, name)[padding].any()
        assert row.position_ids.max() <= made.config.max_position_needed(SEQUENCE_LENGTH)
        assert row.doc.max() + 1 == len(chunks)
    assert CASES // 10 < padded <= CASES


@EACH
def test_the_text_can_be_rebuilt(recipe):
    """Nothing of a window is lost; where documents exchange their second texts, nothing is used twice."""
    made = make(recipe.name, 40, row_length=100, **recipe.config)  # ample
    samples = windows(300, 40, 2)
    for fields, chunks in zip(collate(made, samples), samples, strict=True):
        documents = Example.from_fields(fields).documents()
        assert all(document.position_ids.min() == 0 for document in documents)  # counted anew in each
        texts = [recipe.rebuilt(document) for document in documents]
        if any(map(is_exchanged, documents)):
            assert sorted(np.concatenate(texts)) == sorted(np.concatenate(chunks))
            continue
        for text, chunk in zip(texts, chunks, strict=True):
            assert (text == chunk).all()


@EACH
def test_the_leak_test_fires_on_planted_leaks(recipe):
    made = make(recipe.name, 60, **recipe.config)
    rng = np.random.default_rng(3)
    for sample in range(20):
        example = made.example(text_of(60, False), sample)
        weights = token_level(example)
        mask = allowed(example.doc, example.ord, example.grp)
        answer = int(rng.choice(np.flatnonzero(weights)))
        shown = example.tokens.copy()
        shown[rng.choice(np.flatnonzero(mask[answer]))] = example.targets[answer]
        assert leaks(shown, example.targets, weights, mask)
        if recipe.answers_are_inputs and np.count_nonzero(weights) > 1:
            together = allowed(example.doc, np.zeros_like(example.ord), example.grp)
            assert leaks(example.tokens, example.targets, weights, together)
        if recipe.name in ("unilmv2", "xlnet"):  # queries one step too late
            late = np.where(example.ord < 0, example.ord - 1, example.ord)
            assert leaks(example.tokens, example.targets, weights, allowed(example.doc, late, example.grp))


@EACH
def test_a_sample_is_the_same_in_any_batch_and_differs_by_number_and_seed(recipe):
    made = make(recipe.name, 40, **recipe.config)
    samples = windows(12, 40, 4)
    together = collate(made, samples)
    for i in (0, 5, 11):
        assert (collate(made, samples[i : i + 1], i)[0] == together[i]).all()
    if recipe.name != "causal":
        assert (collate(made, samples, 50) != together).any()
        assert (collate(make(recipe.name, 40, seed=6, **recipe.config), samples) != together).any()


@EACH
def test_example_is_what_the_batch_holds(recipe):
    made = make(recipe.name, 40, **recipe.config)
    for sample, in_batch in enumerate(many(made, text_of(36), 5)):
        alone = made.example(text_of(36), sample)
        assert all((getattr(alone, name) == getattr(in_batch, name)).all() for name in FIELDS)


@EACH
def test_the_smallest_chunks(recipe):
    """One token, a lone eos, two tokens: every sample has a row, whether or not it has a loss."""
    made = make(recipe.name, 8, **recipe.config)
    for chunk in ([1000], [SPECIAL.eos], [1000, SPECIAL.eos], [1000, 1001]):
        for sample in range(20):
            example = made.example(np.array(chunk), sample)
            assert (recipe.rebuilt(example) == chunk).all()
            if len(chunk) > 1 or recipe.name in ("causal", "prefix_lm", "bart"):
                assert example.weights.sum() > 0 or recipe.name in ("t5", "ul2", "masked_diffusion")


def test_a_sample_that_does_not_fit_is_named():
    made = make("masked_lm", 16)
    with pytest.raises(DataError, match=r"sample 7 has 1 chunks.*sequence_length 16"):
        fill_rows(made, text_of(17), [17], [1], [7])
    with pytest.raises(DataError, match="sample 3 has 9 chunks"):
        fill_rows(made, np.tile(text_of(1), 9), [1] * 9, [9], [3])


@pytest.mark.parametrize("name", ["albert", "bart"])
@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_text_of_another_tokenizer_is_refused(name, token):
    text = text_of(16)
    text[3] = token
    with pytest.raises(DataError, match=f"token ids .*{token}.*another tokenizer"):
        fill_rows(make(name, 20), text, [16], [1], [0])


def test_bart_cuts_the_end_of_a_text_whose_masks_do_not_fit():
    """Rows are near the mean length: a few last tokens are lost in some rows, and nothing else."""
    made, text = make("bart", 512), text_of(512, False)
    usual, roomy = many(made, text, 500), many(make("bart", 512, row_length=1025), text, 500)
    assert made.row_length < 940
    lost = 0
    for short, whole in zip(usual, roomy, strict=True):
        kept = short.targets[short.weights > 0]
        assert (kept == text[: len(kept)]).all()
        assert (len(kept) == 512) == (len(whole.tokens) <= made.row_length)
        lost += 512 - len(kept)
    assert 0 < lost < 500 * 512 / 1000  # less than one token in a thousand
    assert max(len(example.tokens) for example in usual) <= made.row_length


@EACH
def test_rows_that_are_too_short_are_refused(recipe):
    config = OBJECTIVES[recipe.name].config_class(**recipe.config)
    with pytest.raises(ConfigError, match=f"at least {config.least_row_length(64)}"):
        make(recipe.name, 64, row_length=config.least_row_length(64) - 1, **recipe.config)


def test_samples_without_chunks_are_padding():
    for recipe in RECIPES.values():
        batch = fill_rows(make(recipe.name, 16, **recipe.config), np.zeros(0, np.int32), [], [0, 0], [4, 5])
        assert (batch[:, FIELDS.index("doc")] == -1).all()


EXTREMES = [
    ("masked_lm", {"masked_ratio": 1.0, "next_sentence": True}),
    ("spanbert", {"masked_ratio": 1.0, "max_span_length": 1}),
    ("t5", {"noise_ratio": 1.0, "mean_span_length": 1.0}),
    ("t5", {"noise_ratio": 0.5, "mean_span_length": 1.0}),
    ("t5", {"noise_ratio": 0.9, "mean_span_length": 10.0}),
    ("t5", {"noise_ratio": 0.0}),
    ("ul2", {}),
    ("ul2", {"denoisers": (DenoiserConfig(noise_ratio=1.0, mean_span_length=1.0),)}),
    ("ul2", {"denoisers": (DenoiserConfig(noise_ratio=0.5, mean_span_length=1.0),)}),
    ("ul2", {"denoisers": (DenoiserConfig(mode="sequential", noise_ratio=1.0),)}),
    ("ul2", {"denoisers": (DenoiserConfig(mode="sequential", noise_ratio=0.0),)}),
    ("bart", {"masked_ratio": 1.0, "mean_span_length": 0.1}),
    ("bart", {"masked_ratio": 0.5, "mean_span_length": 20.0}),
    ("mass", {"fragment_ratio": 1.0, "head_prob": 0.0, "tail_prob": 1.0}),
    ("unilmv2", {"masked_ratio": 1.0}),
    ("unilmv2", {"masked_ratio": 0.26, "span_prob": 0.0}),
    ("xlnet", {"tokens_per_target": 1, "orders": 5}),
    ("xlnet", {"tokens_per_target": 2, "orders": 3, "max_ngram": 1}),
    ("xlnet", {"tokens_per_target": 3, "orders": 1, "two_texts": False}),
    ("xlnet", {"tokens_per_target": 1, "orders": 3, "memory_length": 2}),
]


@pytest.mark.parametrize(("name", "config"), EXTREMES)
def test_no_draw_needs_more_row_than_its_bound(name, config):
    """Compiled code does not check indices: the bound must hold for every setting."""
    config = {**next(r.config for r in RECIPES.values() if r.name == name), **config}
    rebuilt = RECIPES["bert" if name == "masked_lm" else name].rebuilt
    made = make(name, 64, row_length=400, **config)
    for length in (1, 2, 3, 5, 8, 13, 31, 64):
        for with_eos in (False, True):
            text = text_of(length, with_eos)
            for example in many(made, text, 20):
                assert len(example.tokens) <= made.config.most_tokens(length)
                assert (rebuilt(example) == text).all()


@pytest.mark.parametrize(("per_target", "orders"), [(1, 1), (2, 2), (6, 2), (40, 3)])
def test_texts_that_xlnet_exchanges_fit_the_tightest_row(per_target, orders):
    """B of another chunk may be longer than the bound of this one: rows do not change where they have more room."""
    tight, samples = make("xlnet", 40, tokens_per_target=per_target, orders=orders), windows(400, 40, 6)
    tight = make(
        "xlnet",
        40,
        row_length=tight.config.least_row_length(40),
        tokens_per_target=per_target,
        orders=orders,
    )
    ample = make("xlnet", 40, row_length=200, tokens_per_target=per_target, orders=orders)
    assert tight.row_length < 100
    wide, rows = collate(ample, samples), collate(tight, samples)
    assert (wide[..., : tight.row_length] == rows).all()
    assert (wide[:, FIELDS.index("doc"), tight.row_length :] == -1).all()
    documents = [document for fields in rows for document in Example.from_fields(fields).documents()]
    assert sum(map(is_exchanged, documents)) > 100
    assert all(
        document.weights.any() for document in documents if (document.tokens >= FIRST_TEXT_TOKEN).any()
    )


def all_rows() -> bytes:
    """A few rows of every objective with its defaults and its further code paths."""
    more = {"masked_lm": {"static_copies": 3, "next_sentence": True}, "t5": {"sentinel_first": 500}}
    parts = []
    for recipe in RECIPES.values():
        for config in ({}, recipe.config, more.get(recipe.name, {})):
            parts.append(collate(make(recipe.name, 40, **config), windows(4, 40, 5), 2**35).tobytes())
    return b"".join(parts)


def test_compiled_and_plain_python_agree():
    """Bit for bit, and without an overflow warning."""
    root = ROOT
    environment = dict(os.environ, NUMBA_DISABLE_JIT="1", PYTHONPATH=f"{root}:{root}/tests")
    command = [sys.executable, "-W", "error::RuntimeWarning", __file__]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == hashlib.sha256(all_rows()).hexdigest()


if __name__ == "__main__":  # the subprocess of test_compiled_and_plain_python_agree
    print(hashlib.sha256(all_rows()).hexdigest())
