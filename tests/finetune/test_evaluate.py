"""scripts/evaluate.py: the numbers of the run itself, of other layouts, and of an export."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from support.commands import assert_refused, forked
from support.distributed import run_ranks
from support.tasks.tasks import votes, write_lines, write_task
from support.training.training import fit, records

from data_utils.common.settings import merge
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.finetune.checkpoints import evaluate
from megatron_lite.finetune.run import finetune
from megatron_lite.finetune.setup import load_tree, prepare
from megatron_lite.hf.export import ExportOptions, export_run
from scripts import evaluate as script


def learn(context, files, output, *overrides):
    tree = load_tree([files[0]], files[1], overrides)
    return finetune(prepare(merge(tree, {"run": {"directory": str(output)}})), output, context)


CLOZE = {"kind": "cloze", "template": "{text} It was [MASK] .", "verbalizers": {"0": "bad", "1": "good"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tensor-parallel run of two epochs, which does not know everything yet."""
    directory = tmp_path_factory.mktemp("evaluate")
    files = write_task(directory / "task", **CLOZE)
    parallel = {"tensor_parallel_size": 2}
    options = ["finetune.epochs=2", "parallel.tensor_parallel_size=2"]
    run_ranks(learn, 2, files, directory / "out", *options, parallel=ParallelConfig(**parallel))
    return directory


def the_numbers(output):
    (seed,) = json.loads((output / "results.json").read_text())["seeds"]
    return next(iter(seed["files"].values()))


def measured(path, tree):
    (found,) = evaluate(path, tree, 5).files.values()
    return found


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_has_the_numbers_of_its_run(run, tmp_path, capsys, monkeypatch):
    best = run / "out"
    arguments = [
        "evaluate.py",
        "--checkpoint",
        str(best),
        "--checkpoint",
        str(run / "out/seed_1234"),
        "--every-step",
    ]
    outputs = [
        "--json",
        str(tmp_path / "a.json"),
        "--predictions",
        str(tmp_path / "p"),
        "--plot",
        str(tmp_path / "a.png"),
    ]
    monkeypatch.setattr("sys.argv", [*arguments, *outputs, "--batch", "7"])
    script.main()
    found = json.loads((tmp_path / "a.json").read_text())
    assert next(iter(found[0]["files"].values())) == the_numbers(run / "out")
    assert [one["step"] for one in found[1:]] == [4, 8] and len(capsys.readouterr().out.splitlines()) == 6
    ours = (tmp_path / "p/0/votes.jsonl").read_text()
    assert ours == (run / "out/seed_1234/predictions/votes.jsonl").read_text()
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_an_export_has_the_same_answers(run, tmp_path):
    best = run / "out/seed_1234/best"
    export_run(best, tmp_path / "export", ExportOptions())
    tree = {"task": load_tree([], str(run / "task/task.yaml"), [])["task"]}
    card = (tmp_path / "export/README.md").read_text()
    accuracy = the_numbers(run / "out")["metrics"]["accuracy"]
    assert f"| validation.jsonl | 32 | accuracy | {accuracy:.4f} |" in card
    assert "Tuned on the task `votes` (cloze)" in card and "| 64 | `" in card
    ours, theirs = measured(best, tree), measured(tmp_path / "export", tree)
    assert ours.predictions == theirs.predictions and ours.metrics == theirs.metrics


@pytest.mark.parametrize("kind", ["classification", pytest.param("regression", marks=pytest.mark.slow)])
def test_a_head_is_exported_for_transformers_and_comes_back(tmp_path, kind):
    files = write_task(tmp_path / "task", train=32, kind=kind)
    if kind == "regression":
        for name in ("train", "validation"):
            path = tmp_path / f"task/{name}.jsonl"
            path.write_text(
                path.read_text()
                .replace('"label": "1"', '"label": 0.8')
                .replace('"label": "0"', '"label": 0.1')
            )
    run_ranks(learn, 1, files, tmp_path / "out", "finetune.epochs=2")
    best = tmp_path / "out/seed_1234/best"
    export_run(best, tmp_path / "export", ExportOptions())
    held_out = {"task": {"validation": [str(tmp_path / "task/validation.jsonl")]}}  # no path is exported
    ours, theirs = measured(best, {}), measured(tmp_path / "export", held_out)
    assert ours.predictions == pytest.approx(theirs.predictions) and ours.metrics == pytest.approx(
        theirs.metrics
    )
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "export", trust_remote_code=True
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export", trust_remote_code=True)
    texts = [line["text"] for line in votes(1, 32)]
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    if kind == "regression":
        assert logits[:, 0].tolist() == pytest.approx(ours.predictions, abs=1e-5)
    else:
        assert [model.config.id2label[i] for i in logits.argmax(-1).tolist()] == ours.predictions
        classify = pipeline("text-classification", model=str(tmp_path / "export"), trust_remote_code=True)
        assert [found["label"] for found in classify(texts)] == ours.predictions


def test_another_task_and_a_file_without_labels(run, tmp_path):
    lines = [{"text": line["text"]} for line in votes(5, 9)]
    test = write_lines(tmp_path / "test.jsonl", lines)
    found = measured(run / "out/seed_1234/best", {"task": {"validation": [], "test": [test]}})
    assert found.metrics == {} and len(found.predictions) == 9


