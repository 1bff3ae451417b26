"""Training on spans that the corpus lists, from JSON lines to a run; a restart; corpora and phases that lack them."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from support.distributed import run_ranks
from support.training.training import fit, open_data, records
from support.training.whole_weights import load_weights

from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus
from data_utils.common.batch_fields import WEIGHTS
from data_utils.common.errors import ConfigError, DataError
from data_utils.common.settings import merge
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from megatron_lite.checkpoint.manifest import list_checkpoints
from megatron_lite.checkpoint.verify import read_checkpoint

LISTED = {
    "objectives": {"spanbert": 1.0, "ernie": 1.0},
    "spanbert": {"spans": "listed"},
    "ernie": {"segmenter": "listed"},
    "model": {"max_position": 80, "span_boundary_places": 10, "segments": 2},
    "training": {"steps": 4},
    "checkpoint": {"save_interval": 2},
}


@pytest.fixture(scope="module")
def listed(corpus, tmp_path_factory):
    """The corpus with the second and third of every four words as a span, built again with them."""
    directory = tmp_path_factory.mktemp("spans")
    with (directory / "text.jsonl").open("w") as file:
        for line in (corpus / "text.jsonl").read_text().splitlines():
            words = json.loads(line)["text"].split()
            starts = np.cumsum([0, *(len(word) + 1 for word in words)]).tolist()
            spans = [[starts[i], starts[i + 2] - 1, "noun"] for i in range(1, len(words) - 1, 4)]
            file.write(json.dumps({"text": " ".join(words), "found": spans}) + "\n")
    tokenizer = TokenizerConfig(kind="bert_wordpiece", path=str(corpus / "vocab.txt"))
    files = {"inputs": [str(directory / "text.jsonl")], "output": str(directory / "out")}
    build_corpus(BuildConfig(**files, spans_key="found"), partial(load_tokenizer, tokenizer))
    return str(directory / "out")


@pytest.fixture
def settings(settings, listed):
    return merge(settings, {"data": {"train": [{"prefix": listed}], "validation": []}})


def trained(settings, directory, **more):
    tree = merge(settings, merge(LISTED, {**more, "run": {"directory": str(directory)}}))
    run_ranks(fit, 1, tree)
    return load_weights(read_checkpoint(list_checkpoints(directory / "checkpoints")[-1]))


@pytest.mark.slow
def test_a_restart_equals_the_run_that_was_not_stopped(settings, tmp_path):
    whole = trained(settings, tmp_path / "one")
    seen = {name for step in records(tmp_path / "one").values() for name in step}
    assert seen >= {"loss/masked_spans", "loss/span_boundary", "loss/masked_units"}
    trained(settings, tmp_path / "cut", training={"steps": 4, "stop_after_step": 2})
    again = trained(settings, tmp_path / "cut")
    assert all(torch.equal(weight, whole[name]) for name, weight in again.items())


def masked_rows(tree, first):
    _, data = open_data(tree)
    return data.train.batch(np.arange(first, first + 8))[:, WEIGHTS] != 0


def test_a_phase_may_begin_to_read_spans(settings, corpus):
    """Also where the run itself does not; a corpus without them is refused at the start."""
    tree = merge(settings, merge(LISTED, {"ernie": {"segmenter": "words"}, "spanbert": {"spans": "words"}}))
    first = tree["batch"]["global_batch_size"]
    phases = [{"steps": 1}, {"steps": 3, "ernie": {"segmenter": "listed"}}]
    phased = merge(tree, {"phases": phases})
    assert np.array_equal(masked_rows(tree, 0), masked_rows(phased, 0))
    assert not np.array_equal(masked_rows(tree, first), masked_rows(phased, first))
    without = {"data": {"train": [{"prefix": str(corpus / "corpus_train")}]}, "phases": phases}
    with pytest.raises(
        DataError, match=r"corpus_train has no spans, which the objective needs; rebuild it with --sp"
    ):
        open_data(merge(tree, without))


def test_objectives_that_read_other_things_beside_tokens_do_not_mix(settings):
    more = {
        "objectives": {"spanbert": 1.0, "capitalization": 1.0},
        "model": {"class_heads": ["capitalization:2"]},
    }
    tree = merge(settings, merge(LISTED, merge(more, {"model": {"sentence_classes": 2}})))
    tree["objectives"] = more["objectives"]
    with pytest.raises(ConfigError, match="the objectives read capitals and spans, but a corpus"):
        open_data(tree)
