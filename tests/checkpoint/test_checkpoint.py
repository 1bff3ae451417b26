import json
import math
import random
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.distributed import run_ranks
from support.selection import slow_but
from support.training.engines import expected, fill, layout, make_engine, placed, run_layout, tree
from support.training.whole_weights import load_weights

from data_utils.common.errors import CheckpointError
from megatron_lite.checkpoint import tensor_files
from megatron_lite.checkpoint.manifest import checkpoint_name, list_checkpoints, write_manifest
from megatron_lite.checkpoint.read import load_checkpoint, newest_valid
from megatron_lite.checkpoint.shard_slices import ShardSlice, flattened_ranges, matrix_shape
from megatron_lite.checkpoint.verify import _overlapping, read_checkpoint
from megatron_lite.checkpoint.write import retain, save_checkpoint
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.tensor_parallel import Partition, local_shard, partition_of, whole_shape

ALONE = ParallelContext.alone()


def fill_and_save(context, settings, directory, steps=(1,)):
    """Give every element of the state a value that says where it belongs, and save."""
    engine = make_engine(context, settings)
    for step in steps:
        fill(engine, step)
        save_checkpoint(Path(directory), step, engine, {"note": "state"}, context)


def load_and_check(context, settings, directory):
    engine = make_engine(context, settings)
    found = newest_valid(Path(directory), context)
    load_checkpoint(found, engine, context)
    for fragment, owned, positions in placed(engine):
        for kind, values in fragment.tensors.items():
            part = values[owned.start - fragment.start : owned.stop - fragment.start]
            assert torch.equal(part, expected(fragment.name, kind, found.step, positions)), (
                fragment.name,
                kind,
            )
    tp = context.tp
    if settings["parallel"].get("zero_stage") == 3:
        return engine.scalar_state()  # no rank holds the model's weights
    for name, parameter in engine.named_parameters.items():
        partition = partition_of(parameter)
        shape = whole_shape(tuple(parameter.shape), partition, tp.size)
        weight = expected(name, "weight", found.step, torch.arange(math.prod(shape))).view(shape)
        weight = local_shard(weight, partition, tp.rank, tp.size, len(parameter))
        assert torch.equal(parameter.float(), weight.to(parameter.dtype).float()), name
    return engine.scalar_state()


RESHARDS = [
    (1, layout(), 4, layout(zero=2)),
    (4, layout(), 2, layout()),
    (2, layout(zero=2), 1, layout()),
    (2, layout(tp=2), 2, layout()),
    (2, layout(), 4, layout(tp=2, zero=2)),
    (4, layout(tp=4), 4, layout(tp=2, sp=True)),
    (2, layout(pp=2), 2, layout(tp=2)),
    (4, layout(tp=2, pp=2), 1, layout()),
    (2, layout(zero=3), 4, layout()),
    (4, layout(tp=2), 4, layout(tp=2, zero=3)),
    (4, layout(tp=2, zero=2), 8, layout(tp=2, pp=2, sp=True)),
]


@pytest.mark.parametrize(
    "ranks, before, new_ranks, after",
    # Each kind of parallelism is saved or loaded by one of these.
    slow_but([RESHARDS[4], RESHARDS[6], RESHARDS[8]], RESHARDS, of_several_names=True),
)
def test_state_is_bit_equal_on_any_layout(tmp_path, ranks, before, new_ranks, after):
    settings = {"batch": {"micro_batch_size": 1}}
    run_layout(fill_and_save, ranks, before, settings, tmp_path)
    for state in run_layout(load_and_check, new_ranks, after, settings, tmp_path):
        assert state["adam_step"] == 1.0


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_half_precision_keeps_fp32_state(tmp_path, precision):
    settings = {"training": {"precision": precision}, "batch": {"micro_batch_size": 1}}
    run_layout(fill_and_save, 2, layout(tp=2), settings, tmp_path)
    for state in run_layout(load_and_check, 2, layout(zero=2), settings, tmp_path):
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
    found = newest_valid(directory, ALONE)
    assert found.step == 2 and found.state == {"note": "state"}
    for name, weight in load_weights(found).items():
        assert torch.equal(weight.flatten(), expected(name, "weight", 2, torch.arange(weight.numel())))


def newest(directory):
    return list_checkpoints(directory)[-1]


