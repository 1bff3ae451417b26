"""What a run begins with is checked before there is a process group; and a run that is killed at a random moment and
started again ends with the state of the run that was never killed.
"""

import math
import random
import shutil

import pytest
import yaml
from support.commands import assert_refused, forked
from support.distributed import run_ranks, start_ranks
from support.project import small_run
from support.training.training import fit
from support.waiting import random_delay, wait_until

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import build, merge
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.checkpoint.manifest import checkpoint_name, list_checkpoints
from megatron_lite.config.tree import Config
from megatron_lite.telemetry.records import read_metrics
from megatron_lite.train.start import check_start

# Before the start


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A run with checkpoints of steps 1 and 2."""
    directory = tmp_path_factory.mktemp("trained")
    changes = {"training": {"stop_after_step": 2}, "checkpoint": {"save_interval": 1}}
    run_ranks(fit, 1, merge(small_run(corpus, directory), changes))
    return directory


def begin(corpus, directory, **checkpoint):
    """Check what a run in `directory` would begin with. Sections among `checkpoint` change the run."""
    names = ("model", "training", "optimizer", "blank_infilling", "batch")
    sections = {name: checkpoint.pop(name) for name in names if name in checkpoint}
    tree = merge(small_run(corpus, directory), {"checkpoint": checkpoint, **sections})
    config = build(Config, tree)
    check_start(config.with_vocab_size(load_tokenizer(config.tokenizer).vocab_size))


def test_what_a_run_can_begin_with_is_let_pass(corpus, trained, tmp_path):
    begin(corpus, tmp_path)
    begin(corpus, trained)
    begin(corpus, tmp_path, initialize_from=str(trained))
    begin(corpus, tmp_path, initialize_from=str(trained / "checkpoints/step_00000001"))
    begin(corpus, trained, initialize_from=str(tmp_path / "absent"))  # its own checkpoints win
    copy = shutil.copytree(trained, tmp_path / "copy")
    (copy / "checkpoints/step_00000002/manifest.json").write_text("{")
    begin(corpus, copy)  # the one before will be used


@pytest.mark.parametrize(
    "begun, checkpoint, message",
    [
        (False, {"initialize_from": "absent"}, "absent does not exist; give a run directory or one"),
        (False, {"initialize_from": "checkpoints/step_00000009"}, "step_00000009 does not exist; give one: "),
        (
            False,
            {"initialize_from": "", "model": {"hidden_size": 64}},
            r"\(65, 32\) there and \(65, 64\) here; use",
        ),
        (
            False,
            {"initialize_from": "", "model": {"num_layers": 1}},
            "another model: it has 29 parameter tensors",
        ),
        (True, {"model": {"hidden_size": 64}}, r"model.hidden_size: 32 -> 64"),
        (
            True,
            {"training": {"seed": 8}},
            r"trained with other settings: training.seed: 7 -> 8\. Put the old values back",
        ),
        (
            False,
            {"initialize_from": "", "initialize": "all", "training": {"seed": 8}},
            r"trained with other settings: training.seed: 7 -> 8\. Put the old values back",
        ),
        (
            True,
            {"training": {"label_smoothing": 0.1}},
            r"label_smoothing: 0.0 -> 0.1\. .*branch off: another run.directory with checkpoint.initialize_from=.*all",
        ),
        (True, {"resume": "never"}, "already holds a checkpoint of step 2 and checkpoint.resume is never"),
    ],
)
def test_what_a_run_cannot_begin_with_is_refused(corpus, trained, tmp_path, begun, checkpoint, message):
    if "initialize_from" in checkpoint:
        checkpoint = {**checkpoint, "initialize_from": str(trained / checkpoint["initialize_from"])}
    with pytest.raises(CheckpointError, match=message):
        begin(corpus, trained if begun else tmp_path, **checkpoint)


def test_a_branch_changes_rate_and_objective_but_not_the_samples_used(corpus, trained, tmp_path):
    """`optimizer.lr` and an objective's section are for phases in the run itself."""
    branch = {"initialize_from": str(trained), "initialize": "all"}
    changes = {"optimizer": {"lr": 1e-4}, "blank_infilling": {"token_prob": 0.9, "sentence_prob": 0.0}}
    with pytest.raises(CheckpointError, match=r"token_prob: 0.5 -> 0.9; .*optimizer.lr.* in a phase"):
        begin(corpus, trained, **changes)
    begin(corpus, tmp_path, **branch, **changes)
    with pytest.raises(CheckpointError, match="samples used or skipped by step 2: 16 -> 8"):
        begin(corpus, tmp_path, **branch, batch={"global_batch_size": 4})


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(corpus, trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "copy")
    for path in (copy / "checkpoints").iterdir():
        (path / "rank_00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .* is valid"):
        begin(corpus, copy)


