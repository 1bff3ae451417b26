"""Ranks of one start that have not got the same: each case is a start of two or three ranks by their variables."""

import json
import re
import shutil
import time

import pytest
import yaml
from support.commands import Forked, forked, python
from support.distributed import free_port
from support.project import ROOT, copied_project

from data_utils.build.corpus import BuildConfig, build_corpus
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from megatron_lite.parallel import rendezvous
from megatron_lite.telemetry import version

LIMIT_SECONDS = 120  # far below timeouts.setup_seconds, far above what a busy machine needs


@pytest.fixture
def start(settings, tmp_path):
    """Start ranks with one configuration, each with its own further arguments. Returns their results, by rank."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))

    def ranks(*more, places=(ROOT,) * 3):
        port, begin = str(free_port()), time.monotonic()
        started = [
            Forked(
                "pretrain_glm.py", "--config", config, *arguments, cwd=places[rank],
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(more))},
            )
            for rank, arguments in enumerate(more)
        ]  # fmt: skip
        ended = [rank.result() for rank in started]
        assert time.monotonic() - begin < LIMIT_SECONDS
        assert not any("Traceback" in rank.stderr for rank in ended), [rank.stderr for rank in ended]
        return ended

    return ranks


def error_lines(result):
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


def test_a_rank_with_other_settings_names_them_and_all_end(start, tmp_path):
    keys = ["training.steps is 9 here and 6 on rank 0", "optimizer.lr is 0.5 here"]
    first, second = start([], ["training.steps=9", "optimizer.lr=0.5"])
    assert (first.returncode, second.returncode) == (2, 2)
    (line,), (other,) = error_lines(second), error_lines(first)
    assert line.startswith("error: rank 1 on ") and all(key in line for key in keys)
    assert "rank 1 on " in other and all(key in other for key in keys)
    assert not (tmp_path / "run/config.yaml").exists()


def test_a_rank_whose_data_set_of_the_same_name_has_other_texts_is_refused(start, settings, corpus, tmp_path):
    """As with a node whose disk holds a former build."""
    places = [tmp_path / "a", tmp_path / "b"]
    tokenizer = load_tokenizer(TokenizerConfig(kind="bert_wordpiece", path=str(corpus / "vocab.txt")))
    for place, text in zip(places, ("word1 word2", "word3 word4"), strict=True):
        place.mkdir()
        (place / "text.jsonl").write_text(f"{json.dumps({'text': f'{text} .'})}\n" * 200)
        build_corpus(
            BuildConfig(inputs=[str(place / "text.jsonl")], output=str(place / "own")), lambda: tokenizer
        )
    first, second = start(*[["data.train=[{prefix: own}]", "data.validation=[]"]] * 2, places=places)
    assert (first.returncode, second.returncode) == (2, 2)
    (line,) = error_lines(second)
    assert re.search(r"the contents of own \(data.train\[0\]\) is '?[0-9a-f]{12}", line)
    assert "rank 1 on " in error_lines(first)[0]


@pytest.mark.parametrize("wrong", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_refusal_of_one_rank_is_printed_and_ends_the_others(start, wrong):
    fits = "batch.global_batch_size=6"
    ended = start(*([fits, "training.stepz=9"] if rank == wrong else [fits] for rank in range(3)))
    assert [rank.returncode for rank in ended] == [2, 2, 2]
    (line,) = error_lines(ended[wrong])
    assert "training.stepz" in line and ("rank 1 on " in line or wrong == 0)
    others = [line for rank, result in enumerate(ended) if rank != wrong for line in error_lines(result)]
    assert len(others) == 1 and f"rank {wrong} on " in others[0] and "training.stepz" in others[0]


def test_a_refusal_of_all_ranks_is_one_line(start):
    ended = start(*[["training.stepz=9"]] * 3)
    assert [rank.returncode for rank in ended] == [2, 2, 2]
    assert [len(error_lines(rank)) for rank in ended] == [1, 0, 0]
    assert "rank" not in error_lines(ended[0])[0]


def test_ranks_with_two_refusals_print_both(start):
    ended = start(["training.stepz=9"], ["optimizer.rl=9"])
    assert "training.stepz" in error_lines(ended[0])[0]
    (line,) = error_lines(ended[1])
    assert line.startswith("error: rank 1 on ") and "optimizer.rl" in line


def test_a_refusal_after_ranks_have_compared_ends_the_others(start, settings, corpus, tmp_path):
    """The second rank's copy of a data set is damaged: the manifest is the same."""
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        shutil.copytree(corpus, place)
    with (places[1] / "corpus_train.idx").open("r+b") as file:
        file.truncate(100)
    first, second = start(*[["data.train=[{prefix: corpus_train}]"]] * 2, places=places)
    assert (first.returncode, second.returncode) == (2, 2)
    assert "corpus_train.idx" in error_lines(second)[0] and "corpus_train.idx" in error_lines(first)[0]
    assert "rank 1 on " in error_lines(first)[0]


def test_a_start_that_asks_only_does_not_wait_for_others(settings, tmp_path):
    """A pod of a cluster may have RANK and WORLD_SIZE set for every command."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    begin = time.monotonic()
    done = forked(
        "pretrain_glm.py", "--config", config, "--print-config", "training.stepz=9",
        MASTER_PORT=str(free_port()), **place,
    )  # fmt: skip
    assert done.returncode == 2 and time.monotonic() - begin < rendezvous.PATIENCE_SECONDS / 2


def test_facts_change_with_the_program(tmp_path):
    project = copied_project(tmp_path)
    before = version.sources(project)
    assert before == version.sources(project) == version.sources()
    with (project / "megatron_lite/transformer/transformer.py").open("a") as file:
        file.write("# another line\n")
    assert version.sources(project) != before


@pytest.mark.slow
@pytest.mark.launcher
def test_under_torchrun_a_refusal_of_one_rank_is_heard(settings, tmp_path):
    """torchrun's agent holds the store."""
    config, script = tmp_path / "config.yaml", tmp_path / "start.py"
    config.write_text(yaml.safe_dump(settings))
    script.write_text(
        "import os, runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "sys.argv += ['training.steps=9'] if os.environ['RANK'] == '1' else []\n"
        f"runpy.run_path({str(ROOT / 'pretrain_glm.py')!r}, run_name='__main__')\n"
    )
    status = tmp_path / "status"
    done = python(
        "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
        str(script), "--config", str(config), GLM_STATUS_FILE=str(status), OMP_NUM_THREADS="1",
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 2 and all("training.steps is 9 here and 6 on rank 0" in line for line in lines)
    assert status.read_text() == "2\n"
