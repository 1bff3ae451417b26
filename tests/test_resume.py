"""A run that is killed at a random moment and started again ends with the state of the run that was never killed."""

import random
import time

import pytest
from conftest import small_run
from distributed import run_ranks, start_ranks
from test_trainer import fit

from megatron_lite import checkpoint
from megatron_lite.settings import merge

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
    newest = checkpoint.list_checkpoints(directory / "checkpoints")[-1]
    assert newest.name == checkpoint.checkpoint_name(STEPS)
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
        time.sleep(rng.uniform(0, 0.1))
        for process in doomed:
            process.kill()
        for process in ranks:  # one left alone ends by itself
            process.join(timeout=60)
            assert process.exitcode is not None, "a rank hangs"
    finally:
        for process in ranks:
            process.kill()
            process.join()


def wait_for_step(metrics, step, ranks):
    deadline = time.monotonic() + 60
    while step and (not metrics.exists() or metrics.read_bytes().count(b'"train"') < step):
        assert time.monotonic() < deadline
        if not all(process.is_alive() for process in ranks):
            return
        time.sleep(0.005)


TRIALS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 50))]


@pytest.mark.parametrize("seed", TRIALS)
def test_a_killed_run_ends_as_if_it_had_not_been_killed(corpus, uninterrupted, tmp_path, seed):
    rng = random.Random(seed)
    tree = merge(run_tree(corpus, tmp_path), {"checkpoint": {"asynchronous": seed % 2 == 0}})
    kill_at_random_moment(tree, tmp_path, rng)
    run_ranks(fit, RANKS, tree)
    assert final_state(tmp_path) == uninterrupted
