"""Tasks with entities: what only they tell is learnt, layouts and a restart repeat one process, and a reference."""

import json

import numpy as np
import pytest
import torch
from support.commands import forked
from support.distributed import run_ranks
from support.hf.own_models import check_same_run, weights_of
from support.systems.entity_reference import Reference
from support.tasks.mention_tasks import SIZE, WORDS, write_task
from support.tasks.tasks import task_of

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, DOC, POSITION_IDS, SEGMENT_IDS, TOKENS
from data_utils.common.errors import ConfigError, DataError, UserError
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.finetune.data import TaskData
from megatron_lite.finetune.run import finetune
from megatron_lite.transformer.build import build_model, model_spec
from megatron_lite.transformer.micro_batch import MicroBatch

CPU = torch.device("cpu")


def learn(context, files, output, *overrides):
    finetune(task_of(files, output, *overrides), output, context)
    if not (output / "results.json").exists():
        return None
    (of_file,) = json.loads((output / "results.json").read_text())["files"].values()
    return of_file["mean"]


@pytest.mark.slow  # in test_planted_corpus.py always
def test_what_entities_tell_is_learnt_with_them_and_guessed_without(tmp_path):
    """And a run that another one with entities begins: its heads of pretraining are left alone."""
    files = write_task(tmp_path / "task", "entities", train=256)
    (measured,) = run_ranks(learn, 1, files, tmp_path / "with", "finetune.epochs=6")
    assert measured == dict.fromkeys(("loose_micro_f1", "loose_macro_f1", "strict_accuracy"), 1.0)
    (measured,) = run_ranks(
        learn, 1, files, tmp_path / "without", "finetune.epochs=6", "task.entity_ids=null"
    )
    assert measured["strict_accuracy"] < 0.65
    (measured,) = run_ranks(learn, 1, files, tmp_path / "low", "finetune.epochs=2", "task.min_score=0.95")
    assert measured["strict_accuracy"] < 0.65
    found = forked(
        "scripts/evaluate.py", "--checkpoint", tmp_path / "with", "--predictions", tmp_path / "predictions"
    )
    assert found.returncode == 0 and "strict_accuracy 1.0000" in found.stdout, found.stderr
    assert len((tmp_path / "predictions/entities.jsonl").read_text().splitlines()) == 128
    blind = forked("scripts/evaluate.py", "--checkpoint", tmp_path / "with", "task.entity_ids=null")
    assert blind.returncode == 0 and "strict_accuracy 1.0000" not in blind.stdout


COMMON = [
    *("finetune.epochs=2", "training.steps=6", "training.eval_interval=3", "batch.micro_batch_size=4"),
    *("model.output_dropout=0.1", "model.attention_dropout=0.1", "run.log_interval=1"),
]


def short(tmp_path, name, *overrides, **parallel):
    """The directory of a run over 32 samples with dropout in both streams."""
    files = write_task(tmp_path / "task", "entities", train=32)
    given = [*COMMON, *(f"parallel.{key}={value}" for key, value in parallel.items()), *overrides]
    layout = ParallelConfig(**parallel)
    run_ranks(learn, 2 if parallel else 1, files, tmp_path / name, *given, parallel=layout)
    return tmp_path / name / "seed_1234"


