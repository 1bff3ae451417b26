"""Points of a latent space and their texts; probes and pictures."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from support.systems.linear_gaussian import LinearGaussian

from data_utils.common.errors import DataError
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.models.optimus import generation
from megatron_lite.models.optimus.inputs import read_lines, require_labels
from megatron_lite.models.optimus.latent import gaussian_kl
from megatron_lite.models.optimus.picture import draw, plane
from megatron_lite.models.optimus.probe import accuracies, fit, largest_class


@pytest.fixture
def mu():
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_a_line_begins_and_ends_with_the_sentences_themselves(mu):
    points = generation.interpolate(mu[:2], 11)
    assert points.shape == (11, 5) and torch.equal(points[0], mu[0]) and torch.equal(points[-1], mu[1])
    torch.testing.assert_close(points[3], 0.7 * mu[0] + 0.3 * mu[1])
    torch.testing.assert_close(points.diff(dim=0), ((mu[1] - mu[0]) / 10).expand(10, 5))
    assert torch.equal(generation.interpolate(mu[:2], 2), mu[:2])


def test_an_analogy_takes_the_step_from_a_to_b_at_c(mu):
    a, b, c = mu
    torch.testing.assert_close(generation.analogy(mu), (c + b - a)[None])
    torch.testing.assert_close(generation.analogy(mu, 0.5), (c + 0.5 * (b - a))[None])
    assert torch.equal(generation.analogy(torch.stack([a, a, c])), c[None])


def test_draws_of_the_prior_do_not_depend_on_their_number():
    z = generation.sample_prior(4000, 6, seed=3)
    assert z.shape == (4000, 6) and torch.equal(generation.sample_prior(7, 6, seed=3), z[:7])
    assert not torch.equal(generation.sample_prior(7, 6, seed=4), z[:7])
    assert z.mean().abs() < 4 / 24_000**0.5 and (z.T.corrcoef() - torch.eye(6)).abs().max() < 5 / 4000**0.5


@pytest.mark.parametrize("strategy", ["greedy", "sample"])
def test_texts_do_not_depend_on_the_batch(strategy):
    model = LinearGaussian(torch.eye(3, 2), torch.zeros(3), 0.5)
    z, config = generation.sample_prior(9, 2, seed=1), GenerationConfig(strategy=strategy)
    together = generation.decode_texts(model, z, config, 9)
    assert generation.decode_texts(model, z, config, 2) == together and len(set(together)) == 9
    assert strategy == "sample" or together == model.decode(z, config)


def clusters(seed, per_class, apart):
    """Features [N, 4] around a mean of each of three classes, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.arange(3).repeat_interleave(per_class)
    means = apart * torch.eye(3, 4)
    features = means[classes] + torch.randn(len(classes), 4, generator=generator)
    return features, [("red", "blue", "green")[number] for number in classes]


def test_a_probe_is_the_logistic_regression_of_scikit_learn():
    features, labels = clusters(1, 40, apart=1.5)
    classes = torch.tensor([["red", "blue", "green"].index(label) for label in labels])
    weight, bias = fit(features.double(), classes, 3)
    reference = LogisticRegression(C=1.0, tol=1e-10, max_iter=1000).fit(
        features.double().numpy(), classes.numpy()
    )
    np.testing.assert_allclose(weight.numpy(), reference.coef_, atol=1e-5)
    np.testing.assert_allclose(
        (bias - bias.mean()).numpy(), reference.intercept_ - reference.intercept_.mean(), atol=1e-5
    )


def test_a_probe_finds_what_is_there_and_nothing_where_nothing_is():
    features, labels = clusters(2, 60, apart=6.0)
    found = accuracies(features, labels, trials=3)
    assert len(found) == 3 and min(found) > 0.95
    noise = torch.randn(features.shape, generator=torch.Generator().manual_seed(3))
    assert np.mean(accuracies(noise, labels, trials=8)) == pytest.approx(1 / 3, abs=0.12)
    assert largest_class(labels) == pytest.approx(1 / 3)


def test_a_probe_learns_from_so_many_of_each_class_and_is_tested_on_all_others():
    """Features that name the sentence: those learnt from are known, the others are not."""
    features, labels = clusters(4, 30, apart=2.0)
    few, many = (np.mean(accuracies(features, labels, per_class=count, trials=10)) for count in (1, 25))
    assert few < many - 0.05
    (found,) = accuracies(features, labels, per_class=29, trials=1)
    assert found in (0, 1 / 3, 2 / 3, 1)  # three are left
    assert accuracies(features, labels, seed=1) == accuracies(features, labels, seed=1)
    assert accuracies(features, labels, seed=1) != accuracies(features, labels, seed=2)


