"""The page as text: what it says of a run, and what it says when parts of a run are missing."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
import yaml
from support.commands import forked
from support.distributed import run_ranks
from support.project import small_run
from support.training.report_runs import fit_and_fill, hostile_run, interrupted, train, write_records

from data_utils.common.errors import CheckpointError, ConfigError, DataError
from data_utils.common.settings import merge
from megatron_lite.report.charts import linear_scale, logarithmic_scale
from megatron_lite.report.facts import facts
from megatron_lite.report.page import page
from megatron_lite.report.run import read_run
from megatron_lite.telemetry.records import read_metrics
from scripts import checkpoints
from scripts.report import main


@pytest.fixture(scope="module")
def real_run(corpus, tmp_path_factory):
    """A run that was stopped and continued."""
    directory = tmp_path_factory.mktemp("reported") / "run"
    for tree in interrupted(small_run(corpus, directory)):
        run_ranks(fit_and_fill, 1, tree)
    return directory


class Reader(HTMLParser):
    """The text of the page, and its elements."""

    def __init__(self, text):
        super().__init__()
        self.names, self.attributes, self.words, self.open = [], [], [], []
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, name, attributes):
        self.names.append(name)
        self.attributes += attributes
        if name != "meta":
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words.append(data)


def read(*runs):
    reader = Reader(page([read_run(run) for run in runs], 1.7e9))
    assert reader.open == []
    return reader


def test_a_real_run_is_shown(real_run):
    found = read(real_run)
    for part in (
        "step 6 of 6", "objective blank_infilling training data corpus_train tokenizer bert_wordpiece, vocab.txt",
        "sequence length 64 batch, samples 8 peak learning rate 0.003", "validation loss",
        "restarts 1", "started, processes 1: pipeline 1 x data 1 x tensor 1",
        "resumed from step 3 (restart 1)", "training.eval_interval 2 1000", "data waiting time, share",
        "corpora", "step 2", "original", "train", "6 2", "MiB in 1 files", "learning rate", "gradient norm",
    ):  # fmt: skip
        assert part.lower() in found.text.lower(), part
    assert "cannot be compared" not in found.text and "model.num_layers 2 -" in found.text
    assert (
        "optimizer.eps" not in found.text.partition("Full configuration")[0]
        and found.text.count("lowest") >= 4
    )
    assert found.names.count("figure") >= 8 and "script" not in found.names


def test_phases_have_a_table(real_run, tmp_path):
    """Two phases of 4 and 2 steps: the run has trained 5 of them, at 1000 tokens a second."""
    tree = yaml.safe_load((real_run / "config.yaml").read_text())
    size, length = tree["batch"]["global_batch_size"], tree["data"]["sequence_length"]
    changed = merge(tree, {"phases": [{"steps": 4}, {"sequence_length": length // 2}]})
    run = write_records(tmp_path / "run", [train(step) for step in range(1, 6)])
    (run / "config.yaml").write_text(yaml.safe_dump(changed))
    text = read(run).text.partition("Phases")[2].partition("Corpora")[0]
    first, second = text.index("1: as the run"), text.index(f"2: sequence_length {length // 2}")
    one, two = text[first:second], text[second:]
    assert f"1 to 4 4 {4 * size * length:,}" in one and f"5 to 6 1 {2 * size * (length // 2):,}" in two
    for part, tokens in ((one, 4 * size * length), (two, size * (length // 2))):
        assert "corpus" in part and "times" in part and f"1,000 {tokens // 1000}s" in part, part
    assert "Phases" not in read(real_run).text


def test_fillings_are_recorded_at_each_evaluation(real_run):
    records = read_run(real_run).records.fillings
    assert [record["step"] for record in records] == [2, 4, 6]
    for record in records:
        assert len(record["fillings"]) == 2
        for item in record["fillings"]:
            blanks = len(re.findall(r"___\d+___", item["text"]))
            assert 1 <= blanks == len(item["originals"]) == len(item["answers"]) <= 8
        assert record["blanks"] == sum(len(item["originals"]) for item in record["fillings"])
        words = [
            [text for item in record["fillings"] for text in item[key]] for key in ("originals", "answers")
        ]
        assert record["exact"] == sum(map(str.__eq__, *words))
    same = [[(item["text"], item["originals"]) for item in record["fillings"]] for record in records]
    assert same[0] == same[1] == same[2]  # the same blanks every time


def test_several_runs_are_side_by_side(real_run, tmp_path):
    other = write_records(tmp_path / "other", [train(1), train(2)])
    config = yaml.safe_load((real_run / "config.yaml").read_text())
    config["optimizer"]["lr"] = 0.25
    config["another_version"] = {"setting": 7}
    config["trackers"]["mlflow"] = {"uri": "https://me:secret@host.example/mlflow"}
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    found = read(real_run, other)
    assert "optimizer.lr 0.003 0.25 0.0001" in found.text
    assert "another_version.setting - 7 -" in found.text
    assert "https://me:***@host.example/mlflow" in found.text and "secret" not in found.text
    assert any("run1" in str(value) for name, value in found.attributes if name == "class")


def test_texts_of_a_run_never_become_markup(tmp_path):
    found = read(hostile_run(tmp_path))
    assert not {"script", "img"} & set(found.names)
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert found.text.count("<img src=http://example.invalid/x") > 10 and not {"\u202e", "\0"} & set(
        found.text
    )
    assert not {"src", "href", "style", "srcset", "action"} & {name for name, _ in found.attributes}


def damaged(run, name, content):
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


DAMAGED = {
    "no configuration": (None, b"", "config.yaml: No such file"),
    "no YAML": ("config.yaml", b"a: [", "is not valid YAML"),
    "a size is missing": ("config.yaml", b"model: {num_layers: 1}", "config.yaml has no model sizes"),
    "no section": ("config.yaml", b"model: 3", "config.yaml has no model sizes"),
    "a wrong size": (
        "config.yaml",
        b"{model: {num_layers: 0, hidden_size: 4, num_attention_heads: 2}, training: {steps: 3}}",
        "model.num_layers is 0",
    ),
    "no mapping": ("config.yaml", b"[1]", "must hold a mapping"),
    "no losses": ("unigram.json", b'{"loss": []}', "unigram.json cannot be read"),
    "no checkpoint": ("checkpoints/step_00000001/manifest.json", b"{", "manifest.json is not valid JSON"),
    "a file among checkpoints": ("checkpoints/step_00000001", b"", "manifest.json: Not a directory"),
    "a file for checkpoints": ("checkpoints", b"", "step 2"),
    "deep manifest": (
        "checkpoints/step_00000001/manifest.json",
        b"[" * 10**5,
        "manifest.json is nested deeper than 40 levels",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_part_is_a_note_on_the_page(name, tmp_path):
    file, content, note = DAMAGED[name]
    run = write_records(tmp_path / "run", [train(1), train(2)])
    if file is not None:
        damaged(run, file, content)
    found = read(run)
    assert note in found.text and "trained step 2" in found.text


def test_a_run_without_a_step_is_shown(tmp_path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    found = read(tmp_path / "run")
    assert "no curves" in found.text and "figure" not in found.names


def test_the_command_writes_the_page(real_run, tmp_path, capsys):
    main([str(real_run), "--output", str(tmp_path / "page.html")])
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and len(text) < 300_000
    with pytest.raises(CheckpointError, match="does not exist; give the directory of a run"):
        main([str(tmp_path / "absent")])
    with pytest.raises(CheckpointError, match="holds no run and no checkpoint; give the directory"):
        main([str(tmp_path)])
    with pytest.raises(ConfigError, match="9 runs are given"):
        main([str(real_run)] * 9)
    with pytest.raises(DataError, match="is a directory; give the name of a file"):
        main([str(real_run), "--output", str(tmp_path)])


def test_scales_have_round_ticks_and_hold_their_values():
    for low, high in (
        (5.1, 6.9),
        (0, 1234),
        (-3, 3),
        (7, 7),
        (0, 0),
        (1e-9, 2e-9),
        (-1e300, 1e300),
        (1e-320, 2e-320),
    ):
        scale = linear_scale(low, high)
        assert 2 <= len(scale.ticks) <= 13 and scale.low <= low and scale.high >= high
        assert 0 <= scale.height(low) <= scale.height(high) <= 1
    assert linear_scale(5.1, 6.9).ticks == (5.0, 5.5, 6.0, 6.5, 7.0)
    scale = logarithmic_scale(0.3, 92)
    assert scale.ticks == (0.1, 1.0, 10.0, 100.0) and scale.height(10.0) == pytest.approx(2 / 3)


@pytest.mark.parametrize("changed", ["loss", "time", "lr"])
def test_numbers_near_the_largest_count_as_infinite(tmp_path, changed):
    """Their sums and differences are infinite."""
    values = [1e308, -1e308, 2.0, 1.7e308, 5e-324, 3.0]
    records = [{**train(step), changed: value} for step, value in enumerate(values, 1)]
    found = read(write_records(tmp_path / "run", records))
    assert "e+308" not in found.text
    assert forked("scripts/report.py", tmp_path / "run", "--plot").returncode == 0


def shown(run, name):
    """A row of the overview."""
    return dict(facts(read_run(run))).get(name)


def test_figures_are_of_the_step_they_are_shown_with(tmp_path):
    """The last record of a step may be older than the last one of all, as an evaluation's."""
    records = [
        train(80, consumed_tokens=8000),
        {"kind": "validation", "step": 90, "time": 1.7e9, "loss": 5.0},
    ]
    run = write_records(tmp_path / "run", records)
    assert shown(run, "trained") == "step 90" and shown(run, "training tokens") == "8,000 at step 80"
    write_records(run, [train(80, consumed_tokens=8000), train(90, consumed_tokens=9000)])
    assert shown(run, "training tokens") == "9,000"


