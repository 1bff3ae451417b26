"""Datasets of the hub: its routes on the loopback, at HF_ENDPOINT."""

import os
import subprocess
import sys
import types

import pytest
from huggingface_hub import errors
from huggingface_hub.hf_api import RepoFile
from support.data.stored_corpora import build, corpus_files, write_files
from support.data.stores import COMMIT, serving
from support.project import ROOT

from data_utils.common.errors import DataError
from data_utils.corpus.inputs import expand_inputs
from data_utils.storage.hub_datasets import list_hub
from data_utils.storage.listing import list_url

PROGRAM = """
import sys; sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from data_utils.common.errors import run_command
from data_utils.storage import objects
objects.RETRY_POLICY = objects.RetryPolicy(first_wait=0.001)
from support.data.stored_corpora import build
if __name__ == '__main__':
    run_command(lambda: build(sys.argv[5:], Path(sys.argv[3]), workers=int(sys.argv[4])) and None)
"""


def run(server, tmp_path, *urls, workers=0, token="hf_CANARY"):
    """In another process: the library reads its variables when it is imported."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    paths = [str(script), str(ROOT), str(ROOT / "tests"), str(tmp_path / "remote"), str(workers)]
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        "HF_TOKEN": token,
        "HF_HOME": str(tmp_path / "home"),
    }
    return subprocess.run(
        [sys.executable, *paths, *urls], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def hub():
    files = corpus_files()
    with serving({f"/org/texts/data/{name}": content for name, content in files.items()}) as server:
        server.files["/org/texts/README.md"] = b"# Texts"
        server.hub["org/texts"] = COMMIT
        yield server, files


@pytest.mark.parametrize(("workers", "cuts"), [(0, 0.6), pytest.param(2, 0.0, marks=pytest.mark.slow)])
def test_a_build_from_the_hub_has_the_bytes_of_local_files(tmp_path, hub, workers, cuts):
    server, files = hub
    expected = build(write_files(tmp_path / "raw", files), tmp_path / "local")
    server.cuts = cuts
    server.needed = "Bearer hf_CANARY"
    done = run(server, tmp_path, "hf://datasets/org/texts/data/*", workers=workers)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"remote{suffix}").read_bytes() for suffix in (".bin", ".idx")] == expected
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"CANARY" not in written and "CANARY" not in done.stderr + done.stdout
    assert f"hf://datasets/org/texts@{COMMIT}/data/a.jsonl".encode() in written


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("hf://datasets/org/texts", "README.md has an unknown suffix"),
        pytest.param("hf://datasets/org/none/**", "none of this name", marks=pytest.mark.slow),
        pytest.param("hf://datasets/org/texts@other/**", "has no revision other", marks=pytest.mark.slow),
        pytest.param("hf://datasets/org/texts/data/*.jsonl.xz", "names no object", marks=pytest.mark.slow),
        pytest.param("hf://org/texts/data/*", "is no dataset of the hub", marks=pytest.mark.slow),
        ("hf://datasets/org/texts/data/a.jsonl", "set HF_TOKEN"),
    ],
)
def test_what_the_hub_refuses_is_one_line(tmp_path, hub, url, words):
    server, _ = hub
    server.needed = "Bearer another"
    done = run(server, tmp_path, url)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert "CANARY" not in done.stderr


def failing(kind, status=None):
    """What the hub's library raises."""
    if status is None:
        return kind("CANARY")
    return kind("CANARY", response=types.SimpleNamespace(status_code=status, headers={}, request=None))


@pytest.fixture
def answers(monkeypatch):
    """Errors that the hub's library raises, one after another, before it lists a file."""
    raised = []

    class Api:
        def dataset_info(self, repository, revision, timeout):
            if raised:
                raise raised.pop(0)
            return types.SimpleNamespace(sha=COMMIT)

        def list_repo_tree(self, repository, folder, **_):
            names = ("data/_a.jsonl", "data/[!].jsonl", "data/c.jsonl")
            return [RepoFile(path=name, size=3, oid="x") for name in names]

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    return raised


def test_a_busy_hub_is_asked_again(answers):
    [cut] = [kind for kind in subclasses(errors.HTTPError) if kind.__name__ == "RemoteProtocolError"]
    [unconnected] = [kind for kind in subclasses(errors.HTTPError) if kind.__name__ == "ConnectError"]
    answers += [failing(errors.HfHubHTTPError, 503), failing(errors.HfHubHTTPError, 429), failing(cut)]
    assert len(list_hub("hf://datasets/org/texts/data/c.jsonl")[0]) == 1
    answers += [failing(errors.HfHubHTTPError, 503)] * 20
    with pytest.raises(DataError, match=r"input hf://datasets/org/texts: 10 attempts in a row"):
        list_hub("hf://datasets/org/texts")
    for error, words in (
        (failing(unconnected), "cannot be reached"),
        (failing(errors.HfHubHTTPError, 403), "status 403"),
        (failing(errors.HFValidationError), "org/te--xts is no name that the hub takes"),
    ):
        answers[:] = [error]
        with pytest.raises(DataError, match=words) as refused:
            list_hub("hf://datasets/org/te--xts")
        assert "CANARY" not in str(refused.value)


def subclasses(kind):
    return {inner for below in kind.__subclasses__() for inner in (below, *subclasses(below))}


def test_a_file_that_is_named_is_read_whatever_its_name(answers, caplog):
    for name in ("_a", "[!]"):
        url = f"hf://datasets/org/texts/data/{name}.jsonl"
        assert [entry.name for entry in expand_inputs([url])] == [f"{name}.jsonl"]
    assert not caplog.text
    assert [entry.name for entry in expand_inputs(["hf://datasets/org/texts/data/?.jsonl"])] == ["c.jsonl"]
    with pytest.raises(DataError, match="names no object"):
        list_url("hf://datasets/org/texts/data/[!].txt")
