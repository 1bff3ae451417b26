"""Bounds of the likelihood and measures of the latent space, where the true values are known."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from support.systems.linear_gaussian import LinearGaussian

from data_utils.common.errors import CheckpointError, ConfigError, DataError
from megatron_lite.models.optimus.bounds import (
    Measured,
    active_units,
    measure,
    mutual_information,
    perplexity,
    summarize,
)
from megatron_lite.models.optimus.inputs import Sampling
from megatron_lite.models.optimus.latent import gaussian_kl, normals
from megatron_lite.models.optimus.metrics import LatentMetrics
from megatron_lite.parallel.context import ParallelContext


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def fixed(mu, variance):
    """A posterior that does not look at x."""
    return lambda x: (
        torch.full((len(x), 1), mu).double(),
        torch.full((len(x), 1), math.log(variance)).double(),
    )


def one_dimension(posterior=None):
    return LinearGaussian(torch.ones(1, 1), torch.zeros(1), 1.0, posterior)


def orthogonal():
    """3 latent components, of which the second carries nothing; 4 components of x."""
    weight = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, -1.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
    return LinearGaussian(weight, torch.tensor([0.5, -1.0, 0.0, 2.0]), 0.7)


@pytest.mark.parametrize("samples", [1, 4, 20])
def test_with_the_exact_posterior_every_bound_is_the_evidence(samples):
    """For every k and every draw: the weights are all p(x)."""
    model = orthogonal()
    x = model.draw(50, seed=1)
    measured = measure(
        model, model.sentences(x), Sampling(samples=samples, chunk=2 if samples > 1 else 1, batch=8)
    )
    torch.testing.assert_close(measured.bound, model.evidence(x), rtol=0, atol=1e-11)


def test_the_known_evidence_of_one_dimension():
    """log p(1) = -1.51551 for W = deviation = 1."""
    model = one_dimension()
    measured = measure(model, model.sentences(column(1.0)), Sampling(samples=3, chunk=3))
    assert measured.bound.item() == pytest.approx(-1.51551, abs=5e-6)
    assert model.evidence(column(1.0)).item() == pytest.approx(-1.51551, abs=5e-6)


# Mean of L_k for q = N(mu, variance) at x = 1. L_1 is the ELBO, log p - KL(q || posterior), in closed form.
KNOWN = {
    (0.8, 0.5): {1: -1.60551, 5: -1.535, 20: -1.520, 100: -1.516},
    (0.0, 1.0): {1: -1.91894, 5: -1.558, 20: -1.525, 100: -1.517},
}


@pytest.mark.parametrize("posterior", KNOWN)
def test_bounds_of_a_posterior_that_is_not_exact(posterior):
    """Within 4 standard errors of the known means, which are given to 0.001; rising with k, and below the evidence."""
    model = one_dimension(fixed(*posterior))
    count = 20_000
    sentences = model.sentences(torch.ones(count, 1).double())
    before = -math.inf
    for samples, known in KNOWN[posterior].items():
        here = sentences[: count if samples < 5 else 4000]
        measured = measure(model, here, Sampling(samples=samples, chunk=samples, batch=10_000))
        mean, error = measured.bound.mean().item(), (measured.bound.std() / len(here) ** 0.5).item()
        assert mean == pytest.approx(known, abs=0.001 + 4 * error)
        assert error < 0.01 and before < mean < -1.51551 + 4 * error
        before = mean
        elbo = -measured.negative_elbo.mean().item()
        assert elbo == pytest.approx(KNOWN[posterior][1], abs=0.001 + 4 * error)


def test_the_elbo_is_the_evidence_less_the_divergence_from_the_posterior():
    """In closed form: -1.60551 and -1.91894."""
    for (mu, variance), known in KNOWN.items():
        q = torch.distributions.Normal(mu, variance**0.5)
        apart = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.5, 0.5**0.5))
        assert -1.51551 - apart.item() == pytest.approx(known[1], abs=1e-5)


def test_bounds_rise_with_the_samples_on_the_same_sentences():
    """Each step down, if there is one, is no more than 3 standard errors of the difference."""
    exact = orthogonal()

    def blurred(x):
        mu, logvar = exact.exact(x)
        return mu + 0.4, logvar + 0.5

    model = LinearGaussian(exact.weight, exact.bias, exact.deviation, blurred)
    x = model.draw(256, seed=2)
    sentences = model.sentences(x)
    found = [
        measure(model, sentences, Sampling(samples=k, chunk=min(k, 5), batch=64)) for k in (1, 5, 20, 100)
    ]
    bounds = [-found[-1].negative_elbo, *(one.bound for one in found), model.evidence(x)]
    for lower, higher in itertools.pairwise(bounds):
        step = higher - lower
        assert step.mean() > -3 * step.std() / 256**0.5
    assert bounds[2].mean() > bounds[1].mean() + 0.1  # k = 5 is clearly better than k = 1
    assert bounds[-1].mean() - bounds[-2].mean() < 0.05


def test_one_sample_is_the_elbo_in_expectation_only():
    model = one_dimension(fixed(0.8, 0.5))
    one = measure(
        model, model.sentences(torch.ones(20_000, 1).double()), Sampling(samples=1, chunk=1, batch=20_000)
    )
    apart = one.bound + one.negative_elbo
    assert apart.abs().mean() > 0.1
    assert abs(apart.mean()) < 4 * apart.std() / 20_000**0.5


def test_neither_chunks_nor_batches_nor_other_sentences_change_a_number():
    model = LinearGaussian(*(getattr(orthogonal(), name) for name in ("weight", "bias", "deviation")),
                           lambda x: (x[:, :3] * 0.1, x[:, :3] * 0.2))  # fmt: skip
    sentences = model.sentences(model.draw(11, seed=3))
    whole = measure(model, sentences, Sampling(samples=12, chunk=12, batch=11))
    for chunk, batch in ((1, 11), (4, 3), (6, 1)):
        model.calls.clear()
        cut = measure(model, sentences, Sampling(samples=12, chunk=chunk, batch=batch))
        assert max(shape[0] for shape in model.calls) == batch and {s[1:] for s in model.calls} == {
            (chunk, 3)
        }
        torch.testing.assert_close(cut.bound, whole.bound, rtol=0, atol=1e-12)
        torch.testing.assert_close(cut.reconstruction, whole.reconstruction, rtol=0, atol=1e-12)
        assert torch.equal(cut.z, whole.z)
    fewer = measure(model, sentences[:4], Sampling(samples=12, chunk=4, batch=3))
    torch.testing.assert_close(fewer.bound, whole.bound[:4], rtol=0, atol=1e-12)
    other = measure(model, sentences, Sampling(samples=12, chunk=12, batch=11, seed=1))
    assert (other.bound - whole.bound).abs().min() > 1e-6


def test_weights_that_only_logarithms_hold_are_summed():
    """Likelihoods around exp(-4000), which are 0 in fp64."""
    model = LinearGaussian(torch.full((1, 1), 0.01), torch.zeros(1), 0.01, fixed(0.0, 1.0))
    x = column(1.2)
    assert model.evidence(x) < -3000 and math.exp(-3000) == 0
    measured = measure(model, model.sentences(x), Sampling(samples=400, chunk=5))
    assert torch.isfinite(measured.bound).all() and measured.bound < model.evidence(x)
    assert measured.bound > -measured.negative_elbo


def test_noise_is_normal_and_a_function_of_its_position():
    noise = normals(5, "posterior", range(400), 0, 50, 7)
    assert torch.equal(normals(5, "posterior", range(3, 5), 20, 10, 7), noise[3:5, 20:30])
    assert not torch.equal(normals(5, "prior", range(3, 5), 20, 10, 7), noise[3:5, 20:30])
    assert not torch.equal(normals(6, "posterior", range(3, 5), 20, 10, 7), noise[3:5, 20:30])
    noise = noise.flatten(0, 1)
    assert noise.shape == (20_000, 7)
    assert noise.mean().abs() < 4 / 140_000**0.5 and abs(noise.var() - 1) < 4 * (2 / 140_000) ** 0.5
    assert (noise.T.corrcoef() - torch.eye(7)).abs().max() < 5 / 20_000**0.5
    ordered = noise.flatten().sort().values
    distance = torch.special.ndtr(ordered) - (torch.arange(140_000) + 0.5) / 140_000
    assert distance.abs().max() < 1.95 / 140_000**0.5  # Kolmogorov and Smirnov, 0.1 %


def test_mutual_information_of_the_model_and_its_mean_divergence():
    """1/2 ln det(I + W'W / deviation^2) = 0.34657 for one dimension, where the data come from the model."""
    model = one_dimension()
    x = model.draw(4000, seed=4)
    measured = measure(model, model.sentences(x), Sampling(samples=1, chunk=1, batch=4000))
    divergence = measured.divergence.sum(1)
    assert divergence.mean().item() == pytest.approx(0.34657, abs=4 * divergence.std().item() / 4000**0.5)
    found = mutual_information(measured.mu, measured.logvar, measured.z)
    assert found == pytest.approx(0.34657, abs=0.03)


def test_mutual_information_of_several_dimensions():
    model = orthogonal()
    x = model.draw(3000, seed=5)
    measured = measure(model, model.sentences(x), Sampling(samples=1, chunk=1, batch=3000))
    known = 0.5 * torch.logdet(torch.eye(3).double() + model.weight.T @ model.weight / model.deviation**2)
    assert mutual_information(measured.mu, measured.logvar, measured.z) == pytest.approx(
        known.item(), abs=0.07
    )


def test_mutual_information_by_its_definition_in_blocks_of_any_size():
    generator = torch.Generator().manual_seed(6)
    mu, logvar, noise = torch.randn(3, 50, 6, generator=generator, dtype=torch.float64)
    z = mu + torch.exp(logvar / 2) * noise
    normal = torch.distributions.Normal(mu[None], torch.exp(logvar / 2)[None])
    aggregate = torch.logsumexp(normal.log_prob(z[:, None]).sum(-1), 1) - math.log(50)
    entropy = torch.distributions.Normal(mu, torch.exp(logvar / 2)).entropy().sum(1)
    for block in (50, 7, 1, 1000):
        found = mutual_information(mu, logvar, z, block)
        assert found == pytest.approx((-entropy - aggregate).mean().item(), abs=1e-10)
    # As an evaluation reports it: in two passes, of which the second has a row of padding.
    metrics, nothing = LatentMetrics(), torch.full((1, 6), 1e3, dtype=torch.float64)
    mu[:, 2] *= 1e-3  # the one component that is not active
    z = mu + torch.exp(logvar / 2) * noise
    for part, padding in ((slice(0, 30), 0), (slice(30, 50), 1)):
        rows = (torch.cat([values[part], *[nothing] * padding]) for values in (mu, logvar, z))
        weight = torch.tensor([1.0] * (part.stop - part.start) + [0.0] * padding)
        metrics.add(SimpleNamespace(extra_inputs=SimpleNamespace(weight=weight), weights=2 * weight), *rows)
    found = metrics.summary(ParallelContext.alone(), 3.0)
    assert found["mutual_information"] == pytest.approx(mutual_information(mu, logvar, z), abs=1e-10)
    assert found["active_units"] == 5 and found["perplexity"] == pytest.approx(math.exp(3.0 * 50 / 100))


def test_sentences_that_are_told_apart_have_the_logarithm_of_their_number():
    mu = torch.arange(100.0, dtype=torch.float64)[:, None] * 50
    noise = normals(0, "posterior", range(100), 0, 1, 1)[:, 0]
    closed, log_q = (
        0.5,
        0.5 * noise.square().mean().item(),
    )  # the mean of what the closed form replaces, and its draw
    found = mutual_information(mu, torch.zeros_like(mu), mu + noise)
    assert found == pytest.approx(math.log(100) + log_q - closed, abs=1e-9)
    same = torch.zeros(100, 1, dtype=torch.float64)
    assert mutual_information(same, same, noise) == pytest.approx(log_q - closed, abs=1e-9)


def test_active_units_are_the_columns_of_the_weight_that_are_not_zero():
    model = orthogonal()
    mu, _ = model.exact(model.draw(500, seed=7))
    assert active_units(mu).tolist() == [True, False, True]
    flat = one_dimension()
    assert flat.exact(flat.draw(5000, seed=8))[0].var().item() == pytest.approx(0.5, abs=0.04)
    boundary = torch.tensor([[0.0, 0.0], [0.1414, 0.1415]])  # variances 0.009997 and 0.01001
    assert active_units(boundary).tolist() == [False, True]


def test_perplexity_counts_predicted_tokens_or_the_begin_too():
    numbers = torch.tensor([-6.0, -12.0], dtype=torch.float64)
    zeros = torch.zeros(2, 1, dtype=torch.float64)
    tokens = torch.tensor([2.0, 4.0], dtype=torch.float64)
    measured = Measured(numbers, -numbers, zeros, tokens, zeros, zeros, zeros)
    assert perplexity(measured) == pytest.approx(math.exp(18 / 6))
    assert perplexity(measured, count_bos=True) == pytest.approx(math.exp(18 / 8))
    endless = Measured(numbers * 1e6, -numbers, zeros, tokens, zeros, zeros, zeros)
    assert math.isfinite(perplexity(endless))


def test_a_summary_has_the_means():
    model = orthogonal()
    sentences = model.sentences(model.draw(30, seed=9))
    measured = measure(model, sentences, Sampling(samples=2, chunk=1))
    summary = summarize(measured)
    assert summary["sentences"] == 30 and summary["tokens"] == 30 * 5
    assert summary["negative_elbo"] == pytest.approx(summary["reconstruction"] + summary["divergence"])
    assert summary["divergence"] == pytest.approx(sum(summary["divergence_by_component"]))
    assert summary["divergence"] == pytest.approx(
        gaussian_kl(measured.mu, measured.logvar).sum().item() / 30, rel=1e-5
    )
    assert summary["active_units"] == 2 and summary["perplexity"] > summary["perplexity_with_bos"]
    assert summary["bound"] == pytest.approx(measured.bound.mean().item())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "--samples is 0; it must be at least 1"),
        ({"chunk": 0}, "--chunk is 0"),
        ({"batch": -1}, "--batch is -1"),
        ({"samples": 100, "chunk": 7}, r"--samples \(100\) is no multiple of --chunk \(7\)"),
    ],
)
def test_a_sampling_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)


def test_one_sentence_is_too_few():
    one = torch.zeros(1, 2, dtype=torch.float64)
    for refused in (lambda: active_units(one), lambda: mutual_information(one, one, one)):
        with pytest.raises(DataError, match=r"there are 1 sentences; .* at least 2"):
            refused()


def test_what_is_not_finite_is_refused_with_its_sentence():
    model = orthogonal()
    sentences = model.sentences(model.draw(5, seed=1))
    model.log_likelihood = lambda sentences, z: torch.tensor(
        [[0.0] if s.text != wrong else [math.nan] for s in sentences]
    )
    wrong = sentences[3].text
    with pytest.raises(CheckpointError, match=r"log likelihood of sentence 4 is not finite; .* earlier"):
        measure(model, sentences, Sampling(samples=1, chunk=1, batch=2))
    model.posterior = lambda x: (x * math.inf, x)
    with pytest.raises(CheckpointError, match="posterior of sentence 1 is not finite"):
        measure(model, sentences, Sampling(samples=1, chunk=1))