def test_a_rewound_run_is_at_its_step(real_run, tmp_path, capsys):
    """Before and after it is started again, and also for the other readers of its records."""
    run = tmp_path / "run"
    shutil.copytree(real_run, run)
    assert shown(run, "trained") == "step 6 of 6"
    for _ in range(2):  # the second call finds nothing to move
        checkpoints.rewind(run, 3)
    assert shown(run, "trained") == "step 3 of 6" and read_metrics(run)[-1]["step"] == 3
    assert max(record["step"] for record in read_metrics(run) if record["kind"] == "train") <= 3
    capsys.readouterr()


def test_the_share_matches_its_curve(tmp_path):
    """The machine's rate is measured again during the run, so shares of the last one would be others."""
    records = [
        train(1, tflops_per_device=0.1, machine_share=0.4, machine_tflops=0.25),
        train(2, tflops_per_device=0.1, machine_share=0.2, machine_tflops=0.5),
    ]
    found = shown(write_records(tmp_path / "run", records), "share of the measured peak, mean")
    assert found == "30 %; peak measured during the run: 0.5 TFLOP/s per rank"


def test_time_without_pauses(tmp_path):
    def start(step, time):
        return {"kind": "start", "step": step, "time": time}

    records = [start(0, 100), train(1, time=160), train(2, time=220), start(2, 9000), train(3, time=9060)]
    run = write_records(tmp_path / "run", records)
    assert shown(run, "training time, pauses excluded") == "3m00s"