def test_a_run_whose_checkpoints_were_removed_is_refused(corpus, trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "copy")
    for path in (copy / "checkpoints").iterdir():
        shutil.rmtree(path)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(small_run(corpus, copy)))
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    result = forked("pretrain_glm.py", "--config", str(config))
    message = f"{copy}/metrics.jsonl records a save, but {copy}/checkpoints holds no checkpoint"
    assert_refused(result, message)
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_it_is_refused_before_the_corpora_are_opened_and_the_ranks_meet(corpus, tmp_path):
    """Neither is possible here."""
    config = tmp_path / "config.yaml"
    empty = {"checkpoint": {"initialize_from": str(tmp_path)}, "data": {"train": [{"prefix": "none"}]}}
    config.write_text(yaml.safe_dump(merge(small_run(corpus, tmp_path / "run"), empty)))
    result = forked("pretrain_glm.py", "--config", str(config), RANK="0", WORLD_SIZE="2")
    assert_refused(result, f"{tmp_path} holds no run and no checkpoint; give a run directory")
    assert not (tmp_path / "run").exists()


# What a start logs


def events_of(directory):
    return [record["event"] for record in read_metrics(directory) if record["kind"] == "event"]


def test_a_branch_with_another_seed_that_is_accepted_says_so(corpus, trained, tmp_path):
    given = {"initialize_from": str(trained), "initialize": "all", "accept_changed_data": True}
    tree = merge(small_run(corpus, tmp_path), {"training": {"seed": 8}, "checkpoint": given})
    run_ranks(fit, 1, tree)
    assert any("training.seed: 7 -> 8" in event for event in events_of(tmp_path))


@pytest.mark.parametrize("is_branch", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_cosine_run_that_is_made_longer_says_both_rates(corpus, tmp_path, is_branch):
    first, second = tmp_path / "a", tmp_path / ("b" if is_branch else "a")
    short = merge(small_run(corpus, first), {"schedule": {"kind": "cosine", "min_lr_ratio": 0.1}})
    run_ranks(fit, 1, short)
    branch = {"initialize_from": str(first), "initialize": "all"} if is_branch else {}
    longer = merge(
        short, {"training": {"steps": 12}, "run": {"directory": str(second)}, "checkpoint": branch}
    )
    run_ranks(fit, 1, longer)
    cosine = 0.5 * (1 + math.cos(math.pi * (7 - 2) / (12 - 2)))
    rates = f"step 7 is {3e-3 * (0.1 + 0.9 * cosine):.3g}, and would be {3e-4:.3g} by"
    (event,) = [event for event in events_of(second) if "learning rate" in event]
    assert rates in event and "schedule.decay_steps=6" in event
    kept = merge(longer, {"schedule": {"decay_steps": 6}, "run": {"directory": str(tmp_path / "c")}})
    run_ranks(fit, 1, merge(kept, {"checkpoint": {"initialize_from": str(first), "initialize": "all"}}))
    assert not [event for event in events_of(tmp_path / "c") if "learning rate" in event]


def test_a_branch_of_a_merged_checkpoint_says_that_moments_begin(corpus, trained, tmp_path):
    merged = forked("scripts/checkpoints.py", "merge", trained, "1", "2", "--output", tmp_path / "merged")
    assert merged.returncode == 0, merged.stderr
    given = {"initialize_from": str(tmp_path / "merged"), "initialize": "all"}
    run_ranks(fit, 1, merge(small_run(corpus, tmp_path / "b"), {"checkpoint": given}))
    assert any(
        "the optimizer starts without moments at step 2" in event for event in events_of(tmp_path / "b")
    )


# Kills

RANKS, STEPS = 2, 8


def run_tree(corpus, directory):
    dropout = {name: 0.1 for name in ("embedding_dropout", "attention_dropout", "output_dropout")}
    changes = {
        "model": dropout,
        "training": {"steps": STEPS},
        "checkpoint": {"save_interval": 2, "keep_last": 2},
    }
    return merge(small_run(corpus, directory), changes)


def final_state(directory):
    """The files of the last checkpoint: every weight and moment of every rank."""
    newest = list_checkpoints(directory / "checkpoints")[-1]
    assert newest.name == checkpoint_name(STEPS)
    return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    run_ranks(fit, RANKS, run_tree(corpus, directory))
    return final_state(directory)


def kill_at_random_moment(tree, directory, rng):
    """Start the run and kill one rank, or all, some time after a random step."""
    ranks = start_ranks(fit, RANKS, tree)
    step = rng.randrange(STEPS)
    # Before the ranks have found each other, one left alone would wait for the others: only a launcher ends it.
    doomed = [rng.choice(ranks)] if step and rng.random() < 0.5 else ranks
    try:
        wait_for_step(directory / "metrics.jsonl", step, ranks)
        random_delay(rng, 0.1)
        for process in doomed:
            process.kill()
        for process in ranks:  # one left alone ends by itself
            process.join()
            assert process.exitcode is not None, "a rank hangs"
    finally:
        for process in ranks:
            process.kill()
            process.join()


def wait_for_step(metrics, step, ranks):
    def logged():
        return metrics.exists() and metrics.read_bytes().count(b'"train"') >= step

    wait_until(lambda: not step or logged() or not all(rank.is_alive() for rank in ranks))


TRIALS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 50))]


@pytest.mark.parametrize("seed", TRIALS)
def test_a_killed_run_ends_as_if_it_had_not_been_killed(corpus, uninterrupted, tmp_path, seed):
    rng = random.Random(seed)
    tree = merge(run_tree(corpus, tmp_path), {"checkpoint": {"asynchronous": seed % 2 == 0}})
    kill_at_random_moment(tree, tmp_path, rng)
    run_ranks(fit, RANKS, tree)
    assert final_state(tmp_path) == uninterrupted
