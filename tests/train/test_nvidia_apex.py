"""NVIDIA apex's AdamW and LayerNorm, through a stand-in of the same interface: as torch's, and refused by name."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch
import yaml
from support.commands import assert_refused, forked, pretrain
from support.distributed import run_ranks
from support.project import ROOT
from support.training.engines import SAMPLES, layout, tree
from support.transformer.batches import prefix_batch

from data_utils.common.errors import ConfigError
from data_utils.common.settings import build, merge
from megatron_lite.checkpoint.read import load_checkpoint, newest_valid
from megatron_lite.checkpoint.write import save_checkpoint
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine import nvidia_apex
from megatron_lite.engine.plain import make_engine
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.norms import LayerNorm
from megatron_lite.transformer.tensor_parallel import TensorParallel

STAND_IN = ROOT / "tests/support/nvidia_apex"
APEX = {"optimizer": {"kernel": "apex"}, "training": {"layernorm": "apex"}}
TORCH: dict = {"optimizer": {"kernel": "torch"}, "training": {"layernorm": "torch"}}
# Of the largest element of a tensor. Adam's epsilon is as large as a usual gradient: see docs/log.md on parity.
TOLERANCE = 1e-5


def settings_of(kernels: dict, parallel: dict, precision: str = "fp32") -> dict:
    # Two or more parts of a group of parameters at ZeRO 3.
    deepspeed = {"zero_optimization": {"sub_group_size": 5000}} if parallel["zero_stage"] == 3 else {}
    common = {"optimizer": {"eps": 1e-3}, "training": {"precision": precision}}
    return tree(parallel=parallel, deepspeed=deepspeed, **merge(common, kernels))


def engine_of(context, settings, package=STAND_IN):
    sys.path.insert(0, str(package))
    config = build(Config, settings)
    nvidia_apex.require_apex(config)
    return make_engine(config, context, num_losses=3)


def train(context, engine, settings, steps) -> list[float]:
    config = build(Config, settings)
    size, passes = config.batch.micro_batch_size, config.batch.accumulation_steps(context.dp.size)
    losses = []
    for step in steps:
        samples = prefix_batch(step, rows=SAMPLES, vocab=500)
        mine = [samples[(m * context.dp.size + context.dp.rank) * size :][:size] for m in range(passes)]
        result = engine.train_step([engine.prepared(Batch(batch), step, 0.01) for batch in mine], lr=1e-2)
        losses.append(context.sum(result.objective_sums)[:, 0].sum().item())
    return losses


def state_of(engine) -> dict[str, dict[str, torch.Tensor]]:
    """By the name of a parameter, what this rank owns of it."""
    return {
        fragment.name: {kind: values.detach().clone() for kind, values in fragment.tensors.items()}
        for fragment in engine.fragments()
    }


def assert_close(state, expected):
    assert state.keys() == expected.keys()
    for name, tensors in state.items():
        for kind, values in tensors.items():
            largest = expected[name][kind].abs().max()
            difference = (values - expected[name][kind]).abs().max()
            assert difference <= TOLERANCE * largest, (name, kind, float(difference / largest))


def trained(context, settings, steps):
    engine = engine_of(context, settings)
    losses = train(context, engine, settings, range(steps))
    kernels = sys.modules.get("apex.normalization.fused_layer_norm")
    return losses, state_of(engine), engine.scalar_state()["adam_step"], getattr(kernels, "calls", 0)


@pytest.mark.parametrize(
    "parallel",
    [*(pytest.param(layout(zero=stage), marks=pytest.mark.slow) for stage in (2, 3)), layout(tp=2, sp=True)],
    ids=str,
)
def test_training_matches_torch(parallel):
    def run(kernels):
        settings = settings_of(kernels, parallel)
        return run_ranks(trained, 2, settings, 3, parallel=ParallelConfig(**parallel))

    for (losses, state, count, calls), expected in zip(run(APEX), run(TORCH), strict=True):
        assert losses == pytest.approx(expected[0], rel=TOLERANCE)
        assert_close(state, expected[1])
        assert (count, expected[2]) == (3.0, 3.0)
        assert calls > 0 and expected[3] == 0  # the kernels were the ones asked for


def test_a_step_of_bf16_training_matches_torch():
    """One step: later ones multiply weights that were rounded."""
    parallel, kernel = layout(), {"optimizer": APEX["optimizer"]}
    (one,), (other,) = (
        run_ranks(trained, 1, settings_of(k, parallel, "bf16"), 1) for k in (kernel, {"optimizer": {}})
    )
    assert one[0] == other[0]
    assert_close(one[1], other[1])


def poisoned(context, settings):
    engine = engine_of(context, settings)
    before = state_of(engine)
    batch = Batch(prefix_batch(0, rows=SAMPLES, vocab=500))
    result = engine.train_step([engine.prepared(batch, 0, float("nan"))], lr=1e-2)
    return result.skipped, before, state_of(engine), engine.scalar_state()["adam_step"]


@pytest.mark.parametrize("zero", [1, 3])
def test_a_step_that_is_not_finite_changes_nothing(zero):
    settings = merge(settings_of(APEX, layout(zero=zero)), {"batch": {"micro_batch_size": SAMPLES}})
    ((skipped, before, after, count),) = run_ranks(poisoned, 1, settings)
    assert skipped and count == 0.0
    for name, tensors in before.items():
        assert all(torch.equal(values, after[name][kind]) for kind, values in tensors.items()), name


def norm_of_no_rows(context):
    sys.path.insert(0, str(STAND_IN))
    layer = LayerNorm(8, 1e-5, TensorParallel())
    nvidia_apex.use_layernorm(layer, context.device)
    out = layer(torch.empty(0, 8))
    out.sum().backward()
    return out.shape, layer.weight.grad


def test_a_head_without_rows_has_a_norm():
    ((shape, gradient),) = run_ranks(norm_of_no_rows, 1)
    assert shape == (0, 8) and torch.equal(gradient, torch.zeros(8))


def train_and_save(context, settings, directory):
    engine = engine_of(context, settings)
    train(context, engine, settings, range(2))
    save_checkpoint(directory, 2, engine, {}, context)
    saved = state_of(engine)
    train(context, engine, settings, [2])
    return saved, state_of(engine)


def load_and_train(context, settings, directory):
    engine = engine_of(context, settings)
    load_checkpoint(newest_valid(directory, context), engine, context)
    loaded, count = state_of(engine), engine.scalar_state()["adam_step"]
    train(context, engine, settings, [2])
    return loaded, count, state_of(engine), engine.scalar_state()["adam_step"]


@pytest.mark.parametrize("before, after", [(APEX, TORCH), (TORCH, APEX)], ids=["to torch", "to apex"])
@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_continues_with_the_other_kernels(tmp_path, before, after, zero):
    """What is loaded is what was saved, bit for bit, and the next step is that of the run that went on."""
    parallel = layout(zero=zero)
    ((saved, unbroken),) = run_ranks(train_and_save, 1, settings_of(before, parallel), tmp_path)
    ((loaded, count, resumed, next_count),) = run_ranks(
        load_and_train, 1, settings_of(after, parallel), tmp_path
    )
    assert (count, next_count) == (2.0, 3.0)
    assert saved.keys() == loaded.keys()
    for name, tensors in saved.items():
        assert all(torch.equal(values, loaded[name][kind]) for kind, values in tensors.items()), name
    assert_close(resumed, unbroken)


def test_a_run_trains_with_apex_from_the_command_line(settings, monkeypatch):
    run = Path(settings["run"]["directory"])
    changed = merge({"training": {"steps": 2}, "schedule": {"warmup_steps": 1}}, APEX)
    given = run.parent / "given.yaml"
    given.write_text(yaml.safe_dump(merge(settings, changed)))
    monkeypatch.syspath_prepend(STAND_IN)
    done = forked("pretrain_glm.py", "--config", given)
    assert done.returncode == 0, done.stderr
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert len(losses) == 2 and all(map(math.isfinite, losses))


def test_a_missing_apex_is_refused_before_torch_is_loaded(settings, tmp_path):
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(merge(settings, APEX)))
    message = "optimizer.kernel is apex, which is not installed; install https://github.com/NVIDIA/apex"
    assert_refused(pretrain("--config", str(tmp_path / "given.yaml")), message)
    assert not (tmp_path / "run/config.yaml").exists()


def another_package(directory: Path) -> Path:
    (directory / "apex").mkdir()
    (directory / "apex/__init__.py").write_text("raise ImportError('pyramid.session')\n")
    metadata = directory / "apex-0.9.10.dev0.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\n")
    return directory


def test_another_package_of_that_name_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(another_package(tmp_path))
    importlib.invalidate_caches()
    config = build(Config, tree(training={"layernorm": "apex"}))
    with pytest.raises(
        ConfigError, match=r"training\.layernorm is apex, but .* apex 0\.9\.10\.dev0 is not NVIDIA's"
    ):
        nvidia_apex.require_apex(config)
    nvidia_apex.require_apex(build(Config, tree()))  # nothing asks for it


def refusal(context, settings, package):
    try:
        engine_of(context, settings, package)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "kernels", [{"optimizer": APEX["optimizer"]}, {"training": APEX["training"]}], ids=str
)
def test_an_apex_without_kernels_is_refused(tmp_path, kernels):
    """As NVIDIA's is if it was installed without its CUDA extensions."""
    for name in ("multi_tensor_apply", "optimizers", "normalization"):
        (tmp_path / "apex" / name).mkdir(parents=True)
    (tmp_path / "apex/optimizers/__init__.py").write_text(
        "class FusedAdam:\n    def __init__(self, *args, **kwargs):\n"
        "        raise RuntimeError('apex.optimizers.FusedAdam requires cuda extensions')\n"
    )
    (tmp_path / "apex/normalization/fused_layer_norm.py").write_text(
        "def fused_layer_norm_affine(*args):\n    import fused_layer_norm_cuda\n"
    )
    (message,) = run_ranks(refusal, 1, settings_of(kernels, layout()), tmp_path)
    (section,) = kernels
    assert message.startswith(f"{section}.{next(iter(kernels[section]))} is apex, which does not work here (")
    assert "or set it to torch." in message and "\n" not in message
