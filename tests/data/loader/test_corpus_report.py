"""How much of its corpora a run reads, against the samples themselves."""

import re
import shutil

import numpy as np
import pytest
import yaml
from support.commands import assert_refused, forked
from support.data.corpora import build
from support.project import small_run

from data_utils.common.seeds import derive_seed
from data_utils.common.settings import merge
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.loader.config import CorpusConfig, DataConfig
from data_utils.loader.corpus_report import corpus_report, overlap
from data_utils.loader.loader import open_datasets, phase_mixtures
from data_utils.loader.mixture import Mixture
from data_utils.loader.mixtures_ahead import corpus_report_if_here
from data_utils.loader.sampler import WindowIndex
from data_utils.objectives import ObjectiveChoice
from data_utils.objectives.blank_infilling.config import BlankInfillingConfig
from data_utils.objectives.interface import DOCUMENT_OVERHEAD
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from megatron_lite.config.tree import load_config

CHOICES = [ObjectiveChoice("blank_infilling", BlankInfillingConfig())]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpora")
    for name, documents in (("a", 300), ("b", 40), ("one", 1)):
        build(directory / name, [[1] * 12] * documents, 100, eos=1)
    return directory


def mixture(corpora, *names):
    datasets = [(WindowIndex(IndexedDataset(corpora / name), 16, 4), 1.0) for name in names]
    return Mixture(datasets, seed=7)


def test_tokens_and_epochs_match_the_samples(corpora):
    mixed = mixture(corpora, "a", "b")
    corpus, _, windows = mixed.locate(np.arange(5000))
    tokens = sum(len(mixed.indexes[c].gather(np.array([w]))[0]) for c, w in zip(corpus, windows, strict=True))
    line, *lines = corpus_report([mixed], 5000, 8)
    a, b = np.bincount(corpus)
    assert line == f"training reads {tokens:,} tokens in 5,000 samples"
    assert lines[:2] == [
        f"{corpora}/a: 300 documents, 3,600 tokens, 300 windows; {a:,} samples ({a / 5000:.1%}), "
        f"{12 * a / tokens:.1%} of the tokens, read {a / 300:.3g} times",
        f"{corpora}/b: 40 documents, 480 tokens, 40 windows; {b:,} samples ({b / 5000:.1%}), "
        f"{12 * b / tokens:.1%} of the tokens, read {b / 40:.0f} times",
    ]
    assert [warning.partition(";")[0] for warning in lines[2:]] == [
        f"warning: {corpora}/a is read {a / 300:.3g} times",
        f"warning: {corpora}/b is read {b / 40:.0f} times",
    ]


def test_one_window_for_a_whole_run_is_warned_of_twice(corpora):
    *_, many, few = corpus_report([mixture(corpora, "one")], 96_000, 8)
    assert [warning.partition(";")[0] for warning in (many, few)] == [
        f"warning: {corpora}/one is read 96,000 times",
        f"warning: {corpora}/one has 12 tokens, 1 samples, fewer than the batch size (8), "
        "so one step reads the same text more than once.",
    ]


def test_few_epochs_are_not_warned_of(corpora):
    lines = [list(corpus_report([mixture(corpora, "a")], samples, 8)) for samples in (300 * 4, 300 * 4 + 30)]
    assert [sum(line.startswith("warning: ") for line in each) for each in lines] == [0, 1]
    lines = [list(corpus_report([mixture(corpora, "a")], 300 * 4, batch_size)) for batch_size in (300, 301)]
    assert [sum(line.startswith("warning: ") for line in each) for each in lines] == [0, 1]


def test_a_start_tells_it_and_warns_of_validation_on_training_text(corpus, tmp_path):
    tree = small_run(corpus, tmp_path / "run")
    tree = merge(tree, {"data": {"validation": tree["data"]["train"]}, "training": {"steps": 3}})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    done = forked("pretrain_glm.py", "--config", tmp_path / "config.yaml")
    assert done.returncode == 0, done.stderr
    assert "training reads " in done.stdout and f"{corpus}/corpus_train: " in done.stdout
    same = f"warning: the validation corpus {corpus}/corpus_train has the same tokens as the training corpus"
    assert same in done.stdout


def test_a_dry_run_tells_it_where_the_corpora_are(corpora, tmp_path):
    data = DataConfig(train=(CorpusConfig(prefix=str(corpora / "a")),), sequence_length=16)
    line, of_corpus, warning = corpus_report_if_here(data, 7, 24_000, 8, CHOICES)
    assert line == "training reads 288,000 tokens in 24,000 samples" and of_corpus.endswith("read 80 times")
    assert warning.startswith(f"warning: {corpora}/a is read 80 times")
    for missing in ((CorpusConfig(prefix="absent"),), ()):
        (line,) = corpus_report_if_here(DataConfig(train=missing), 7, 24_000, 8, CHOICES)
        assert line.endswith("is not on this machine, so the number of epochs is unknown")


