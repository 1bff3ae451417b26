"""A trained run as a model of sentences: what it measures, and the texts of its latent vectors."""

from dataclasses import asdict

import numpy as np
import pytest
import torch
from support.distributed import run_ranks
from support.systems.latent import corpus_tree
from support.training.training import fit

from data_utils.common.errors import ConfigError, DataError
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.inference.open_run import open_run
from megatron_lite.models.optimus.bounds import measure, summarize
from megatron_lite.models.optimus.inputs import Sampling
from megatron_lite.models.optimus.interface import Sentence
from megatron_lite.models.optimus.open_run import open_latent

TEXTS = ["word1 word2 word3.", "word7", "word5 word5 word9 word2 word11."]
TOLERANCE = 1e-5  # fp32, of the largest value


@pytest.fixture(scope="module")
def directory(corpus, tmp_path_factory):
    directory = tmp_path_factory.mktemp("latent") / "run"
    run_ranks(fit, 1, corpus_tree(corpus, directory))
    return directory


@pytest.fixture(scope="module")
def run(directory):
    run = open_latent(directory, device=torch.device("cpu"))
    with torch.no_grad():  # so that texts differ
        for parameter in run.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    return run


def test_sentences_are_read_for_both_stacks(run):
    first, *_ = run.read(TEXTS)
    assert first.encoder_tokens == first.decoder_tokens == run.tokenizer.encode(TEXTS[0])
    assert (
        run.longest == 39
    )  # max_position is 40: 41 positions hold CLS, SEP and 39 tokens, or the slot, BOS and 39


def test_batches_are_the_sentences_one_by_one(run):
    sentences = run.read(TEXTS)
    mu, logvar = run.encode(sentences)
    z = torch.randn(3, 2, 8, dtype=torch.float64)
    together = run.log_likelihood(sentences, z)
    for number, sentence in enumerate(sentences):
        one_mu, one_logvar = run.encode([sentence])
        assert (mu[number] - one_mu[0]).abs().max() <= TOLERANCE
        assert (logvar[number] - one_logvar[0]).abs().max() <= TOLERANCE
        for sample in range(2):
            alone = run.log_likelihood([sentence], z[number : number + 1, sample : sample + 1])
            assert alone.item() == pytest.approx(together[number, sample].item(), rel=TOLERANCE)


def test_greedy_texts_are_the_likeliest_token_by_token(run):
    """Kept keys and values, the memory's among them, give what reading the whole text again gives."""
    z = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    config = GenerationConfig(max_length=9)
    found = run.decode(z, config)
    assert len(set(found)) > 1
    special = run.decoder_tokenizer.special
    banned = set(asdict(special).values()) - {special.unk, special.eop}
    for number, text in enumerate(found):
        expected: list[int] = []
        while len(expected) < config.max_length:
            token = likeliest(run, z[number], expected, banned)
            if token == special.eop:
                break
            expected.append(token)
        assert text == run.decoder_tokenizer.decode(expected)


@torch.no_grad()
def likeliest(run, z, tokens, banned):
    """Of the whole text at once. BOS and every token have a row with loss."""
    batch = run._input([Sentence("", tokens, tokens)])
    latent = run.model.latent.condition(
        z[None], batch.extra_inputs.token_sentence, batch.extra_inputs.memory_slots
    )
    count = batch.plan.lengths[0]
    hidden = run.model.decoder.run(
        batch.tokens[count:], batch.ids[:, count:], batch.plan.decoder, None, condition=latent
    )
    logits = run.model.decoder.logits(hidden[-1])
    logits[sorted(token for token in banned if token >= 0)] = float("-inf")
    return int(logits.argmax())


def test_samples_depend_on_the_number_of_the_text_only(run):
    z = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    config = GenerationConfig(strategy="sample", max_length=6, seed=4)
    whole = run.decode(z, config)
    assert run.decode(z[2:], config, first=2) == whole[2:]
    assert run.decode(z, GenerationConfig(strategy="sample", max_length=6, seed=5)) != whole


def test_measures_of_a_run_are_finite_and_repeat(run):
    sentences = run.read(TEXTS)
    sampling = Sampling(samples=4, chunk=2, batch=2)
    first, again = (summarize(measure(run, sentences, sampling)) for _ in range(2))
    assert first == again and np.isfinite(first["perplexity"])
    assert first["tokens"] == sum(len(run.tokenizer.encode(text)) + 1 for text in TEXTS)


def test_an_untrained_run_is_the_configuration_at_step_0(directory):
    run = open_latent(directory, device=torch.device("cpu"))
    initial, weights = run.untrained().model.state_dict(), run.model.state_dict()
    assert initial.keys() == weights.keys()
    same = {name for name, weight in initial.items() if torch.equal(weight, weights[name])}
    assert same and all(".heads." in name for name in same)  # those without a part in the loss


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "text 2 has no token"), ("word1 " * 40, "text 2 has 40 tokens, but .* has positions for 39")],
)
def test_texts_that_do_not_fit_are_refused(run, text, message):
    with pytest.raises(DataError, match=message):
        run.read(["word1", text])


def test_other_commands_say_which_one_reads_the_run(directory):
    with pytest.raises(
        ConfigError, match=r"joins two Transformers by a latent vector; use scripts/latent\.py"
    ):
        open_run(directory).with_model()