def flip_bit(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


DAMAGE = {
    "bit flip in data": (lambda p: flip_bit(p / "rank_00001.safetensors", -5), "rank_00001.safetensors does not match"),
    "truncated file": (lambda p: (p / "rank_00000.safetensors").open("r+b").truncate(100), "has 100 bytes"),
    "missing file": (lambda p: (p / "rank_00000.safetensors").unlink(), "rank_00000.safetensors: No such file"),
    "missing manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json: No such file"),
    "manifest cut": (lambda p: (p / "manifest.json").open("r+b").truncate(50), "manifest.json is not valid JSON"),
    "manifest emptied": (lambda p: (p / "manifest.json").write_text("{}"), "not of format"),
    "bit flip in manifest": (lambda p: flip_bit(p / "manifest.json", -20), "does not match manifest.json.sha256"),
    "bit flip in its checksum": (lambda p: flip_bit(p / "manifest.json.sha256", 7), "manifest.json does not match"),
    "no checksum": (lambda p: (p / "manifest.json.sha256").unlink(), "manifest.json.sha256: No such file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_one_before_is_used(directory, caplog, kind):
    damage, message = DAMAGE[kind]
    damage(newest(directory))
    assert newest_valid(directory, ALONE).step == 1
    assert message in caplog.text and "step_00000002" in caplog.text


def edit(path, change):
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    write_manifest(path, manifest)


EDITS = {
    "gap": (lambda m: m["pieces"].pop(3), "incomplete, or elements are stored twice"),
    "twice": (lambda m: m["pieces"].append(m["pieces"][3]), "incomplete, or elements are stored twice"),
    "moved": (lambda m: m["pieces"][3].update(box=[10**6, 10**6 + 1, 0, 1]), "incomplete"),
    "path outside": (
        lambda m: m["files"].update({"../x": {"bytes": 0, "block_bytes": 1, "crc32": []}}),
        "'../x', which is not a file of a rank",
    ),
    "block of no bytes": (
        lambda m: m["files"]["rank_00000.safetensors"].update(block_bytes=0),
        "block_bytes 0; it must be greater than or equal to 1",
    ),
    "missing section": (lambda m: m.pop("optimizer"), "manifest.json has no optimizer"),
    "no count of Adam's": (
        lambda m: m["optimizer"].pop("adam_step"),
        "manifest.json has no optimizer.adam_step",
    ),
    "no loss scaler": (lambda m: m["optimizer"].pop("loss_scaler"), "has no optimizer.loss_scaler"),
    "counts that are none": (
        lambda m: m["optimizer"].update(adam_steps={"dense.bias": "7"}),
        "says optimizer.adam_steps.dense.bias '7'; it must be a valid number",
    ),
    "a loss scale of 0": (
        lambda m: m["optimizer"].update(loss_scaler={"cur_scale": 0}),
        "loss_scaler.cur_scale 0; it must be greater than 0",
    ),
    "no dimension": (lambda m: m["shapes"].update({"dense.bias": []}), "List should have at least 1 item"),
    "absurd block": (
        lambda m: m["files"]["rank_00000.safetensors"].update(block_bytes=10**400),
        "block_bytes",
    ),
    "no number": (lambda m: m.update(step=2.0), "says step 2.0; it must be a valid integer"),
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
        read_checkpoint(newest(directory))


@pytest.mark.parametrize("version", [1, 3, None, "2"])
def test_another_version_is_refused_by_number(directory, version):
    edit(newest(directory), lambda m: m.update(version=version))
    with pytest.raises(
        CheckpointError,
        match=rf"format version {version!r}, and this program reads 2",
    ):
        read_checkpoint(newest(directory))


def test_the_files_are_safetensors(directory):
    found = read_checkpoint(newest(directory))
    for stored in found.slices:
        values = load_file(found.path / stored.file)[stored.key]
        assert values.dtype == torch.float32 and tuple(values.shape) == stored.slice.shape
        rows, columns = matrix_shape(found.shapes[stored.name])
        box = stored.slice
        positions = torch.arange(rows * columns).view(rows, columns)[
            box.within(ShardSlice(0, rows, 0, columns))
        ]
        assert torch.equal(values, expected(stored.name, stored.state_name, 2, positions))


@pytest.mark.parametrize("block", [100, 4096, 1 << 20])
def test_checksums_of_blocks_match_the_file(tmp_path, monkeypatch, block):
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", block)
    values = torch.arange(3000.0)
    described = tensor_files.write_tensors(
        tmp_path / "a", {"x": (30, 100), "y": (0, 1)}, [values, values[:0]]
    )
    content = (tmp_path / "a").read_bytes()
    assert described["bytes"] == len(content) and described["block_bytes"] == block
    assert described["crc32"] == [zlib.crc32(content[i : i + block]) for i in range(0, len(content), block)]
    assert torch.equal(load_file(tmp_path / "a")["x"].flatten(), values)


def test_overlapping_boxes_are_found():
    rng = random.Random(0)
    for _ in range(300):
        corners = [(rng.randrange(6), rng.randrange(6)) for _ in range(4)]
        boxes = [ShardSlice(r, r + rng.randint(1, 3), c, c + rng.randint(1, 3)) for r, c in corners]
        every_pair = any(a.overlap(b) for i, a in enumerate(boxes) for b in boxes[:i])
        assert _overlapping(boxes) == every_pair


def test_no_valid_checkpoint_is_an_error_not_a_fresh_start(directory):
    for path in list_checkpoints(directory):
        (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        newest_valid(directory, ALONE)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"hidden_size": 64},
            r"embedding.position_embeddings.weight is \(513, 32\) there and \(513, 64\) here",
        ),
        ({"num_layers": 1}, "another model: .* 29 .* 17"),
    ],
)
def test_another_model_is_refused(directory, change, message):
    with pytest.raises(AssertionError, match=message):
        run_ranks(load_and_check, 1, tree(model=change), directory)


