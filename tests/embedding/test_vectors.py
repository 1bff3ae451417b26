"""The vector of a text: pooled over its own tokens alone, in any batch, with prompts, cuts and gradients."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from support.hf.hf_runs import tree, write_run, write_vocabulary

from data_utils.common.errors import ConfigError
from data_utils.common.settings import merge
from data_utils.tasks.base import TaskSample
from data_utils.tasks.templates.collate import collate
from megatron_lite.config.embedding import EmbeddingConfig
from megatron_lite.embedding.embedder import Embedder, TextFormat, batches
from megatron_lite.inference.open_run import load_run
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.pooling import TextBatch, finished

TEXTS = ["word1 word2 word3", "word4", "word5 . word6 , word7 word8 word9", "word1 word2"]
PROMPTS = {"query": "word9 word8 "}
OBJECTIVES = {
    "glm": {},
    "bert": {"objectives": {"masked_lm": 1}},
    "bart": {"objectives": {"bart": 1}, "model": {"decoder_layers": 2, "positions": "learned"}},
    "causal": {"objectives": {"causal": 1}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    found = {}
    for name, settings in OBJECTIVES.items():
        directory = tmp_path_factory.mktemp(name)
        write_run(directory / "run", merge(tree(write_vocabulary(directory)), settings))
        found[name] = load_run(directory / "run", device=torch.device("cpu"))
    return found


def embed(run, texts=TEXTS, prompt=None, dimensions=None, batch_tokens=1000, **settings):
    text_format = TextFormat(run, EmbeddingConfig(prompts=PROMPTS, **settings), prompt)
    return Embedder(run, text_format, dimensions, batch_tokens).embed(texts)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_text_has_the_same_vector_in_every_batch(runs, name):
    """Packed with others, whose tokens it neither sees nor averages, and alone."""
    run = runs[name]
    alone = np.concatenate([embed(run, [text]) for text in TEXTS])
    for batch_tokens in (1, 9, 1000):
        assert np.abs(embed(run, batch_tokens=batch_tokens) - alone).max() < 1e-5
    assert np.abs(alone[0] - alone[2]).max() > 0.01


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_padding_of_a_batch_is_in_no_mean(runs, pooling):
    """Texts of several lengths in a row each, as training may have them."""
    run = runs["glm"]
    text_format = TextFormat(run, EmbeddingConfig(pooling=pooling))
    documents = text_format.documents(TEXTS)
    fields, _ = collate([TaskSample([each.example], []) for each in documents])
    batch = TextBatch(fields, pooling=pooling)
    with torch.no_grad():
        vectors = run.model.text_vectors(MicroBatch.from_batch(batch, torch.device("cpu"), run.config.model))
    alone = [embed(run, [text], pooling=pooling, normalize=False) for text in TEXTS]
    assert np.abs(vectors.numpy() - np.concatenate(alone)).max() < 1e-5


def keep(outputs, module, inputs, output):
    outputs.append(output)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_poolings_are_of_the_hidden_states(runs, name):
    """Special tokens too; after the last norm, in a model with a decoder that of the encoder."""
    run = runs[name]
    vectors = {pooling: embed(run, pooling=pooling, normalize=False) for pooling in ("mean", "last")}
    text_format = TextFormat(run, EmbeddingConfig())
    assert text_format.config.pooling == ("last" if name == "causal" else "mean")
    for number, document in enumerate(text_format.documents(TEXTS)):
        micro_batch = MicroBatch.from_batch(
            text_format.batch([document]), torch.device("cpu"), run.config.model
        )
        length = len(document.example.tokens)
        model = run.model
        with torch.no_grad():
            if model.config.decoder_layers:
                encoded: list[torch.Tensor] = []
                hook = model.encoder_layernorm.register_forward_hook(partial(keep, encoded))
                model.text_vectors(micro_batch)
                hook.remove()
                hidden = encoded[0]
            else:
                inputs = micro_batch.tokens, micro_batch.ids, micro_batch.plan
                hidden = model.final_layernorm(model.run(*inputs, None))
        hidden = hidden[:length].numpy()
        assert np.abs(vectors["mean"][number] - hidden.mean(0)).max() < 1e-5
        assert np.abs(vectors["last"][number] - hidden[length - 1]).max() < 1e-5


def test_a_prompt_is_read_before_the_text_is_cut_and_may_be_left_out_of_the_mean(runs):
    run = runs["bert"]
    with_text = embed(run, [PROMPTS["query"] + text for text in TEXTS])
    assert np.array_equal(embed(run, prompt="query"), with_text)
    assert np.abs(embed(run, prompt="") - with_text).max() > 0.01
    # [CLS] word9 word8 word1 [SEP]: of the text only its first word fits.
    cut = embed(run, ["word1 word2 word3"], "query", max_length=5)
    assert np.abs(cut - embed(run, ["word1"], "query")).max() < 1e-6
    # Without the prompt: of [CLS] word9 word8 word1 [SEP] the last two.
    dropped = embed(run, ["word1"], "query", include_prompt=False, pooling="mean", normalize=False)
    text_format = TextFormat(run, EmbeddingConfig(prompts=PROMPTS), "query")
    batch = MicroBatch.from_batch(
        text_format.batch(text_format.documents(["word1"])), torch.device("cpu"), run.config.model
    )
    with torch.no_grad():
        hidden = run.model.final_layernorm(run.model.run(batch.tokens, batch.ids, batch.plan, None))
    assert np.abs(dropped[0] - hidden[3:5].numpy().mean(0)).max() < 1e-5


def test_a_cut_vector_is_normalized_anew(runs):
    whole, cut = embed(runs["bert"], normalize=False), embed(runs["bert"], dimensions=8)
    expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    assert np.abs(cut - expected).max() < 1e-6
    with pytest.raises(ConfigError, match="--dimensions is 33"):
        embed(runs["bert"], dimensions=33)


def test_gradients_of_packed_texts_are_the_sums_of_each_alone(runs):
    """As training needs it: a loss of vectors reaches every weight through the pooling."""
    run = runs["glm"]
    text_format = TextFormat(run, EmbeddingConfig())
    documents = text_format.documents(TEXTS)

    def gradients(*groups):
        run.model.zero_grad()
        for group in groups:
            batch = MicroBatch.from_batch(text_format.batch(group), torch.device("cpu"), run.config.model)
            finished(run.model.text_vectors(batch), True)[:, 0].sum().backward()
        return {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None}

    together, apart = gradients(documents), gradients(*([each] for each in documents))
    assert together.keys() == apart.keys() and len(together) > 20
    assert max((together[name] - apart[name]).abs().max().item() for name in together) < 1e-5
    assert max(gradient.abs().max().item() for gradient in together.values()) > 1e-3


def test_what_a_run_cannot_take_is_refused(runs):
    for settings, message in (
        ({"max_length": 99}, "has 65 positions"),
        ({"include_prompt": False, "pooling": "last"}, "include_prompt"),
        ({"default_prompt": "other"}, "other"),
        (
            {"include_prompt": False, "pooling": "mean", "max_length": 4, "default_prompt": "query"},
            "the prompt",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            embed(runs["glm"], **settings)
    with pytest.raises(ConfigError, match="reads from left to right"):
        embed(runs["causal"], pooling="cls")


def test_batches_hold_at_most_the_tokens_asked_for_the_longest_first():
    found = list(batches([3, 9, 4, 20, 1], 8))
    assert found == [[3], [1], [2, 0, 4]]
