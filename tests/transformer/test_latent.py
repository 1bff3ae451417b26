"""Divergence, free bits and draws of the latent vector, against torch.distributions and closed forms."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from megatron_lite.models.optimus.latent import draw, gaussian_kl, with_free_bits


@pytest.fixture
def posterior():
    """mu and logvar [200, 7], far from the prior and near it, that want gradients."""
    generator = torch.Generator().manual_seed(1)
    mu, logvar = ((torch.randn(200, 7, generator=generator) * scale).requires_grad_() for scale in (1.5, 2.0))
    return mu, logvar


def test_divergence_and_gradient_match_torch(posterior):
    mu, logvar = posterior
    weights = torch.rand(mu.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad((gaussian_kl(mu, logvar) * weights).sum(), posterior)
    wide = [tensor.detach().double().requires_grad_() for tensor in posterior]
    normal = Normal(wide[0], torch.exp(wide[1] / 2))
    reference = kl_divergence(normal, Normal(torch.zeros_like(wide[0]), torch.ones_like(wide[0])))
    torch.testing.assert_close(gaussian_kl(mu, logvar).double(), reference, rtol=2e-6, atol=1e-7)
    for ours, theirs in zip(found, torch.autograd.grad((reference * weights).sum(), wide), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-6, atol=1e-7)


def test_divergence_near_the_prior_keeps_its_digits():
    """exp(x) - x - 1 is x**2 / 2 + x**3 / 6: in fp32 the terms 1 would hide it."""
    logvar = torch.tensor([[1e-2, -1e-2, 3e-3, 0.0]])
    expected = 0.5 * (logvar.double().exp() - 1 - logvar.double())
    assert gaussian_kl(torch.zeros(1, 4), logvar).double() == pytest.approx(expected, rel=1e-4, abs=0)
    assert (gaussian_kl(torch.zeros(1, 4), logvar) >= 0).all()


def test_all_is_in_fp32_for_narrow_inputs():
    mu, logvar = torch.full((1, 1), 3.0, dtype=torch.bfloat16), torch.full((1, 1), 1.0, dtype=torch.bfloat16)
    assert gaussian_kl(mu, logvar).dtype == torch.float32
    assert gaussian_kl(mu, logvar).item() == pytest.approx(0.5 * (9 + 2.718281828 - 2), rel=1e-6)
    assert draw(mu, logvar, torch.ones(1, 1)).item() == pytest.approx(3 + 1.6487212707, rel=1e-6)


def test_a_draw_is_the_mean_and_noise_times_the_deviation(posterior):
    mu, logvar = posterior
    noise = torch.randn(mu.shape, generator=torch.Generator().manual_seed(3))
    assert torch.equal(draw(mu, logvar, torch.zeros_like(mu)), mu)
    z = draw(mu, logvar, noise)
    torch.testing.assert_close((z - mu) / torch.exp(logvar / 2), noise, rtol=1e-4, atol=1e-4)
    by_mu, by_logvar = torch.autograd.grad(z.sum(), posterior)
    assert torch.equal(by_mu, torch.ones_like(mu))
    torch.testing.assert_close(by_logvar, noise * torch.exp(logvar / 2) / 2)


@pytest.mark.parametrize("free_bits", [0.0, 0.5, 2.0, 1e9])
def test_free_bits_have_the_gradients_of_the_papers_maximum(posterior, free_bits):
    """Exactly 0 where a divergence is at most `free_bits`, the divergence's own elsewhere; the values differ."""
    mu, logvar = posterior
    kl = gaussian_kl(mu, logvar)
    plain = torch.autograd.grad(kl.sum(), posterior, retain_graph=True)
    code = torch.autograd.grad(with_free_bits(kl, free_bits).sum(), posterior, retain_graph=True)
    floor = torch.tensor(free_bits)
    paper = torch.autograd.grad(torch.where(kl > floor, kl, floor).sum(), posterior, retain_graph=True)
    maximum = torch.autograd.grad(kl.clamp(min=free_bits).sum(), posterior)
    free = kl <= free_bits
    for ours, written_out, torch_max, whole in zip(code, paper, maximum, plain, strict=True):
        assert torch.equal(ours, written_out) and torch.equal(ours, torch_max)
        assert (ours[free] == 0).all() and torch.equal(ours[~free], whole[~free])
    below = (kl - with_free_bits(kl, free_bits)).detach()
    assert torch.equal(below, torch.where(free, kl, 0.0).detach())
    assert free_bits in (0.0, 1e9) or (free.any() and not free.all())  # both kinds are among them


def test_a_divergence_of_exactly_the_free_bits_is_free():
    mu = torch.tensor([[1.0]], requires_grad=True)
    kl = gaussian_kl(mu, torch.zeros(1, 1))
    assert kl.item() == 0.5
    (gradient,) = torch.autograd.grad(with_free_bits(kl, 0.5).sum(), mu)
    assert gradient.item() == 0.0


def test_what_is_not_finite_is_not_hidden():
    kl = torch.tensor([[float("nan"), float("inf"), 1.0]])
    assert with_free_bits(kl, 2.0).isnan().tolist() == [[True, False, False]]
    assert with_free_bits(kl, 2.0)[0, 1] == float("inf")