def test_scores_are_shown(tmp_path):
    records = [
        {"kind": "scores", "step": s, "time": 1.7e9, "score": s / 10, "accuracy": s / 10} for s in (5, 7, 6)
    ]
    run = write_records(
        tmp_path / "run",
        [train(1, **{"loss/votes": 4.999}), *sorted(records, key=lambda record: record["step"])],
    )
    (run / "scores.json").write_text(
        '{"model": {"exact match": 0.25}, "5-gram": {"exact match": 0.125, "nats": 2.5}}'
    )
    (run / "results.json").write_text(
        '{"seed": 1, "files": {"test.jsonl": {"samples": 2, "metrics": {"f1": 0.5}}}}'
    )
    classifier = {
        "name": "votes",
        "kind": "classification",
        "train": "data/votes.jsonl",
        "sequence_length": 96,
    }
    (run / "config.yaml").write_text(
        yaml.safe_dump({"task": classifier, "optimizer": {"lr": 0.003}, "batch": {"global_batch_size": 16}})
    )
    found = read(run)
    assert "score 0.7000, best 0.7000 at step 7" in found.text
    # One chart of the loss and one of the score, named as what they are.
    assert found.text.count("Loss, nats per sample") == 1 and "nats per token" not in found.text
    charts = found.text.partition("Loss, nats")[2].partition("Optimization")[0]
    assert "votes" in charts and "all objectives" not in charts and charts.count("accuracy") == 1
    scores = charts.partition("Scores")[2]
    assert "highest 0.7" in scores and "lowest" not in scores
    assert "unigram" not in found.text and "Dashed vertical" not in found.text
    overview = "task votes (classification) training data votes.jsonl sequence length 96 batch, samples 16"
    assert f"{overview} peak learning rate 0.003" in found.text
    assert "model 5-gram test.jsonl" in found.text and "exact match 0.25 0.125 -" in found.text
    assert "nats - 2.5 -" in found.text and "f1 - - 0.5" in found.text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("scores.json", b"{"),
        ("scores.json", b'{"model": {"nats": "x"}}'),
        ("results.json", b"[1]"),
        ("results.json", b'{"files": {"a": {}}}'),
    ],
)
def test_damaged_scores_are_a_note(name, content, tmp_path):
    run = write_records(tmp_path / "run", [train(1)])
    (run / name).write_bytes(content)
    assert f"{name} " in read(run).text and "recreate it" in read(run).text