def test_a_feature_that_does_not_vary_changes_nothing():
    features, labels = clusters(5, 20, apart=2.0)
    wider = torch.cat([features, torch.full((60, 1), 7.0)], 1)
    assert accuracies(wider, labels) == pytest.approx(accuracies(features, labels), abs=1e-9)


def test_scale_of_the_features_changes_nothing():
    features, labels = clusters(6, 20, apart=2.0)
    assert accuracies(features * 1e-4 + 3, labels) == pytest.approx(accuracies(features, labels), abs=0.03)


@pytest.mark.parametrize(
    ("labels", "per_class", "message"),
    [
        ("aab", [], "has 3 labels for 4 sentences"),
        ("aaaa", [], "has the class 'a' only"),
        ("aaab", [], "has 1 sentences of class 'b'; with 1 of each .* at least 2"),
        ("aabb", [1, 2], "has 2 sentences of class 'a'; with 2 .* at least 3: give more, or lower"),
    ],
)
def test_labels_that_a_probe_cannot_learn_are_refused(labels, per_class, message):
    with pytest.raises(DataError, match=f"^labels.txt {message}"):
        require_labels(list(labels), 4, per_class, "labels.txt")


def test_labels_that_a_probe_can_learn():
    require_labels(list("aabb"), 4, [], "labels.txt")
    require_labels(list("aabb"), 4, [1], "labels.txt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"one\n\ntwo\n", "line 2 is empty"),
        (b"", "is empty; it needs one sentence a line"),
        (b"\xff\xfe\n", "is not UTF-8 text"),
        (b'{"text": "one"}\n', "holds JSON objects, but a line of it is one sentence"),
        (None, "No such file"),
    ],
)
def test_files_that_are_no_sentences_are_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "lines.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_lines(tmp_path / "lines.txt", "--input", "sentence")
    (tmp_path / "good.txt").write_text("one \n two")
    assert read_lines(tmp_path / "good.txt", "--input", "sentence") == ["one", "two"]


def test_lines_end_with_a_line_feed_and_nothing_else(tmp_path):
    """A byte order mark is no part of the first one; what Python's splitlines takes for ends of lines is text."""
    whole = ["one\u0085two", "three\u2028four\x0bfive", "six"]
    (tmp_path / "lines.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(whole).encode() + b"\n")
    assert read_lines(tmp_path / "lines.txt", "--input", "sentence") == whole
    (tmp_path / "spaces.txt").write_bytes(b" one \r\ntwo")
    assert read_lines(tmp_path / "spaces.txt", "--input", "text", keep_spaces=True) == [" one ", "two"]


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(DataError, match=r"not a regular file.*; name a file with one sentence a line"):
            read_lines(path, "--input", "sentence")


def test_a_plane_is_that_of_the_largest_variance():
    generator = torch.Generator().manual_seed(1)
    mu = torch.randn(200, 5, generator=generator, dtype=torch.float64) * torch.tensor(
        [0.1, 3.0, 0.1, 1.0, 0.1]
    )
    places, names = plane(mu, None)
    assert places.shape == (200, 2) and [name.split(" (")[0] for name in names] == [
        "principal component 1", "principal component 2"
    ]  # fmt: skip
    for i, axis in enumerate((1, 3)):
        assert torch.corrcoef(torch.stack([places[:, i], mu[:, axis]]))[0, 1] > 0.99  # the sign too
    chosen, names = plane(mu, (4, 0))
    assert torch.equal(chosen, mu[:, [4, 0]]) and names == ["component 4", "component 0"]
    flat, _ = plane(mu[:, :1], None)
    assert flat.shape == (200, 2) and (flat[:, 1] == 0).all()
    assert plane(torch.zeros(4, 3).double(), None)[0].isfinite().all()


@pytest.mark.parametrize("labelled", [False, True])
def test_pictures_are_drawn(tmp_path, labelled):
    mu = torch.randn(50, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = [f"class {i % 12}" for i in range(50)] if labelled else None
    draw(tmp_path / "space.png", mu, gaussian_kl(mu, torch.zeros_like(mu)), labels, (0, 2))
    assert (tmp_path / "space.png").stat().st_size > 10_000
    draw(tmp_path / "space.svg", mu, gaussian_kl(mu, mu * 0), labels)
    text = (tmp_path / "space.svg").read_text()
    assert "svg" in text[:500]
    with pytest.raises(DataError, match=r"--picture .*none/a\.png"):
        draw(tmp_path / "space.svg/none/a.png", mu, mu, labels)
