"""scripts/harness.py with the package lm_eval: its numbers are those of our own functions on the same files."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.data.tokenizer_files import BYTE_SYMBOLS, write_gpt2
from support.hf.hf_runs import tree as tree_of
from support.hf.hf_runs import write_run, write_vocabulary
from support.hf.published import random_model
from support.project import ROOT
from support.tasks.tasks import write_lines

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.settings import merge
from data_utils.tasks.readers.minimal_pairs import read_minimal_pairs
from megatron_lite.finetune import minimal_pairs
from megatron_lite.finetune.checkpoints import evaluate
from megatron_lite.finetune.harness import Harness, HarnessOptions
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.inference.open_run import load_run
from scripts import harness as script

pytest.importorskip(
    "lm_eval", reason="lm_eval is an extra of its own: pip install -r requirements-lm-eval.txt"
)

LENGTH, STRIDE = 40, 16
SAMPLES = 24


def words(rng, least, most):
    return " ".join(f"word{i}" for i in rng.integers(0, 60, rng.integers(least, most)))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Choices of one to three words, and texts that need several windows."""
    directory, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(4)
    choices = [
        {
            "inputs_pretokenized": words(rng, 3, 12),
            "choices_pretokenized": [words(rng, 1, 4) for _ in range(3)],
            "label": int(rng.integers(3)),
        }
        for _ in range(SAMPLES)
    ]
    texts = [{"text": words(rng, 20, 100)} for _ in range(6)]
    return write_lines(directory / "choices.jsonl", choices), write_lines(directory / "texts.jsonl", texts)


def write_tasks(directory, files):
    """lm_eval's form of the same tasks."""
    choices, texts = files

    def task(name, file, **more):
        data = {"data_files": {"test": file}, "cache_dir": str(directory / "cache")}
        common = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
        (directory / f"{name}.yaml").write_text(yaml.safe_dump({**common, **more}))

    directory.mkdir()
    page = (ROOT / "docs/lm_eval.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```yaml\n(task: own_choices\n.*?)^```", page, re.S | re.M)
    own = yaml.safe_load(example)
    own["dataset_kwargs"] |= {"data_files": {"test": choices}, "cache_dir": str(directory / "cache")}
    (directory / "own_choices.yaml").write_text(yaml.safe_dump(own))
    task(
        "own_last_words",
        texts,
        output_type="loglikelihood",
        doc_to_text="{{text.split()[:-1] | join(' ')}}",
        doc_to_target=" {{text.split()[-1]}}",
        metric_list=[{"metric": "perplexity"}, {"metric": "acc"}],
    )
    task(
        "own_texts",
        texts,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    )
    task(
        "own_answers",
        choices,
        output_type="generate_until",
        doc_to_text="{{inputs_pretokenized}}",
        doc_to_target="{{choices_pretokenized[0]}}",
        generation_kwargs={"until": ["word1"], "max_gen_toks": 4},
        metric_list=[{"metric": "exact_match"}],
    )


