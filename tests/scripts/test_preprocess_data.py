"""The script as a user runs it: a checkout, a real tokenizer file, one line for an error."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import forked
from support.data.tokenizer_files import byte_bpe_json
from support.project import ROOT

from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer

SCRIPT = ROOT / "scripts" / "preprocess_data.py"
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "again"]


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (tmp_path / "good.jsonl").write_text('{"text": "hello world"}\n{"text": "hello again"}\n')
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "hello"}\n{"text": \n')
    (tmp_path / "file").write_text("")
    (tmp_path / "plain.txt").write_text("hello world\n")
    return tmp_path


TOKENIZER = ["--tokenizer-kind", "bert_wordpiece", "--tokenizer-path", "vocab.txt"]


def start(directory, *arguments, launcher=()):
    """A new process, or the processes of a launcher."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [*launcher, sys.executable, str(SCRIPT), *TOKENIZER, *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)


def run(directory, *arguments):
    return forked("scripts/preprocess_data.py", *TOKENIZER, *arguments, cwd=directory)


def test_builds_a_corpus(corpus):
    done = start(corpus, "--input", "*ood.jsonl", "--output", "data/corpus", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert "2 documents, 6 tokens" in done.stdout and "MB/s" in done.stdout
    dataset = IndexedDataset(corpus / "data/corpus")
    assert dataset.document(1).tolist() == [5, 7, dataset.manifest["eos"]]
    assert dataset.manifest["tokenizer"]["config"]["kind"] == "bert_wordpiece"


def test_names_in_the_input_stay_on_one_line(corpus):
    """In errors, in the summary and in warnings: they could colour a terminal, or look like other lines."""
    (corpus / "name.jsonl").write_text('{"a\\nb\\u001b[31m": 1}\n')
    (corpus / "new\nline.jsonl").write_text("")
    inputs = ["--input", "name.jsonl", "new\nline.jsonl", "good.jsonl", "--output", "o", "--workers", "1"]
    fields = "name.jsonl:1: there is no field 'text' (fields: a\\nb\\x1b[31m; "
    for done, said in (
        (run(corpus, *inputs), "stderr"),
        (run(corpus, *inputs, "--on-bad-record", "skip"), "stdout"),
    ):
        assert fields in getattr(done, said) and "\x1b" not in done.stdout + done.stderr
        assert "1 inputs are empty: new\\nline.jsonl\n" in done.stderr


def test_a_tokenizer_that_does_not_know_the_text_is_warned_of(corpus):
    (corpus / "capitals.jsonl").write_text('{"text": "HELLO world"}\n')
    options = ["--input", "capitals.jsonl", "--workers", "1"]
    assert "unknown text" not in run(corpus, *options, "--output", "lower").stdout
    done = run(corpus, *options, "--output", "cased", "--no-lowercase")
    assert done.returncode == 0, done.stderr
    assert "warning: 33.3 % of the first 3 tokens are the unknown token" in done.stdout


def test_the_token_that_ends_documents_can_be_named(corpus):
    (corpus / "tokenizer.json").write_text(json.dumps(byte_bpe_json(["<finis>"])))
    kind = (
        "--input",
        "good.jsonl",
        "--tokenizer-kind",
        "hf_json",
        "--tokenizer-path",
        corpus / "tokenizer.json",
    )
    kind = *kind, "--added-tokens", "none", "--workers", "1"
    done = run(corpus, *kind, "--output", "without")
    assert "no token ends the documents: " in done.stdout and "--token-role eos=TOKEN" in done.stdout
    done = run(corpus, *kind, "--output", "with", "--token-role", "eos=<finis>")
    assert done.returncode == 0 and "no token ends" not in done.stdout, done.stderr
    without, ended = IndexedDataset(corpus / "without"), IndexedDataset(corpus / "with")
    assert [*ended.document(0)] == [*without.document(0), ended.manifest["eos"]]
    refused = run(corpus, *kind, "--output", "refused", "--token-role", "eos")
    assert refused.returncode == 2 and "'eos' is not ROLE=TOKEN" in refused.stderr


def test_spans_are_stored_beside_the_tokens(corpus):
    """Merged and verified from a shell as well; a record without them is one line."""
    lines = ['{"text": "hello world again", "spans": [[0, 11, "noun"]]}', '{"text": "hello", "spans": []}']
    (corpus / "spans.jsonl").write_text("\n".join(lines) + "\n")
    options = ["--input", "spans.jsonl", "--spans-key", "spans", "--workers", "1", "--verify"]
    done = run(corpus, *options, "--output", "out")
    assert done.returncode == 0, done.stderr
    assert "spans: 1; skipped: 0 with a low score" in done.stdout and "out: verified" in done.stdout
    assert IndexedDataset(corpus / "out").entities.tolist() == [2, *[-1] * 5]
    done = run(corpus, "--input", "good.jsonl", "--spans-key", "spans", "--workers", "1", "--output", "b")
    assert done.returncode == 2 and "Traceback" not in done.stderr and not list(corpus.glob("b.*"))
    assert "good.jsonl:1: there is no list 'spans' of [start, end, " in done.stderr


def test_a_corpus_of_the_published_vocabulary(corpus):
    options = ["--added-tokens", "none", "--vocab-size", "9", "--workers", "1"]
    done = run(corpus, "--input", "good.jsonl", "--output", "out", *options)
    assert done.returncode == 0, done.stderr
    dataset = IndexedDataset(corpus / "out")
    assert dataset.document(1).tolist() == [5, 7, WORDS.index("[SEP]")]
    tokenizer = TokenizerConfig(
        kind="bert_wordpiece", path=str(corpus), added_tokens="none", vocab_size=len(WORDS) + 1
    )
    loaded = load_tokenizer(tokenizer)
    dataset.require_tokenizer(loaded.fingerprint, loaded.vocab_size, loaded.special.eos)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "empty.jsonl", "--output", "out"], "no document with tokens"),
        (["--input", "missing.jsonl", "--output", "out"], "missing.jsonl does not exist"),
        (["--input", "bad.jsonl", "--output", "out"], "bad.jsonl:2: malformed JSON"),
        (["--input", "good.jsonl", "--output", "file/out"], "cannot be written"),
        (["--input", "good.jsonl", "--output", "good", "--workers", "0"], "workers is 0"),
        (["--input", "good.jsonl", "--output", "out", "--split", "train=0.5"], "must sum to 1"),
        (["--input", "good.jsonl", "--output", "out", "--vocab-size", "5"], "tokenizer.vocab_size is 5, but"),
        (
            ["--input", "plain.txt", "--output", "out", "--text-key", "body"],
            "text_key is 'body', but all inputs are .txt",
        ),
    ],
)
def test_an_error_is_one_line_and_status_2(corpus, arguments, message):
    before = sorted(corpus.iterdir())
    done = run(corpus, *arguments, *([] if "--workers" in arguments else ["--workers", "1"]))
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert sorted(corpus.iterdir()) == before