def test_a_dry_run_refuses_a_run_with_too_little_text(corpora, tmp_path):
    tree = small_run(corpora, tmp_path / "run")
    tree.pop("tokenizer")
    data = {
        "train": [{"prefix": str(corpora / "a"), "max_epochs": 2}],
        "validation": [],
        "sequence_length": 64,
    }
    tree = merge(tree, {"model": {"vocab_size": 128}, "data": data, "training": {"steps": 40}})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    windows = WindowIndex(IndexedDataset(corpora / "a"), 64, DOCUMENT_OVERHEAD).num_windows
    done = forked("pretrain_glm.py", "--config", tmp_path / "config.yaml", "--dry-run", 1)
    assert_refused(done, f"it suffices for {2 * windows // 8} of the 40 steps")
    done = forked(
        "pretrain_glm.py",
        "--config",
        tmp_path / "config.yaml",
        f"training.steps={2 * windows // 8}",
        "--dry-run",
        1,
    )
    assert done.returncode == 0 and "warning: " not in done.stdout


def test_one_data_set_under_two_names_is_warned_of(corpus, tmp_path):
    copy = tmp_path / "copy"
    for suffix in (".bin", ".idx", ".json"):
        shutil.copyfile(f"{corpus / 'corpus_train'}{suffix}", f"{copy}{suffix}")
    train = tuple(CorpusConfig(prefix=str(prefix)) for prefix in (corpus / "corpus_train", copy))
    tokenizer = load_tokenizer(TokenizerConfig(kind="bert_wordpiece", path=str(corpus / "vocab.txt")))
    (warning,) = overlap(open_datasets(DataConfig(train=train), CHOICES, tokenizer, seed=3))
    assert f"the same tokens twice, as {corpus / 'corpus_train'} and {copy}" in warning


def test_each_phase_is_reported_as_it_is_dealt(corpora):
    first = mixture(corpora, "a", "b")
    mixtures = [first, first.following(3000, [1, 0])]
    located = [first.locate(np.arange(3000)), mixtures[1].locate(np.arange(3000, 5000))]
    counts = [np.bincount(corpus, minlength=2) for corpus, _, _ in located]
    _, *of_corpora, first, second, _, _ = corpus_report(mixtures, 5000, 8)
    a, b = sum(counts)
    assert f"; {a:,} samples (" in of_corpora[0] and of_corpora[0].endswith(f", read {a / 300:.0f} times")
    assert f"; {b:,} samples (" in of_corpora[1] and of_corpora[1].endswith(f", read {b / 40:.0f} times")
    tokens = [int(count @ (12, 12)) for count in counts]
    a, b = counts[0] / (300, 40)
    assert [first, second] == [
        f"phase 1 reads {tokens[0]:,} tokens: a {a:.3g} times, b {b:.0f} times",
        f"phase 2 reads {tokens[1]:,} tokens: a {2000 / 300:.3g} times",
    ]


def test_phases_of_several_lengths_are_reported_as_they_are_read(corpora, tmp_path):
    """Short phases leave most of an epoch's windows unread. A dry run of the whole configuration says the same."""
    tree = small_run(corpora, tmp_path / "run")
    tree.pop("tokenizer")
    tree = merge(tree, {"model": {"vocab_size": 128}})
    data = {"train": [{"prefix": str(corpora / "a")}, {"prefix": str(corpora / "b")}], "validation": []}
    phases = [
        {"steps": 1, "sequence_length": 40},
        {"steps": 4, "sequence_length": 60},
        {"sequence_length": 40},
    ]
    tree = merge(tree, {"data": data, "training": {"steps": 60}, "phases": phases})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    done = forked("pretrain_glm.py", "--config", tmp_path / "config.yaml", "--dry-run", 1)
    assert done.returncode == 0, done.stderr
    told = [
        int(text.replace(",", ""))
        for text in re.findall(r" reads ([-\d,]+) tokens", re.sub(r"\s+", " ", done.stdout))
    ]
    config = load_config([str(tmp_path / "config.yaml")], [])
    indexes = [WindowIndex(IndexedDataset(corpora / name), 40, DOCUMENT_OVERHEAD) for name in ("a", "b")]
    mixtures = phase_mixtures(indexes, derive_seed(config.training.seed, "train"), config.phase_plan.samples)
    batch = config.batch.global_batch_size
    read = [
        sum(len(mixture.fetch(np.array([sample]))[0]) for sample in range(first * batch, last * batch))
        for mixture, first, last in zip(mixtures, (0, 1, 5), (1, 5, 60), strict=True)
    ]
    for here, there in zip([sum(read), *read], told, strict=True):
        assert abs(here - there) <= max(20, 0.01 * here)