@pytest.fixture(scope="module")
def tasks(files, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tasks") / "tasks"
    write_tasks(directory, files)
    return directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    vocabulary = write_vocabulary(directory)
    for objective in ("blank_infilling", "causal", "prefix_lm", "masked_lm"):
        write_run(directory / objective, merge(tree_of(vocabulary), {"objectives": {objective: 1.0}}))
    return directory


def ask(monkeypatch, tmp_path, run, tasks, names, *options):
    """The results of a call, and how they came about."""
    arguments = ["--checkpoint", str(run), "--include-path", str(tasks), "--tasks", names]
    out = tmp_path / "numbers.json"
    monkeypatch.setattr("sys.argv", ["harness.py", *arguments, "--json", str(out), *options])
    script.main()
    found = json.loads(out.read_text())
    named = {
        task: {name.removesuffix(",none"): value for name, value in numbers.items()}
        for task, numbers in found["results"].items()
    }
    return named, found["harness"]


def measured(run, file, **task):
    section = {"name": "own", "sequence_length": LENGTH, "stride": STRIDE, "validation": [file], **task}
    (found,) = evaluate(run, {"task": section}, 5).files.values()
    return found.metrics


def test_a_table_and_remarks_are_printed(runs, tasks, tmp_path, monkeypatch, capsys):
    found, asked = ask(
        monkeypatch, tmp_path, runs / "causal", tasks, "own_*words,own_answers", "--limit", "3"
    )
    said = capsys.readouterr().out
    assert set(found) == {"own_last_words", "own_answers"} and "|own_last_words|" in said
    assert asked["requests"] == {"loglikelihood": 3, "loglikelihood_rolling": 0, "generate_until": 3}
    assert f"{asked['cut']} of 6 contexts" in said and asked["cut"] > 0


@pytest.mark.parametrize("objective", ["blank_infilling", "causal", "prefix_lm"])
def test_choices_and_texts_have_the_numbers_of_our_own(runs, files, tasks, tmp_path, monkeypatch, objective):
    (choices, texts), run = files, runs / objective
    size = ["--sequence-length", str(LENGTH), "--stride", str(STRIDE)]
    found, asked = ask(monkeypatch, tmp_path, run, tasks, "own_choices", "--score-end", *size)
    ours = measured(run, choices, kind="cloze", reader="jsonl", name="choices")
    assert found["own_choices"]["acc"] == ours["accuracy"] and 0 < ours["accuracy"] < 1
    assert asked["requests"]["loglikelihood"] == 3 * SAMPLES and not asked["cut"]

    found, _ = ask(monkeypatch, tmp_path, run, tasks, "own_texts", "--skip-first-token", *size)
    numbers = found["own_texts"]
    whole = [json.loads(line)["text"] for line in Path(texts).read_text().splitlines()]
    options = HarnessOptions(sequence_length=LENGTH, stride=STRIDE, first_token=False)
    nll = -sum(Harness(load_run(run), options).loglikelihood_rolling(whole))
    bits = nll / math.log(2) / sum(len(text.encode()) for text in whole)
    assert numbers["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert numbers["byte_perplexity"] == pytest.approx(2**bits, rel=1e-6)
    words = sum(len(text.split()) for text in whole)
    assert math.log(numbers["word_perplexity"]) * words == pytest.approx(nll, rel=1e-6)


@pytest.mark.parametrize("objective", ["blank_infilling", "causal", "prefix_lm"])
def test_last_words_have_the_numbers_of_our_own(runs, tmp_path, monkeypatch, objective):
    """Half of the texts end as the model would end them."""
    rng, run = np.random.default_rng(6), runs / objective
    contexts = [words(rng, 3, 20) for _ in range(10)]
    written = Harness(load_run(run)).generate_until([(text, {"max_gen_toks": 1}) for text in contexts])
    lines = [
        {"text": f"{context} {own if number % 2 else words(rng, 1, 2)}"}
        for number, (context, own) in enumerate(zip(contexts, written, strict=True))
    ]
    file = write_lines(tmp_path / "words.jsonl", lines)
    write_tasks(tmp_path / "tasks", (file, file))
    found, _ = ask(monkeypatch, tmp_path, run, tmp_path / "tasks", "own_last_words")
    pairs = [tuple(line["text"].rsplit(" ", 1)) for line in lines]
    ours = Harness(load_run(run)).loglikelihood([(context, f" {word}") for context, word in pairs])
    assert found["own_last_words"]["acc"] == np.mean([is_likeliest for _, is_likeliest in ours])
    assert (
        found["own_last_words"]["acc"] > 0 or objective == "prefix_lm"
    )  # whose likeliest token is a special one
    perplexity = math.exp(-np.mean([nats for nats, _ in ours]))
    assert found["own_last_words"]["perplexity"] == pytest.approx(perplexity, rel=1e-6)


def test_an_export_has_the_same_numbers(runs, tasks, tmp_path, monkeypatch):
    run = runs / "blank_infilling"
    export_run(run, tmp_path / "export", ExportOptions())
    ours, theirs = (
        ask(monkeypatch, tmp_path, path, tasks, "own_texts,own_answers", "--gen-kwargs", "max_gen_toks=2")[0]
        for path in (run, tmp_path / "export")
    )
    assert ours["own_texts"] == theirs["own_texts"] and ours["own_answers"] == theirs["own_answers"]


def test_a_pseudo_log_likelihood_says_so(runs, tasks, tmp_path, monkeypatch, capsys):
    run = runs / "masked_lm"
    found, asked = ask(monkeypatch, tmp_path, run, tasks, "own_choices", "--num-fewshot", "0")
    assert 0 < found["own_choices"]["acc"] < 1 and "pseudo log likelihoods" in asked["note"]
    assert "Note: scores are pseudo log likelihoods" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="but a run of masked_lm gives no likelihood"):
        ask(monkeypatch, tmp_path, run, tasks, "own_texts")


def test_mistakes_of_tasks_are_one_line(runs, tasks, files, tmp_path, monkeypatch):
    cases = {
        "--tasks contains own_choice, which is not one of the 4 tasks found; did you mean own_choices?": "own_choice",
        "--tasks is empty": ", ",
    }
    for message, names in cases.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            ask(monkeypatch, tmp_path, runs / "causal", tasks, names)
    write_tasks(tmp_path / "absent", ("none.jsonl", "none.jsonl"))
    with pytest.raises(
        DataError, match=r"lm_eval cannot make the tasks \['own_texts'\]: .*correct their files"
    ):
        ask(monkeypatch, tmp_path, runs / "causal", tmp_path / "absent", "own_texts")
    with pytest.raises(ConfigError, match=r"settings are given \(a.b=1\), but the run"):
        ask(monkeypatch, tmp_path, runs / "causal", tasks, "own_texts", "a.b=1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="--include-path"):
        ask(monkeypatch, tmp_path, runs / "causal", tmp_path / "empty", "own_texts")


def test_the_example_of_the_page_runs(runs, tasks, monkeypatch, capsys):
    """It asks what the command asks."""
    page = (ROOT / "docs/lm_eval.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    code = example.replace("runs/glm", str(runs / "blank_infilling")).replace('"tasks"', repr(str(tasks)))
    namespace: dict = {}
    exec(compile(code, "docs/lm_eval.md", "exec"), namespace)
    score, result = capsys.readouterr().out.split("\n")[:2]
    assert score.startswith("[(-") and "'acc,none': " in result


def test_gpt2_has_the_numbers_of_lm_evals_own_model(tmp_path):
    """Of whole texts in one window and of texts without a context, which begin with eos on both sides."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from megatron_lite.finetune.lm_eval_model import CheckpointLM

    names = [*BYTE_SYMBOLS, *(f"a{i}" for i in range(40)), "<|endoftext|>"]
    (tmp_path / "gpt2").mkdir()
    write_gpt2(tmp_path / "gpt2", {name: i for i, name in enumerate(names)}, [])
    random_model("gpt2", vocab_size=len(names)).save_pretrained(tmp_path / "gpt2")
    tree = {"training": {"steps": 1}, "data": {"sequence_length": 60}, "objectives": {"causal": 1}}
    import_directory(tmp_path / "gpt2", tmp_path / "run", tree)
    theirs = HFLM(pretrained=str(tmp_path / "gpt2"), device="cpu", batch_size=2)
    ours = CheckpointLM(Harness(load_run(tmp_path / "run")))
    texts = ["The quick brown fox", "jumps over", "a lazy dog."]
    for kind, arguments in (
        ("loglikelihood", [("", text) for text in texts]),
        ("loglikelihood_rolling", [(text,) for text in texts]),
    ):
        requests = [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]
        found, expected = (np.array(getattr(model, kind)(requests)) for model in (ours, theirs))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_minimal_pairs_have_the_accuracy_of_lm_evals_own_model(tmp_path):
    """A task in the words of lm_eval's blimp, on its model of transformers and here: every digit of every score."""
    import lm_eval.models.huggingface  # noqa: F401  registers its model
    from lm_eval import simple_evaluate
    from support.hf.published_files import write_directory

    from megatron_lite.finetune.lm_eval_model import LocalTasks

    write_directory("gpt2", tmp_path / "original")
    import_directory(tmp_path / "original", tmp_path / "run", {})
    rng = np.random.default_rng(2)
    lines = [
        {"sentence_good": words(rng, 3, 9), "sentence_bad": words(rng, 3, 9), "UID": "own"} for _ in range(40)
    ]
    lines += [{**line, "sentence_bad": line["sentence_good"]} for line in lines[:3]]  # as in BLiMP
    file = write_lines(tmp_path / "own.jsonl", lines)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    data = {"data_files": {"test": str(file)}, "cache_dir": str(tmp_path / "cache")}
    task = {
        "task": "own_pairs", "dataset_path": "json", "dataset_kwargs": data, "test_split": "test",
        "output_type": "multiple_choice", "doc_to_text": "", "doc_to_target": 0,
        "doc_to_choice": "{{[sentence_good, sentence_bad]}}", "num_fewshot": 0, "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tasks / "own_pairs.yaml").write_text(yaml.safe_dump(task))
    theirs = simple_evaluate(
        model="hf", model_args=f"pretrained={tmp_path / 'original'},dtype=float32", tasks=["own_pairs"],
        device="cpu", batch_size=1, task_manager=LocalTasks(include_path=tasks, include_defaults=False),
        bootstrap_iters=0,
    )  # fmt: skip
    harness = Harness(load_run(tmp_path / "run"))
    pairs = read_minimal_pairs(Path(file))
    found = minimal_pairs.measure(harness, pairs, "left-to-right")
    assert 0 < found.paradigms[0].accuracy < 1
    assert theirs["results"]["own_pairs"]["acc,none"] == found.paradigms[0].accuracy
    scores = minimal_pairs.scored(
        harness, [text for pair in pairs for text in (pair.good, pair.bad)], "left-to-right"
    )
    expected = [
        response[0] for sample in theirs["samples"]["own_pairs"] for response in sample["filtered_resps"]
    ]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
