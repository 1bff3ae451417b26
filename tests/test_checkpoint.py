import json
import shutil
from pathlib import Path

import pytest
import torch
from distributed import run_ranks
from test_engine import tree

from megatron_lite import checkpoint
from megatron_lite.config import Config
from megatron_lite.engine import Engine
from megatron_lite.errors import CheckpointError
from megatron_lite.model import build_model
from megatron_lite.parallel_context import ParallelContext
from megatron_lite.settings import build

ALONE = ParallelContext(0, 1, 0, torch.device("cpu"))


def make_engine(context, settings):
    config = build(Config, settings)
    return Engine(build_model(config, num_objectives=3), config, context)


def fill_and_save(context, settings, directory, steps=(1,)):
    """Give every element of the state a value that says where it belongs, save, and return the model's weights."""
    engine = make_engine(context, settings)
    for step in steps:
        for fragment in engine.fragments():
            for kind, values in fragment.tensors.items():
                positions = torch.arange(fragment.start, fragment.start + values.numel())
                values.data.copy_(expected(fragment.name, kind, step, positions))
        engine.publish_weights()
        engine.load_scalar_state({"adam_step": float(step), "loss_scaler": {"cur_scale": 2.0**step}})
        checkpoint.save(Path(directory), step, engine, {"note": "state"}, context)


def expected(name, kind, step, positions):
    base = 1000 * (sum(name.encode()) % 97) + 100 * checkpoint.KINDS.index(kind) + step
    return base + (positions % 64) / 64.0  # exact in fp32


def load_and_check(context, settings, directory):
    engine = make_engine(context, settings)
    found = checkpoint.newest_valid(Path(directory), context)
    checkpoint.load(found, engine, context)
    for fragment in engine.fragments():
        for kind, values in fragment.tensors.items():
            positions = torch.arange(fragment.start, fragment.start + values.numel())
            assert torch.equal(values, expected(fragment.name, kind, found.step, positions)), (
                fragment.name,
                kind,
            )
    for name, parameter in engine.module.named_parameters():
        weight = expected(name, "weight", found.step, torch.arange(parameter.numel())).view(parameter.shape)
        assert torch.equal(parameter.float(), weight.to(parameter.dtype).float())
    return engine.scalar_state()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "before, after", [((1, 1), (4, 2)), ((4, 1), (2, 1)), ((2, 2), (1, 1)), ((2, 1), (2, 2))]
)
def test_state_is_bit_equal_on_any_number_of_ranks_and_stage(tmp_path, precision, before, after):
    (ranks, stage), (new_ranks, new_stage) = before, after
    settings = {"training": {"precision": precision}, "batch": {"micro_batch_size": 1}}
    run_ranks(fill_and_save, ranks, tree(parallel={"zero_stage": stage}, **settings), tmp_path)
    states = run_ranks(
        load_and_check, new_ranks, tree(parallel={"zero_stage": new_stage}, **settings), tmp_path
    )
    for state in states:
        assert state["adam_step"] == 1.0
        assert precision != "fp16" or state["loss_scaler"]["cur_scale"] == 2.0


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    run_ranks(fill_and_save, 2, tree(), directory, (1, 2))
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def test_weights_can_be_read_alone(directory):
    found = checkpoint.newest_valid(directory, ALONE)
    assert found.step == 2 and found.state == {"note": "state"}
    for name, weight in checkpoint.load_weights(found).items():
        assert torch.equal(weight.flatten(), expected(name, "weight", 2, torch.arange(weight.numel())))


def newest(directory):
    return checkpoint.list_checkpoints(directory)[-1]


def flip_bit(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


DAMAGE = {
    "bit flip in data": (lambda p: flip_bit(p / "rank_00001.safetensors", -5), "rank_00001.safetensors does not match"),
    "truncated file": (lambda p: (p / "rank_00000.safetensors").open("r+b").truncate(100), "has 100 bytes"),
    "missing file": (lambda p: (p / "rank_00000.safetensors").unlink(), "rank_00000.safetensors: No such file"),
    "missing manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json: No such file"),
    "manifest cut": (lambda p: (p / "manifest.json").open("r+b").truncate(50), "manifest.json is damaged"),
    "manifest emptied": (lambda p: (p / "manifest.json").write_text("{}"), "not of format"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_one_before_is_used(directory, caplog, kind):
    damage, message = DAMAGE[kind]
    damage(newest(directory))
    assert checkpoint.newest_valid(directory, ALONE).step == 1
    assert message in caplog.text and "step_00000002" in caplog.text


def edit(path, change):
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


EDITS = {
    "gap": (lambda m: m["pieces"].pop(3), "gap or overlap|not complete"),
    "path outside": (lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": ""}}), "of another kind"),
    "missing section": (lambda m: m.pop("optimizer"), "incomplete"),
    "unknown file": (
        lambda m: m["pieces"][0].update(file="rank_00009.safetensors"),
        "fits no parameter or file",
    ),
}


@pytest.mark.parametrize("kind", EDITS)
def test_inconsistent_manifests_are_refused(directory, kind):
    change, message = EDITS[kind]
    edit(newest(directory), change)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read_checkpoint(newest(directory))


def test_no_valid_checkpoint_is_an_error_not_a_fresh_start(directory):
    for path in checkpoint.list_checkpoints(directory):
        (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        checkpoint.newest_valid(directory, ALONE)


def test_another_model_is_refused_with_the_parameter(directory):
    other = tree(model={"hidden_size": 64})
    with pytest.raises(
        AssertionError,
        match=r"holds another model: embedding.block_position_embeddings.weight is \(513, 32\) there",
    ):
        run_ranks(load_and_check, 1, other, directory)


def save_where_one_rank_fails(context, settings, directory):
    engine = make_engine(context, settings)
    if context.rank == 1:

        def broken():
            raise OSError("No space left on device")

        engine.fragments = broken
    try:
        checkpoint.save(Path(directory), 3, engine, {}, context)
    except CheckpointError as error:
        return str(error)


def test_a_failure_on_one_rank_is_reported_by_all_and_leaves_the_others_alone(directory):
    messages = run_ranks(save_where_one_rank_fails, 2, tree(), directory)
    assert "No space left" in messages[1] and "1 other rank(s) failed" in messages[0]
    assert [p.name for p in checkpoint.list_checkpoints(directory)] == ["step_00000001", "step_00000002"]
    run_ranks(
        fill_and_save, 2, tree(), directory, (3,)
    )  # the leftover partial directory does not stop the next save
    assert checkpoint.newest_valid(directory, ALONE).step == 3


def test_retention(tmp_path):
    for step in (5, 10, 15, 20, 25):
        (tmp_path / checkpoint.checkpoint_name(step)).mkdir()
    checkpoint.retain(tmp_path, keep_last=0, keep_every=0)
    assert len(checkpoint.list_checkpoints(tmp_path)) == 5
    checkpoint.retain(tmp_path, keep_last=2, keep_every=10)
    assert [p.name[-2:] for p in checkpoint.list_checkpoints(tmp_path)] == ["10", "20", "25"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        p.name for p in checkpoint.list_checkpoints(tmp_path)
    ]