def test_mistakes_are_one_line(run, tmp_path, monkeypatch, capsys):
    best = str(run / "out/seed_1234/best")
    cases = {
        "no checkpoint given": [],
        "does not exist; give a run": ["--checkpoint", str(tmp_path / "none")],
        # Whatever else is wrong with the task: its files are not there either.
        "has no head, but a task of kind classification needs one for classes": [
            *("--checkpoint", best, "task.kind=classification", "task.validation=['none.jsonl']")
        ],
        "--predict needs a place for its predictions": ["--checkpoint", best, "--predict", "a.jsonl"],
        "names no file to evaluate on": ["--checkpoint", best, "task.validation=[]"],
        "--batch is 0": ["--checkpoint", best, "--batch", "0"],
        "--plot is 'x.txt'; its name must end in .png": ["--checkpoint", best, "--plot", "x.txt"],
        "task is None; it must be a section": ["--checkpoint", best, "task=null"],
        "empty.yaml has no section task": ["--checkpoint", best, "--task", str(tmp_path / "empty.yaml")],
        "has its own model": ["--checkpoint", best, "model.num_layers=7"],
        "a path must not be empty": ["--checkpoint", best, "--json", ""],
        "so there is nothing to plot": [
            *("--checkpoint", best, "--plot", str(tmp_path / "a.png"), "task.validation=[]"),
            f"task.test=['{write_lines(tmp_path / 'unlabelled.jsonl', [{'text': 'good'}])}']",
        ],
        "--predictions": ["--checkpoint", best, "--predictions", str(tmp_path / "empty.yaml" / "p")],
    }
    (tmp_path / "empty.yaml").touch()
    for message, arguments in cases.items():
        monkeypatch.setattr("sys.argv", ["evaluate.py", *arguments])
        with pytest.raises(SystemExit, match=r"^2$"):
            script.command()
        said = capsys.readouterr().err
        assert message in said and said.startswith("error: ") and said.count("\n") == 1


def test_a_moved_tokenizer_is_named(run, tmp_path):
    """The error says how to go on."""
    shutil.copytree(run / "out/seed_1234/best", tmp_path / "best")
    found = evaluate(tmp_path / "best", {}, 4, run / "task/vocab.txt")
    assert torch.tensor(list(next(iter(found.files.values())).metrics.values())).isfinite().all()


def test_a_plot_has_a_line_for_each_run_also_of_one_name(tmp_path, monkeypatch):
    """The last names of runs are often equal, of files also; $ and a first _ are text."""
    from matplotlib.axes import Axes

    legends, legend = [], Axes.legend
    monkeypatch.setattr(Axes, "legend", lambda *a, **k: legends.append(legend(*a, **k)) or legends[-1])

    def result(name, step, *files):
        found = {file: SimpleNamespace(metrics={"accuracy": 0.5}) for file in files}
        return SimpleNamespace(name=name, step=step, files=found)

    measured = [result(f"{run}/checkpoints/step_0000000{step}", step, "f") for run in "ab" for step in (1, 2)]
    script.plot(tmp_path / "a.png", measured)
    script.plot(tmp_path / "a.png", [result("a/run", 1, "f"), result("b/run", 1, "f")])
    script.plot(tmp_path / "a.png", [result("_a$\\foo$", 1, "x/f", "y/f")])
    labels = [[text.get_text().strip() for text in one.get_texts()] for one in legends]
    assert labels == [["a, f", "b, f"], ["a/run, f", "b/run, f"], ["_a$\\foo$, x/f", "_a$\\foo$, y/f"]]
    assert [len(line.get_xdata()) for line in legends[0].axes.get_lines()] == [2, 2]


def test_a_pretraining_run_has_the_validation_losses_of_its_record(settings, corpus, tmp_path):
    """To the last digit: of averaged weights, several objectives and corpora, after the training corpus is gone."""
    shutil.copytree(corpus, tmp_path / "gone")
    prefixes = [str(corpus / "corpus_validation"), str(corpus / "corpus_train")]
    changes = {
        "data": {
            "train": [{"prefix": str(tmp_path / "gone/corpus_train")}],
            "validation": [
                {"prefix": prefix, "weight": 1 + number} for number, prefix in enumerate(prefixes)
            ],
        },
        "objectives": {"masked_lm": 1.0, "causal": 2.0},
        "training": {"steps": 4, "loss_normalization": "per_objective", "eval_samples": 12},
        "model": {"max_position": 80},
        "ema": {"decay": 0.5, "use": True},
    }
    run_ranks(fit, 1, merge(settings, changes))
    shutil.rmtree(tmp_path / "gone")
    expected = records(tmp_path / "run", "validation")[4]
    command = ["scripts/evaluate.py", "--checkpoint", tmp_path / "run", "--json", tmp_path / "a.json"]
    done = forked(*command)
    assert done.returncode == 0 and f"loss {expected['loss']:.4f}" in done.stdout, done.stderr
    (found,) = json.loads((tmp_path / "a.json").read_text())
    assert found["step"] == 4 and found["validation"]["all corpora"] == expected
    assert list(found["validation"]) == ["all corpora", *prefixes]
    done = forked(*command, f"data.validation=[{{prefix: {prefixes[0]}}}]")  # other data
    (other,) = json.loads((tmp_path / "a.json").read_text())
    assert other["validation"] == {"all corpora": found["validation"][prefixes[0]]}, done.stderr
    # Settings of the losses of pretraining are not about a task, and what the checkpoint is comes before all of them.
    pair = {"name": "own", "kind": "seq2seq", "reader": "jsonl", "form": "causal", "target_length": 4}
    pair |= {"sequence_length": 32, "validation": [str(tmp_path / "pairs.jsonl")]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"src": "word1 word2", "tgt": "word3"}) + "\n")
    (tmp_path / "task.yaml").write_text(json.dumps({"task": pair}))
    done = forked(*command, "--task", tmp_path / "task.yaml")
    assert done.returncode == 0 and "exact_match" in done.stdout, done.stderr
    done = forked(*command, "--task", "noisy_votes", "task.kind=classification")
    assert_refused(done, "has no head, but a task of kind classification needs one for classes")