def test_existing_output_is_kept(corpus):
    arguments = ["--input", "good.jsonl", "--output", "out", "--workers", "1"]
    assert run(corpus, *arguments).returncode == 0
    before = json.loads((corpus / "out.json").read_text())
    done = run(corpus, *arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--overwrite" in done.stderr
    assert run(corpus, *arguments, "--overwrite").returncode == 0
    assert json.loads((corpus / "out.json").read_text()) == before


def test_options_of_large_corpora(corpus):
    lines = [f'{{"text": "hello world {word}"}}\n' for word in ("hello", "world", "hello", "again")]
    (corpus / "big.jsonl").write_text("".join(lines))
    (corpus / "eval.txt").write_text("hello " * 20 + "\n")
    arguments = ["--input", "big.jsonl", "--output", "out", "--deduplicate", "--decontaminate", "eval.txt"]
    done = run(corpus, *arguments, "--shard-megabytes", "1", "--verify", "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert "1 exact duplicates" in done.stdout and "0 of 1 evaluation texts" in done.stdout
    assert "out: verified" in done.stdout
    assert len(IndexedDataset(corpus / "out")) == 3


@pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun")
def test_mpi_ranks(corpus):
    arguments = ["--mpi", "--workers", "1", "--output", "out", "--input"]
    done = start(corpus, *arguments, "good.jsonl", launcher=[MPIRUN, "-n", "2"])
    assert done.returncode == 0 and done.stdout.count("2 documents") == 2, done.stderr  # total and dataset
    done = start(corpus, *arguments, "good.jsonl", launcher=[MPIRUN, "-n", "2"])
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--overwrite" in done.stderr
