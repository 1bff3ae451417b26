"""Training on text pairs as users run it: beside sentence-transformers, resumed, and mixed with a masked loss."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.data.text_pairs import random_records, write_text_pairs
from support.distributed import run_ranks
from support.hf.hf_runs import tree, write_run, write_vocabulary
from support.project import small_run
from support.systems.embeddings import write_sentence_transformers
from support.training.training import fit, make_trainer, records

from data_utils.common.settings import build, merge
from data_utils.tokenizers.tokenizer_readers import TokenizerConfig
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.systems import with_objective
from megatron_lite.config.tree import load_file
from megatron_lite.embedding.embedder import Embedder, TextFormat
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.inference.open_run import load_run

SIZE, STEPS = 16, 20


def distinct(count: int, seed: int) -> list[dict]:
    """Records without a text that another one has."""
    found, seen = [], set()
    for record in random_records(np.random.default_rng(seed), 8 * count, longest=12):
        texts = {record["query"], record["positive"], *record["negatives"]}
        if len(record["negatives"]) == 2 and len(texts) == 4 and not texts & seen:
            seen |= texts
            found.append(record)
    assert len(found) >= count
    return found[:count]


@pytest.fixture(scope="module")
def pairs(corpus, tmp_path_factory):
    """The records of two corpora of text pairs, and their prefixes."""
    directory = tmp_path_factory.mktemp("pairs")
    of = {name: distinct(80, seed) for seed, name in enumerate("ab")}
    vocabulary = corpus / "vocab.txt"
    prefixes = {
        name: write_text_pairs(directory / name, vocabulary, each, negatives=2, query_prompt="word1 word2 ")
        for name, each in of.items()
    }
    return of, prefixes


def tree_of(corpus, prefixes, directory, **changes) -> dict:
    run = small_run(corpus, directory)
    del run["blank_infilling"]
    train = [{"prefix": prefix, "objective": "contrastive"} for prefix in prefixes.values()]
    tree = {
        "objectives": {"contrastive": 1.0},
        "model": {"embedding_dropout": 0.1, "output_dropout": 0.1},
        "data": {"train": train, "validation": train[:1]},
        "training": {"eval_interval": 2},
        "batch": {"global_batch_size": SIZE, "micro_batch_size": 4},
        "contrastive": {"query_length": 16, "document_length": 14, "negatives": 2},
    }
    return merge(merge(run, tree), changes)


@pytest.fixture(scope="module")
def sentence_model(corpus, tmp_path_factory):
    """A directory of sentence-transformers with a small BERT, without dropout."""
    import sentence_transformers
    from sentence_transformers.sentence_transformer import modules
    from transformers import BertConfig, BertModel, BertTokenizerFast

    directory = tmp_path_factory.mktemp("sentence_model")
    torch.manual_seed(3)
    tokenizer = BertTokenizerFast(str(corpus / "vocab.txt"), do_lower_case=True)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(config).save_pretrained(directory / "bert")
    tokenizer.save_pretrained(directory / "bert")
    transformer = modules.Transformer(str(directory / "bert"), max_seq_length=16)
    pooling = modules.Pooling(transformer.get_embedding_dimension())
    model = sentence_transformers.SentenceTransformer(modules=[transformer, pooling])
    model.save(str(directory / "model"))
    return directory / "model"


def fit_and_list(context, tree) -> np.ndarray:
    """Train; the records of all samples of the run."""
    trainer = make_trainer(context, tree)
    trainer.fit()
    return trainer.train_data._loader.mixture.locate(np.arange(tree["training"]["steps"] * SIZE))[2]


def imported(system: str, sentence_model: Path, directory: Path) -> tuple[dict, Path]:
    """The settings of a run in a directory with a model's weights, and the same model for sentence-transformers."""
    run = directory / "run"
    if system == "glm":
        dropout = {f"{name}_dropout": 0.0 for name in ("embedding", "attention", "output")}
        settings = merge(
            tree(write_vocabulary(directory), **dropout), {"objectives": {"blank_infilling": 1.0}}
        )
        settings = merge(settings, {"embedding": {"max_length": 16}})
        write_run(run, settings)
        export_run(run, directory / "model", ExportOptions(sentence_transformers=True))
        return settings, directory / "model"
    source = sentence_model
    if system != "bert":
        source = write_sentence_transformers(directory / "model", system, "last", length=16)
    import_directory(source, run, {})
    return load_file(run / "config.yaml"), source