@pytest.mark.parametrize(
    "parallel",
    [{"tensor_parallel_size": 2}, pytest.param({"zero_stage": 3}, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.slow
def test_layouts_equal_one_process(tmp_path, parallel):
    """fp32: only the order of sums differs."""
    expected = weights_of(short(tmp_path, "one"))
    for name, weight in weights_of(short(tmp_path, "other", **parallel)).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.slow
def test_a_resumed_run_is_the_unbroken_one(tmp_path):
    unbroken = short(tmp_path, "unbroken")
    short(tmp_path, "resumed", "training.stop_after_step=4")
    check_same_run(unbroken, short(tmp_path, "resumed"))


def test_the_answers_match_the_reference(tmp_path):
    task = task_of(write_task(tmp_path, "entities", train=16), tmp_path / "out")
    config = task.config
    model = build_model(config, 60)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    data = model_spec(config).samples(config, TaskData(task.train, task.renderer, 0), "train")
    batch = data.batch(np.arange(6))
    outputs, _ = model(MicroBatch.from_batch(batch, CPU, config.model), predict=True)
    weights = dict(model.named_parameters())
    reference = Reference(config, weights)
    vectors = torch.from_numpy(np.load(tmp_path / "vectors.npy"))
    for row, own in zip(batch.fields, outputs, strict=True):
        row = row[:, row[DOC] >= 0]
        entities = torch.from_numpy(row[BLOCK_POSITION_IDS]).long()
        assert int((entities > 0).sum()) == 1
        m = (entities > 0).float()
        m[0] = 1.0
        z = torch.where(entities[:, None] > 0, vectors[entities - 1], torch.zeros(()))
        tokens, positions, segments = (
            torch.from_numpy(row[field]).long() for field in (TOKENS, POSITION_IDS, SEGMENT_IDS)
        )
        x = reference(tokens, positions, segments, z, m)
        pooled = torch.tanh(reference.linear(x[0], "heads.sentence.dense"))
        expected = reference.linear(pooled, "heads.task.classifier")
        assert own.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    loss, _ = model(MicroBatch.from_batch(batch, CPU, config.model))
    loss.backward()
    for name, parameter in model.named_parameters():
        is_idle = parameter.grad is None or not parameter.grad.any()
        assert is_idle == model_spec(config).is_unused(name, config) or "entity_attention" in name, name
    assert model_spec(config).is_unused("entity_head.dense.weight", config)


def test_policies_and_mixes_of_layers_work_with_entities(tmp_path):
    files = write_task(tmp_path / "task", "entities", train=64)
    options = [
        "finetune.epochs=1",
        "finetune.trained=head",
        "model.task_head.mix=true",
        "finetune.layer_decay=0.9",
    ]
    run_ranks(learn, 1, files, tmp_path / "out", *options)
    before = dict(build_model(task_of(files, tmp_path / "no", *options).config, 60).named_parameters())
    after = weights_of(tmp_path / "out/seed_1234")
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name][: len(weight)])}
    assert changed and all(name.startswith("heads.task.") for name in changed)


def test_other_vectors_do_not_continue_a_run(tmp_path):
    short(tmp_path, "out", "training.stop_after_step=1")
    files, path = write_task(tmp_path / "task", "entities", train=32), tmp_path / "task/vectors.npy"
    np.save(path, np.load(path) + 1)
    with pytest.raises(AssertionError, match=r"entities\.vectors .* differ"):
        run_ranks(learn, 1, files, tmp_path / "out", *COMMON)


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("entities.vectors=null", ConfigError, "entities.vectors is null; give the .npy file"),
        ("finetune.lm_weight=0.1", ConfigError, "finetune.lm_weight is 0.1, which is not defined for entities"),
        ("entities.vectors=FEW", DataError, "entity_ids .* has 8 entities, but .* has 7 "),
        ("training.loss_normalization=per_objective", ConfigError, "set it to global_tokens"),
        ("parallel.pipeline_parallel_size=2", ConfigError, "pipeline_parallel_size is 2"),
        ("model.norm=pre", ConfigError, "model.norm is pre"),
    ],
)  # fmt: skip
def test_what_it_cannot_be_is_refused_in_one_line(tmp_path, override, error, message):
    files = write_task(tmp_path / "task", "entities", train=8)
    np.save(tmp_path / "few.npy", np.zeros((2 * WORDS - 1, SIZE), np.float32))
    with pytest.raises(error, match=message) as caught:
        task = task_of(files, tmp_path / "out", override.replace("FEW", str(tmp_path / "few.npy")))
        model_spec(task.config).samples(task.config, None, "train")
    assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)