def pair_scores(names, accuracy=0.625, error=0.03125):
    """The form of scripts/evaluate.py's --json, of two phenomena."""
    figures = {"accuracy": accuracy, "standard_error": error, "pairs": 8, "ties": 0}
    phenomena = {name: {**figures, "accuracy": 0.75} for name in ("agreement", "binding")}
    return {"score": "blanks", **figures, "phenomena": phenomena, "paradigms": dict.fromkeys(names, figures)}


@pytest.mark.parametrize("paradigms", [67, 3])
def test_minimal_pairs_are_shown_beside_published_means_of_the_whole_benchmark(paradigms, tmp_path):
    run = write_records(tmp_path / "run", [train(1)])
    names = [f"p{i}" for i in range(paradigms)]
    scores = {"phase_1": pair_scores(names), "phase_2": pair_scores(names, accuracy=0.6875, error=None)}
    for name, tree in scores.items():
        (run / f"minimal_pairs_{name}.json").write_text(json.dumps({str(run): tree}))
    found = read(run)
    plus_minus = "\N{PLUS-MINUS SIGN}"
    assert f"phase 1 phase 2 agreement 75.0 {plus_minus} 3.1 75.0 " in found.text
    assert f"all 62.5 {plus_minus} 3.1 68.8" in found.text
    assert f"phase 1, all: 62.5 {plus_minus} 3.1" in found.text  # of a bar
    assert ("GPT-2" in found.text and "83" in found.text) == (paradigms == 67)
    assert "Minimal pairs" not in read(write_records(tmp_path / "other", [train(1)])).text


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[1]",
        b'{"run": {"accuracy": 0.5}}',
        json.dumps({"run": pair_scores(["p"], accuracy=62.5)}).encode(),  # percent
    ],
)
def test_damaged_minimal_pairs_are_a_note_beside_the_others(content, tmp_path):
    run = write_records(tmp_path / "run", [train(1)])
    (run / "scores.json").write_text("{")
    (run / "minimal_pairs.json").write_bytes(content)
    (run / "minimal_pairs_other.json").write_text(json.dumps({"run": pair_scores(["p"])}))
    found = read(run).text
    assert "minimal_pairs.json" in found and "recreate it" in found and "scores.json" in found
    assert "other agreement 75.0" in found


def test_every_measurement_of_minimal_pairs_is_shown_or_counted(tmp_path):
    """Runs are often named run, and more measurements than there are colours are not drawn."""
    run = write_records(tmp_path / "run", [train(1)])
    path = run / "minimal_pairs.json"
    path.write_text(json.dumps({f"{name}/run": pair_scores(["p"]) for name in ("a", "b")}))
    assert "minimal pairs, a/run minimal pairs, b/run agreement" in read(run).text
    assert "measurements" not in read(run).text
    path.write_text(json.dumps({f"run/step_{number}": pair_scores(["p"]) for number in range(12)}))
    found = read(run).text
    assert "minimal pairs, step_11 agreement" in found and "The last 8 of 12 measurements." in found