@pytest.mark.parametrize(
    ("system", "positive", "negatives", "steps"),
    [
        ("bert", "positive", 2, STEPS),
        pytest.param("bert", "query", 0, 3, marks=pytest.mark.slow),
        pytest.param("bert", "teacher", 0, 3, marks=pytest.mark.slow),
        ("glm", "positive", 2, 3),
        pytest.param("qwen2", "positive", 2, 3, marks=pytest.mark.slow),
    ],
)
def test_steps_equal_sentence_transformers(
    corpus, pairs, sentence_model, tmp_path, system, positive, negatives, steps
):
    """Steps of AdamW without dropout from equal weights on equal batches, and the vectors that both then make.

    Of an encoder: pairs, the same text twice, and texts with the vectors of a teacher; of GLM with its own code in
    transformers, and of a decoder.
    """
    import sentence_transformers
    from sentence_transformers.sentence_transformer import losses

    records_of_a, has_teacher = pairs[0]["a"], positive == "teacher"
    positive = "query" if has_teacher else positive
    targets = np.random.default_rng(0).standard_normal((len(records_of_a), 32)).astype(np.float32)
    imported_tree, source = imported(system, sentence_model, tmp_path)
    tokenizer = build(TokenizerConfig, imported_tree["tokenizer"])
    prompt = "word1 word2 " if negatives else ""
    options = {"negatives": negatives, "query_prompt": prompt, "positive_column": positive}
    prefix = write_text_pairs(tmp_path / "a", tokenizer, records_of_a, **options)
    changes = tree_of(corpus, {"a": prefix}, tmp_path / "run")
    for section in ("model", "tokenizer"):
        del changes[section]
    changes["data"] |= {"validation": [], "sequence_length": 16}
    if has_teacher:
        np.save(tmp_path / "teacher.npy", targets)
        changes["data"]["train"][0]["vectors"] = str(tmp_path / "teacher.npy")
        changes["contrastive"]["loss"] = "mse"
    run_tree = merge(
        merge(imported_tree, changes),
        {
            "objectives": {name: 0.0 for name in imported_tree["objectives"]},
            "training": {"steps": steps, "eval_interval": 0, "precision": "fp32"},
            "optimizer": {
                "lr": 1e-3,
                "weight_decay": 0.0,
                "clip_grad_norm": 0.0,
                "beta2": 0.999,
                "eps": 1e-8,
            },
            "schedule": {"kind": "constant", "warmup_steps": 0},
            "contrastive": {"document_length": 16},
        },
    )
    (chosen,) = run_ranks(fit_and_list, 1, with_objective(run_tree))
    ours = [each["loss"] for each in records(tmp_path / "run").values()]

    model = sentence_transformers.SentenceTransformer(str(source), device="cpu", trust_remote_code=True)
    loss_of = losses.MSELoss(model) if has_teacher else losses.MultipleNegativesRankingLoss(model, scale=20.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    model.train()
    theirs = []
    for numbers in chosen.reshape(steps, SIZE):
        batch = [records_of_a[number] for number in numbers]
        columns = [
            [f"{prompt}{each['query']}" for each in batch],
            [each[positive] for each in batch],
            *([each["negatives"][i] for each in batch] for i in range(negatives)),
        ]
        labels = torch.from_numpy(targets[numbers]) if has_teacher else None
        loss = loss_of([model.preprocess(column) for column in columns], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert steps < STEPS or theirs[-1] < theirs[0] - 0.5  # it has learnt
    run, texts = load_run(tmp_path / "run"), [each["positive"] for each in records_of_a]
    vectors = Embedder(run, TextFormat(run)).embed(texts)
    expected = model.eval().encode(texts, normalize_embeddings=run.config.embedding.normalize)
    assert np.abs(vectors - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not(corpus, pairs, tmp_path):
    """On the ranks that it had bit for bit; on others, which add in another order, nearly."""
    _, prefixes = pairs
    whole = tree_of(corpus, prefixes, tmp_path / "whole")
    run_ranks(fit, 2, whole)
    expected = records(tmp_path / "whole")
    stopped = tree_of(corpus, prefixes, tmp_path / "stopped")
    run_ranks(fit, 2, merge(stopped, {"training": {"stop_after_step": 3}}))
    shutil.copytree(tmp_path / "stopped", tmp_path / "moved")
    run_ranks(fit, 2, stopped)
    assert records(tmp_path / "stopped") == expected
    moved = merge(stopped, {"run": {"directory": str(tmp_path / "moved")}})
    moved = merge(moved, {"parallel": {"tensor_parallel_size": 2}, "batch": {"micro_batch_size": 8}})
    run_ranks(fit, 2, moved, parallel=ParallelConfig(tensor_parallel_size=2))
    for step, losses in records(tmp_path / "moved").items():
        assert losses["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5)
    kept = records(tmp_path / "whole", "validation")
    assert records(tmp_path / "moved", "validation")[6]["loss"] == pytest.approx(kept[6]["loss"], rel=1e-5)


def test_pairs_and_masked_texts_in_one_run(corpus, pairs, tmp_path):
    _, prefixes = pairs
    tree = tree_of(corpus, prefixes, tmp_path / "run")
    tree["objectives"] = {"contrastive": 0.5, "masked_lm": 0.5}
    tree["model"]["max_position"] = 80
    tree["data"]["train"].append({"prefix": str(corpus / "corpus_train")})
    tree["data"]["validation"].append({"prefix": str(corpus / "corpus_validation")})
    tree["training"] |= {"steps": 40, "eval_samples": 8 * SIZE, "eval_interval": 40}
    tree["schedule"]["warmup_steps"] = 1
    run_ranks(fit, 1, tree)
    steps = list(records(tmp_path / "run").values())
    kinds = [tuple(sorted(key for key in each if key.startswith("loss/"))) for each in steps]
    assert set(kinds) == {("loss/contrastive",), ("loss/masked",)}  # each batch is of one corpus
    for name in ("contrastive", "masked"):
        losses = [each[f"loss/{name}"] for each in steps if f"loss/{name}" in each]
        assert np.mean(losses[-4:]) < np.mean(losses[:4])
    assert {"loss/contrastive", "loss/masked"} <= records(tmp_path / "run", "validation")[40].keys()
