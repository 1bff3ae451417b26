"""Every file that a stranger, another program or a damaged disk may have written, mutated: one line, or it works."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import yaml
from support import fuzz
from support.data.tokenizer_files import KIND_OF, bert_vocab
from support.hf import hf_runs
from support.hf.published import random_model
from support.tasks.labelled_files import task
from support.training.stub_engine import StubEngine

from data_utils.build.shards import BuildDirectory
from data_utils.dataset import manifest as dataset_manifest
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.verification import verify
from data_utils.tasks.readers.by_name import read_records
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from megatron_lite.checkpoint.read import load_checkpoint
from megatron_lite.checkpoint.trainer_state import TrainerState
from megatron_lite.checkpoint.verify import read_checkpoint, verify_checkpoint
from megatron_lite.checkpoint.write import save_checkpoint
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.report.page import page
from megatron_lite.report.run import read_run
from megatron_lite.runtime import lease
from megatron_lite.runtime.heartbeats import Heartbeat, read_heartbeats
from scripts.checkpoints import examine

SEEDS = 2_000  # of the large matrix, over all targets


def dataset(root, corpus):
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy2(f"{corpus / 'corpus_validation'}{suffix}", root / f"data{suffix}")

    def seal():
        with contextlib.suppress(ValueError, OSError, TypeError, AttributeError, RecursionError):
            tree = json.loads((root / "data.json").read_bytes())
            (root / "data.json").write_text(json.dumps({**tree, "checksum": dataset_manifest.checksum(tree)}))

    yield fuzz.Target(
        "dataset manifest",
        root / "data.json",
        lambda: verify(IndexedDataset(root / "data")),
        if_regular(root / "data.json", seal),
    )


def if_regular(file, seal):
    """Args: seal: must not open a FIFO or a device."""

    def guarded():
        if file.is_file():
            seal()

    return guarded


def checkpoint(root, corpus):
    config = {"parallel": {"zero_stage": 1, "tensor_parallel_size": 1}, "run": {"directory": "x"}}
    engine = StubEngine()
    engine.train(5)
    path = save_checkpoint(
        root / "run/checkpoints", 5, engine, TrainerState.at_step_0(config).to_json(), ParallelContext.alone()
    )

    def read():
        found = read_checkpoint(path)
        verify_checkpoint(found)
        found.trainer_state()
        load_checkpoint(found, engine, ParallelContext.alone())
        page([read_run(root / "run")], 0.0)
        examine(path, verify_checkpoint)

    def seal():
        digest = hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
        (path / "manifest.json.sha256").write_text(f"{digest}  manifest.json\n")

    yield fuzz.Target(
        "checkpoint manifest", path / "manifest.json", read, if_regular(path / "manifest.json", seal)
    )


def small_state_files(root, corpus):
    run = root / "run"
    run.mkdir()
    taken = lease.acquire(run, "trains")
    content = (run / "LEASE").read_bytes()
    taken.release()
    (run / "LEASE").write_bytes(content)

    def take():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lease, "STALE_SECONDS", 0.0)
            lease.acquire(run, "trains").release()

    yield fuzz.Target("LEASE", run / "LEASE", take)
    beat = Heartbeat(0, "host", 7, "step", "reading data", 3, 9, 1.0, 5.0)
    beat.write(run / "heartbeats")

    def beats():
        for found in read_heartbeats(run / "heartbeats"):
            f"{found.with_age} {found.rank:5} {found.step:9} {found.seconds:12.0f} {found.process_has_died}"

    yield fuzz.Target("heartbeat", run / "heartbeats/rank_00000.json", beats)
    started = {"kind": "start", "step": 0, "restarts": 1, "time": 5.0, "layout": "dp1"}
    trained = [
        {"kind": "train", "step": step, "loss": 1.0 / step, "time": 5.0 + step} for step in range(1, 30)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [started, *trained]))
    (run / "config.yaml").write_text(yaml.safe_dump(hf_runs.tree(Path("vocab.txt"))))
    (run / "unigram.json").write_text(json.dumps({"loss": 7.25, "loss/token": 7}))
    for name in ("metrics.jsonl", "config.yaml", "unigram.json"):
        yield fuzz.Target(f"report {name}", run / name, lambda: page([read_run(run)], 0.0))
    plan = {"plan_version": 1, "inputs": [["a.txt", 100]], "split": {"a": 0.5}, "shards": 7}
    build = BuildDirectory(root / "out")
    build.open(plan, restart=False)
    yield fuzz.Target("build plan", root / "out.build/plan.json", lambda: build.open(plan, restart=False))


def tokenizers(root, corpus, files):
    for name, kind in KIND_OF.items():
        copy = shutil.copytree(files / name, root / name)
        config = TokenizerConfig(kind=kind, path=str(copy))

        def read(config=config):
            tokenizer = load_tokenizer(config)
            tokenizer.decode(tokenizer.encode("The quick brown [MASK] é 今 12\n"))

        for file in sorted(copy.iterdir()):
            yield fuzz.Target(f"tokenizer {name}/{file.name}", file, read)


def tasks(root, corpus):
    records = [{"text": f"word{i} it's", "label": ("no", "yes")[i % 2]} for i in range(8)]
    file = root / "task.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = task("jsonl", text_fields=("text",), label_field="label", labels=("no", "yes"))
    yield fuzz.Target("task jsonl", file, lambda: read_records(config, file, labelled=True))
    squad = {"version": "2.0", "data": [{"title": "t", "paragraphs": [{"context": "a b c", "qas": [
        {"id": str(i), "question": "what?", "is_impossible": False, "answers": [{"text": "b", "answer_start": 2}]}
        for i in range(3)]}]}]}  # fmt: skip
    questions = root / "squad.json"
    questions.write_text(json.dumps(squad))
    asked = task("squad", "squad", "spans")
    yield fuzz.Target("task squad", questions, lambda: read_records(asked, questions, labelled=True))


def exports(root, corpus):
    vocabulary = hf_runs.write_vocabulary(root)
    hf_runs.write_run(root / "run", hf_runs.tree(vocabulary))
    export_run(root / "run", root / "export", ExportOptions(verify=False))
    (root / "bert").mkdir()
    (root / "bert/vocab.txt").write_text("\n".join(bert_vocab()) + "\n")
    (root / "bert/tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    )
    random_model("bert", vocab_size=len(bert_vocab())).save_pretrained(root / "bert")
    tree = {"training": {"steps": 1}, "data": {"sequence_length": 32}}
    settings = {"export": tree, "bert": {**tree, "objectives": {"masked_lm": 1}}}

    def read(source):
        output = root / "imported"
        try:
            import_directory(root / source, output, settings[source], verify=False)
            written = (output / "config.yaml").read_text()
            assert fuzz.STRANGER not in written, f"a stranger's setting was taken: {written}"
        finally:
            shutil.rmtree(output, ignore_errors=True)

    for source, name in (("export", "config.json"), ("export", "training.json"), ("bert", "config.json"),
                         ("bert", "tokenizer_config.json")):  # fmt: skip
        yield fuzz.Target(f"{source} {name}", root / source / name, lambda source=source: read(source))


GROUPS = (dataset, checkpoint, small_state_files, tokenizers, tasks, exports)


@pytest.fixture(scope="module")
def targets(corpus, tokenizer_files, tmp_path_factory):
    found = []
    for group in GROUPS:
        root = tmp_path_factory.mktemp(group.__name__)
        found += group(root, corpus, tokenizer_files) if group is tokenizers else group(root, corpus)
    for target in found:
        content = target.file.read_bytes()
        target.read()  # unchanged, each can be read
        target.file.write_bytes(content)
    return found


def mutated(targets, seeds):
    counts, failures = Counter(), []
    for target in targets:
        for seed in seeds:
            outcome, description = fuzz.tried(target, seed)
            counts[target.name, outcome if outcome in ("refused", "read") else "failed"] += 1
            if outcome not in ("refused", "read"):
                failures.append(f"{description} -> {outcome}")
    for (name, outcome), count in sorted(counts.items()):
        print(f"{name:40} {outcome:8} {count}")
    print(f"seeds {seeds[0]} to {seeds[-1]} of {len(targets)} targets: {sum(counts.values())} mutations")
    return failures


def test_some_mutations_end_in_one_line_or_work(targets):
    failures = mutated(targets, (0, 20, 22, 23, 26))  # 0 is a FIFO, 20 a link to an endless device
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_many_mutations_end_in_one_line_or_work(targets):
    failures = mutated(targets, range(100, 100 + -(-SEEDS // len(targets))))
    assert not failures, f"{len(failures)}:\n" + "\n".join(failures[:40])


def test_the_fuzz_finds_what_is_planted(tmp_path):
    """A reader that trusts its file: tracebacks and a stranger's setting are caught."""
    file = tmp_path / "file.json"
    file.write_text(json.dumps({"steps": 3, "config": {"run": {"directory": "x"}}}))

    def read():
        tree = json.loads(file.read_bytes())
        assert fuzz.STRANGER not in json.dumps(tree)
        tree["config"]["run"]["directory"] * tree["steps"]

    outcomes = Counter()
    for seed in range(20, 200):
        if seed % 20 < 2:
            continue  # this reader would wait for ever
        outcome, _ = fuzz.tried(fuzz.Target("trusting", file, read), seed)
        outcomes[outcome.partition(":")[0]] += 1
    assert {"JSONDecodeError", "KeyError", "TypeError", "AssertionError", "read"} <= outcomes.keys(), outcomes
