import pytest
import torch
import torch.nn.functional as F
from support.distributed import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.transformer import loss as lm_loss
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.loss import LossTerms, loss_logits, prediction_losses
from megatron_lite.transformer.transformer import Transformer


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 11 * 3, 1 << 24])  # one row, three rows, all rows at a time
def test_equals_torch_for_every_chunking(monkeypatch, chunk_bytes):
    monkeypatch.setattr(lm_loss, "_CHUNK_BYTES", chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (7,), generator=generator)
    weights = torch.rand(7, generator=generator)
    expected = F.cross_entropy(logits, targets, reduction="none")
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), logits)
    ours = lm_loss.cross_entropy(logits * 1.0, targets)
    (grad,) = torch.autograd.grad((ours * weights).sum(), logits)
    # fp32 with another order of summation.
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-6)


def test_bf16_logits_are_summed_in_fp32():
    logits = torch.zeros(1, 50_000, dtype=torch.bfloat16)
    loss = lm_loss.cross_entropy(logits, torch.tensor([3]))
    assert loss.dtype == torch.float32
    # ln 50000; a bf16 sum of 50000 ones would stop at 256.
    torch.testing.assert_close(loss, torch.tensor([10.819778]), rtol=1e-6, atol=0)


def test_no_rows_give_no_loss_and_a_zero_gradient():
    weight = torch.randn(5, 4, requires_grad=True)
    loss = lm_loss.cross_entropy(torch.empty(0, 4) @ weight.T, torch.empty(0, dtype=torch.int64)).sum()
    loss.backward()
    assert loss == 0 and not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first, valid", [(0, 11), (0, 7), (5, 11), (11, 4), (22, 0)])
def test_shards_of_the_vocabulary_equal_fp64(dtype, first, valid):
    """Of a rank's shard of 11 columns, the last ones padding."""
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(30, 11, generator=generator)).to(dtype)
    targets = torch.randint(0, 22, (30,), generator=generator).int()
    grad = torch.rand(30, generator=generator)
    log_sums, _ = lm_loss._log_sums_by_torch(logits, targets, first, valid)
    assert (log_sums == -torch.inf).all() == (valid == 0)
    copy = logits.clone()
    lm_loss._write_gradient_by_torch(
        copy, targets, log_sums if valid else torch.zeros(30), grad, first, valid
    )
    assert not copy[:, valid:].any()
    if valid:
        exact = logits[:, :valid].double().requires_grad_()
        mine = (targets >= first) & (targets < first + valid)
        picked = exact.gather(1, (targets.long() - first).clamp(0, valid - 1)[:, None])[:, 0]
        loss = exact.logsumexp(-1) - torch.where(mine, picked, 0.0)
        (expected,) = torch.autograd.grad(loss, exact, grad.double())
        # The result is rounded once, its inputs are sums in fp32.
        tolerance = 1e-6 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(copy[:, :valid].double(), expected, rtol=tolerance, atol=1e-6)


def losses_of_a_shard(context, logits, targets, weights, terms):
    """Losses, and the gradient of this rank's 8 columns of a vocabulary of 11."""
    first, valid = 8 * context.tp.rank, 8 - 5 * context.tp.rank
    part = logits[:, first : first + 8].clone().requires_grad_()
    losses = lm_loss.cross_entropy(part * 1.0, targets, context.tp, first, valid, terms)
    (grad,) = torch.autograd.grad((losses * weights).sum(), part)
    return losses.detach(), grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_z_loss_over_shards_of_the_vocabulary_equals_torch(smoothing):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(7, 16, generator=generator)
    targets = torch.randint(0, 11, (7,), generator=generator)
    weights = torch.rand(7, generator=generator)
    real = logits[:, :11].double().requires_grad_()
    expected = F.cross_entropy(real, targets, reduction="none", label_smoothing=smoothing)
    expected = expected + 0.01 * real.logsumexp(-1).square()
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), real)
    (losses, first), (_, last) = run_ranks(
        losses_of_a_shard, 2, logits, targets, weights, LossTerms(smoothing, 11, 0.01),
        parallel=ParallelConfig(tensor_parallel_size=2),
    )  # fmt: skip
    # fp32 with another order of summation.
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    grad = torch.cat([first, last], 1)
    torch.testing.assert_close(grad[:, :11].double(), expected_grad, rtol=1e-6, atol=1e-6)
    assert not grad[:, 11:].any()


def test_the_logits_of_training_and_of_generation_have_the_bound():
    sizes = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 40,
        "max_position": 8,
    }
    models = [Transformer(ModelConfig(**sizes, init_std=1.0, logit_soft_cap=cap)) for cap in (None, 2.0)]
    for model in models:
        initialize_parameters(model.named_parameters(), model.config, 3)
    rows = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    free, bound = (model.logits(rows) for model in models)
    assert free.abs().max() > 4
    torch.testing.assert_close(bound, 2.0 * torch.tanh(free / 2.0))
    heads, words = models[1].heads, models[1].embedding.word_embeddings
    torch.testing.assert_close(
        heads.vocabulary_logits(rows, words)[:, :40],
        2.0 * torch.tanh(models[0].heads.vocabulary_logits(rows, words) / 2.0)[:, :40],
    )


class Largest(TorchDispatchMode):
    """Most elements of a tensor that operators made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 0.01)])
@pytest.mark.parametrize(
    "options", [{}, {"logit_soft_cap": 2.0}, {"head_bias": True, "span_boundary_places": 4}]
)
def test_the_loss_of_some_rows_of_logits_at_a_time_equals_torch(options, smoothing, z_loss):
    """In rows of five, 18 of tokens and 6 of boundaries; never are there more than a part's logits."""
    config = ModelConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=40, max_position=8, init_std=1.0, **options
    )  # fmt: skip
    model = Transformer(config, loss_rows=5)
    initialize_parameters(model.named_parameters(), config, 3)
    heads, words = model.heads, model.embedding.word_embeddings
    used = [p for p in (words.weight, heads.bias, heads.boundary_bias) if p is not None]
    for bias in used[1:]:
        torch.nn.init.normal_(bias)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(24, 8, generator=generator, requires_grad=True)
    targets, weights = torch.randint(0, 40, (24,), generator=generator), torch.rand(24, generator=generator)
    boundaries = 6 if len(used) == 3 else 0
    exact = [p.detach().double()[: 40 if p.dim() < 3 else None].requires_grad_() for p in (vectors, *used)]
    logits = exact[0] @ exact[1].T
    if boundaries:
        logits = torch.cat([logits[:18] + exact[2], logits[18:] + exact[3]])
    if config.logit_soft_cap is not None:
        logits = 2.0 * torch.tanh(logits / 2.0)
    expected = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    expected = expected + z_loss * logits.logsumexp(-1).square()
    with Largest() as largest:
        given = loss_logits(heads, vectors, words, boundaries), vectors.new_zeros(0, 2), targets, words
        losses = prediction_losses(*given, LossTerms(smoothing, 40, z_loss) if smoothing else None)
        found = torch.autograd.grad((losses * weights).sum(), (vectors, *used))
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)  # fp32 against fp64
    for ours, reference in zip(found, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        torch.testing.assert_close(ours[: len(reference)].double(), reference, rtol=1e-5, atol=1e-5)
    assert largest.elements == words.weight.numel()  # its gradient; that of 24 rows would be more
    assert 5 * len(words.weight) < largest.elements < 24 * len(words.weight)
