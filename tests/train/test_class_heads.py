"""Heads of classes with the vocabulary's: against separate heads, in layouts, after a restart, and what they learn."""

import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.data.recipes import SPECIAL, make, windows
from support.data.recipes import collate as collate_windows
from support.distributed import run_ranks
from support.hf.hf_runs import tree, write_run, write_vocabulary
from support.project import ROOT
from support.training.class_heads import learnt_classes
from support.training.training import fit, make_trainer, records
from support.training.whole_weights import load_weights

from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus
from data_utils.common.batch_fields import OBJECTIVE
from data_utils.common.errors import ConfigError, DataError
from data_utils.common.losses import CLASS_HEADS, NEXT_SENTENCE_LOSS
from data_utils.common.settings import build, merge
from data_utils.objectives import LOSS_NAMES, OBJECTIVES, make_one
from data_utils.objectives.mixed import Mixed
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from data_utils.tokenizers.vocabulary import Vocabulary
from megatron_lite.checkpoint.manifest import list_checkpoints
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config, load_config
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.hf.published.heads import OTHER_HEADS
from megatron_lite.inference.open_run import load_run
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.task_heads import SentenceHead

HEADS = ("sentence_reordering:9", "sentence_distance:3", "token_document:2", "capitalization:2")
NAMES = tuple(head.partition(":")[0] for head in HEADS)  # of pairs: tests/train/test_labelled_pairs.py
assert set(NAMES) == CLASS_HEADS.keys() - {"discourse_relation", "relevance"}
ERNIE_ROWS = [-1] * 8 + [0] + [-1] * 21 + [1, 1, 2, 2]
TASKS = {
    "objectives": {"masked_lm": 1.0, **dict.fromkeys(NAMES, 1.0)},
    "masked_lm": {"next_sentence": True},
    "model": {"max_position": 80, "sentence_classes": 2, "segments": 2, "class_heads": list(HEADS)},
    "training": {"steps": 4, "loss_normalization": "per_objective"},
    "checkpoint": {"save_interval": 2},
    "batch": {"micro_batch_size": 8, "global_batch_size": 32},
}


def test_each_row_has_the_classes_of_its_own_head():
    config = ModelConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=50,
        sentence_classes=2,
        class_heads=HEADS,
    )
    head, rows = SentenceHead(config), torch.randn(10, 16)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    numbers = [NEXT_SENTENCE_LOSS.number, *(CLASS_HEADS[name] for name in NAMES)]
    found = head(rows, None, torch.tensor([5, 6, *numbers, *numbers], dtype=torch.int32))
    pooled = torch.tanh(head.dense(rows))
    for place, number in enumerate([*numbers, *numbers]):
        name = LOSS_NAMES[number]
        one = head.classifier if number == numbers[0] else head.classifiers[name]
        expected = one((rows if name in ("token_document", "capitalization") else pooled)[place])
        torch.testing.assert_close(found[place, : len(expected)], expected)
        assert found.shape == (10, 9) and (found[place, len(expected) :] == -math.inf).all()
    assert {"dense.weight", "classifier.weight"} < dict(head.named_parameters()).keys()


LAYOUTS = [(2, {"tensor_parallel_size": 2}), (2, {"pipeline_parallel_size": 2}), (2, {"zero_stage": 2}),
    (2, {"zero_stage": 3})]  # fmt: skip


@pytest.fixture(scope="module")
def capitals(corpus, tmp_path_factory):
    """The corpus with some of its words capitalized, built again with them."""
    directory, rng = tmp_path_factory.mktemp("capitals"), np.random.default_rng(4)
    with (directory / "text.jsonl").open("w") as file:
        for line in (corpus / "text.jsonl").read_text().splitlines():
            words = json.loads(line)["text"].split()
            text = " ".join(word.title() if rng.random() < 0.3 else word for word in words)
            file.write(json.dumps({"text": text}) + "\n")
    tokenizer = TokenizerConfig(kind="bert_wordpiece", path=str(corpus / "vocab.txt"))
    config = BuildConfig(inputs=[str(directory / "text.jsonl")], output=str(directory / "out"), capitals=True)
    build_corpus(config, partial(load_tokenizer, tokenizer))
    return str(directory / "out")


@pytest.fixture
def settings(settings, capitals):
    return merge(settings, {"data": {"train": [{"prefix": capitals}], "validation": []}})


def trained(settings, directory, world=1, **parallel):
    tree = merge(settings, {**TASKS, "parallel": parallel, "run": {"directory": str(directory)}})
    run_ranks(fit, world, tree, parallel=ParallelConfig(**parallel))
    return load_weights(read_checkpoint(list_checkpoints(directory / "checkpoints")[-1]))