@given(
    rows=st.sampled_from([6, 12, 24]),
    columns=st.integers(1, 7),
    split=st.sampled_from(
        [(None, 1, 1), (0, 1, 2), (0, 3, 2), (1, 1, 2), (0, 1, 4), (0, (4, 1, 1), 2), (0, (1, 2, 3), 4)]
    ),
    cut=st.integers(1, 40),
)
@settings(max_examples=200, deadline=None)
def test_runs_of_all_ranks_tile_the_whole_and_say_where_each_element_lies(rows, columns, split, cut):
    dim, parts, size = split
    partition = Partition(dim=dim, parts=parts)
    shape = [rows, columns]
    if dim is not None:
        shape[dim] *= size
    whole = torch.arange(math.prod(shape)).view(shape)
    seen = torch.zeros_like(whole)
    for rank in range(size):
        shard = local_shard(whole, partition, rank, size, rows)
        flat = shard.reshape(-1)
        for start in range(0, len(flat), cut):
            count = min(cut, len(flat) - start)
            for owned in flattened_ranges(tuple(shard.shape), partition, rank, size, start, count):
                indices = owned.slice.within(ShardSlice(0, shape[0], 0, shape[1]))
                assert torch.equal(whole[indices].flatten(), flat[owned.start : owned.stop])
                seen[indices] += 1
    assert seen.eq(1 if dim is not None else size).all()


def test_runs_leave_out_padding_rows():
    partition = Partition(dim=0, rows=5)  # two shards of four rows, three of them padding
    boxes = [[owned.slice for owned in flattened_ranges((4, 2), partition, rank, 2, 0, 8)] for rank in (0, 1)]
    assert boxes == [[ShardSlice(0, 4, 0, 2)], [ShardSlice(4, 5, 0, 2)]]


def save_where_one_rank_fails(context, settings, directory):
    engine = make_engine(context, settings)
    if context.rank == 1:

        def broken():
            raise OSError("No space left on device")
            yield

        engine.fragments = broken
    try:
        save_checkpoint(Path(directory), 3, engine, {}, context)
    except CheckpointError as error:
        return str(error)


def test_a_failure_on_one_rank_is_reported_by_all_and_leaves_the_others_alone(directory):
    messages = run_ranks(save_where_one_rank_fails, 2, tree(), directory)
    assert "No space left" in messages[1] and "1 other rank(s) failed" in messages[0]
    assert [p.name for p in list_checkpoints(directory)] == ["step_00000001", "step_00000002"]
    run_ranks(
        fill_and_save, 2, tree(), directory, (3,)
    )  # the leftover partial directory does not stop the next save
    assert newest_valid(directory, ALONE).step == 3


def test_retention(tmp_path):
    for step in (5, 10, 15, 20, 25):
        (tmp_path / checkpoint_name(step)).mkdir()
    retain(tmp_path, keep_last=0, keep_every=0)
    assert len(list_checkpoints(tmp_path)) == 5
    retain(tmp_path, keep_last=2, keep_every=10)
    assert [p.name[-2:] for p in list_checkpoints(tmp_path)] == ["10", "20", "25"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [p.name for p in list_checkpoints(tmp_path)]