@pytest.mark.parametrize("layouts", [LAYOUTS[:1], pytest.param(LAYOUTS[1:], marks=pytest.mark.slow)])
def test_layouts_and_a_restart_equal_one_process(settings, tmp_path, layouts):
    """fp32: only the order of sums differs. A restart is bit for bit."""
    whole = trained(settings, tmp_path / "one")
    seen = {name for step in records(tmp_path / "one").values() for name in step}
    assert seen >= {f"loss/{name}" for name in NAMES}
    for number, (world, parallel) in enumerate(layouts):
        for name, weight in trained(settings, tmp_path / str(number), world, **parallel).items():
            torch.testing.assert_close(weight, whole[name], rtol=1e-4, atol=2e-5, msg=f"{parallel}: {name}")
    trained(merge(settings, {"training": {"stop_after_step": 2}}), tmp_path / "cut")
    again = trained(settings, tmp_path / "cut")
    assert all(torch.equal(weight, again[name]) for name, weight in whole.items())


def test_capitals_join_in_a_later_phase_and_are_asked_of_the_corpus(settings, corpus, tmp_path):
    """Samples of a phase without the task are read as ever."""
    chosen = {"objectives": {"masked_lm": 1.0, "capitalization": 1.0}, "training": {"steps": 3}}
    phases = [{"steps": 1, "objectives": {"masked_lm": 1}}, {"steps": 2}]
    tree = merge(settings, merge(TASKS, {**chosen, "phases": phases}))
    tree["objectives"] = chosen["objectives"]
    run_ranks(fit, 1, tree)
    names = [{name for name in step if "cap" in name} for step in records(tmp_path / "run").values()]
    assert names == [set(), {"loss/capitalization"}, {"loss/capitalization"}]
    prefix = str(corpus / "corpus_train")
    with pytest.raises(
        DataError, match=r"corpus_train has no capitals, which the objective needs; rebuild it with --cap"
    ):
        make_trainer(None, merge(tree, {"data": {"train": [{"prefix": prefix}]}}))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": {"class_heads": []}}, r"model.class_heads is \[\]"),
        (
            {"model": {"class_heads": ["other:3"]}},
            "each entry must be NAME:CLASSES .* NAME of sentence_reordering",
        ),
        ({"model": {"sentence_classes": 0}}, "set sentence_classes to 2"),
        ({"sentence_reordering": {"parts": 4}}, "'sentence_reordering:33'"),
        ({"model": {"class_heads": [*HEADS, HEADS[0]]}}, "each entry must be NAME:CLASSES"),
        ({"model": {"class_heads": [*HEADS[:3], "capitalization:1"]}}, "at least 2 classes"),
        ({"model": {"class_heads": [*HEADS[:3], "capitalization:two"]}}, "each entry must be NAME:CLASSES"),
        ({"model": {"class_heads": HEADS[:3]}}, "have labels for .*'capitalization:2'"),
        (
            {"model": {"class_heads": ["token_document:3", *HEADS[:2], HEADS[3]]}},
            "have labels for .*'token_document:2'",
        ),
        (
            {"model": {"segments": 0}, "sentence_reordering": {"parts": 5}},
            r"parts is 5; it must be at least 2 and at most 4",
        ),
        ({"sentence_reordering": {"parts": 1}}, r"parts is 1; it must be at least 2 and at most 4"),
        (
            {"sentence_distance": {"far_prob": 0.9}},
            r"far_prob 0\.9 and wrong_prob 0\.333333; their sum must be at most 1",
        ),
        (
            {"token_document": {"masked_ratio": 2}},
            r"token_document\.masked_ratio is 2; it must be at least 0 and at most 1",
        ),
        (
            {"capitalization": {"mask_token_prob": 0.9, "random_token_prob": 0.2}},
            r"capitalization\.mask_token_prob",
        ),
        ({"token_document": {"whole_word": True}}, "the nearest valid key is token_document.whole_words"),
    ],
)
def test_heads_that_lack_are_reported(settings, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        build(Config, merge(merge(settings, TASKS), changes))
    assert "\n" not in str(error.value)


def test_words_that_are_not_known_are_reported():
    for name in OBJECTIVES:
        if OBJECTIVES[name].config_class().class_heads:
            with pytest.raises(
                ConfigError, match=f"{name} masks whole words, but the start of words is unknown"
            ):
                make_one(name, OBJECTIVES[name].config_class(), Vocabulary(SPECIAL, 200), 3, 96)


def test_the_vocabulary_has_no_part_in_the_flops_of_classes():
    """Every ordinary token has one in token_document, whose rows would count as much as masked words."""
    batch = Batch(collate_windows(make("token_document", 60), windows(40, 60, 1)))
    predicted, of_words = batch.weights != 0, LOSS_NAMES.index("masked_parts")
    words = predicted & (batch.fields[:, OBJECTIVE] == of_words)
    assert batch.loss_tokens == words.sum() < predicted.sum() / 4


def test_ernie_2_adds_a_task_in_each_stage_and_trains_all_for_50000_steps():
    config = load_config([ROOT / "configs/ernie2-base.yaml"])
    batch, tokens = config.batch.global_batch_size, 512
    assert config.model.task_types and batch * tokens == 393_216
    rows = {choice.section.row_length_for(config.data.sequence_length) for choice in config.objective_choices}
    assert rows == {tokens}
    tasks = [[choice.name for choice in each.objective_choices] for each in config.phase_plan.configs]
    names = ["ernie", "token_document", "sentence_reordering", "sentence_distance"]
    assert tasks == [names[:1], names[:2], names[:3], names]
    first = config.phase_plan.first_steps
    assert first == [0, 20_000, 60_000, 120_000, 200_000] and config.training.steps == 200_000
    trained, drawn = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for each, steps in zip(config.phase_plan.configs, np.diff(first), strict=True):
        choices = each.objective_choices
        weights = [choice.weight for choice in choices]
        made = [SimpleNamespace(row_length=512, sequence_length=508)] * len(weights)
        chosen = Mixed(made, weights, 7).choose(np.arange(steps))
        for place, (choice, weight) in enumerate(zip(choices, weights, strict=True)):
            trained[choice.name] += steps * weight / sum(weights)
            drawn[choice.name] += (chosen == place).sum()
    assert trained == pytest.approx(dict.fromkeys(names, 50_000))
    assert all(abs(count - 50_000) < 3 * math.sqrt(50_000) for count in drawn.values())


def test_an_export_has_these_heads_beside_it_and_an_import_continues_with_them(tmp_path, caplog):
    """The class of transformers has the rest, and its logits are ours. A head of another size is initialized."""
    model = {"system": "ernie2", "segments": 4, "max_position": 80, "class_heads": list(HEADS[:2])}
    tasks = {"objectives": dict.fromkeys(["ernie", *NAMES[:2]], 1), "tokenizer": {"added_tokens": "none"}}
    settings = merge(tree(write_vocabulary(tmp_path), **model), tasks)
    write_run(tmp_path / "run", merge(settings, {"model": {"task_rows": ERNIE_ROWS}}))
    proof = export_run(tmp_path / "run", tmp_path / "out", ExportOptions())
    assert proof is not None and proof.largest_difference < 1e-4
    assert not any("classifiers" in name for name in load_file(tmp_path / "out/model.safetensors"))
    shapes = load_file(tmp_path / "out" / OTHER_HEADS)
    assert {name.split(".")[-2] for name in shapes} == set(NAMES[:2])
    import_directory(tmp_path / "out", tmp_path / "again", settings)
    before, after = (load_run(tmp_path / name).model.state_dict() for name in ("run", "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert "initialized" not in caplog.text
    larger = {
        "model": {"class_heads": ["sentence_reordering:33", HEADS[1]]},
        "sentence_reordering": {"parts": 4},
    }
    import_directory(tmp_path / "out", tmp_path / "larger", merge(settings, larger))
    new = "heads.sentence.classifiers.sentence_reordering"
    assert f"does not have {new}.bias, {new}.weight; they are initialized" in caplog.text
    after = load_run(tmp_path / "larger").model.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        f"{new}.bias",
        f"{new}.weight",
    }


# Sentences that say their number: `N word .`
SIZE, DOT, FIRST, NUMBERS = 200, 199, 110, 30


def numbered(rng, sentences=6):
    first = int(rng.integers(0, NUMBERS - sentences))
    return np.array(
        [
            token
            for number in range(first, first + sentences)
            for token in (FIRST + number, int(rng.integers(150, 190)), DOT)
        ],
        np.int32,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name, best", [("sentence_reordering", 12 / 18), ("sentence_distance", 1.0)])
def test_a_small_model_reads_order_and_distance(name, best):
    """Near the best possible part of new texts. Texts are cut and mixed by the objective itself.

    Of orders that is 12/18: a text in order (10/18) may have 1, 2 or 3 segments, 1 with 6/18; two blocks exchanged
    (5/18) 2 or 3, 2 with 3/18; the other three orders of 3 are sure. A guess has 6/18 in both tasks.
    """
    ends = np.arange(SIZE) == DOT
    vocabulary = Vocabulary(SPECIAL, SIZE, ends, np.ones(SIZE, bool))
    made = make_one(name, OBJECTIVES[name].config_class(masked_ratio=0.01), vocabulary, 3, 96)
    config = ModelConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=SIZE, max_position=100, segments=2,
        positions="learned", sentence_classes=2, class_heads=HEADS, init_std=0.1, norm="post",
        embedding_dropout=0.0, attention_dropout=0.0, output_dropout=0.0,
    )  # fmt: skip
    size = 32

    def draw(rng):
        pieces = [numbered(rng) for _ in range(4 * size)]
        return np.concatenate(pieces), [len(piece) for piece in pieces]

    found = learnt_classes(made, config, draw, size, steps=1200, further=8)
    right = [(classes.argmax(1) == labels).float().mean().item() for classes, labels in found]
    assert abs(np.mean(right) - best) < 0.05, np.mean(right)  # 3 standard errors of 1024 texts
