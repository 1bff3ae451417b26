"""Every kind of task with every metric: the value of an independent reference, or one line at the start."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import Counter

import numpy as np
import pytest
import sacrebleu
import torch
from support.tasks.task_inputs import renderer
from support.tasks.tasks import task_of, write_lines, write_task

from data_utils.common.errors import ConfigError, DataError
from data_utils.tasks.base import TaskRecord
from data_utils.tasks.metrics.metrics import BLEU, KNOWN, measure
from data_utils.tasks.metrics.metrics_by_task import (
    WITH_POSITIVE,
    Metrics,
    check_metrics,
    task_metrics,
)
from megatron_lite.finetune.evaluation import Evaluation, EvaluationResult, Model
from megatron_lite.finetune.run import little_learnt, write_file_predictions
from megatron_lite.parallel.context import ParallelContext

METRICS = sorted(KNOWN)
RIGHT, FOUND = ["no", "yes", "yes", "no"], ["no", "yes", "no", "no"]
# tp 1, fp 0, fn 1, tn 2 of the second class
OF_LABELS = {
    "accuracy": 3 / 4,
    "f1": 2 / 3,
    "f1a": 2 / 3,
    "macro_f1": (2 / 3 + 4 / 5) / 2,
    "matthews": 2 / math.sqrt(1 * 2 * 2 * 3),
    "group_em": 3 / 4,
}
OF_CLASSES = OF_LABELS | {"micro_f1": 2 / 3}  # without "no": 1 right, 1 predicted, 2 there
ANSWERED = ["cold rain falls", "wet street"], ["cold rain falls", "cold street"]
CONTEXT = "cold rain falls in the cold street of the wet street"


def records(labels, **fields):
    return [
        TaskRecord(n, {name: values[n] for name, values in fields.items()}, label, None, f"data:{n}")
        for n, label in enumerate(labels)
    ]


def one_hot(numbers, count):
    return [np.eye(count)[number][None] for number in numbers]


def of_parts(numbers, count):
    """Answers of choices: the log probability of each part, and no flag."""
    return [np.stack([np.log(np.eye(count)[number] + 0.1), np.zeros(count)], 1) for number in numbers]


def spans_of(made, given, found):
    """Outputs whose largest sum is at an answer's first and last token."""
    answers = []
    for record, text in zip(given, found, strict=True):
        _, places = made.inputs.tokenizer.encode_with_offsets(record.fields["context"])
        start = record.fields["context"].index(text)
        rows = np.zeros((len(places) + 1, 2))
        rows[1 + [begin for begin, _ in places].index(start), 0] = 5.0
        rows[1 + [end for _, end in places].index(start + len(text)), 1] = 5.0
        answers.append(rows)
    return answers


def references_of_texts(right, found):
    """F of words and letters, and of their pairs and longest common sequences; BLEU by sacrebleu's class."""

    def f(a, b, size=1):
        a, b = ([tuple(x[i : i + size]) for i in range(len(x) - size + 1)] for x in (a, b))
        both = sum((Counter(a) & Counter(b)).values())
        return 2 * both / (len(a) + len(b)) if a and b else 0.0

    def longest(a, b):
        table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
        return 2 * table[-1][-1] / (len(a) + len(b))

    def mean(score, cut):
        return statistics.mean(score(cut(a), cut(b)) for a, b in zip(right, found, strict=True))

    expected = {"exact_match": mean(lambda a, b: float(a == b), str.split)}
    expected |= {"answer_em": expected["exact_match"], "answer_f1": mean(f, str.split)}
    expected |= {f"{name}_v2": expected[name] for name in ("answer_em", "answer_f1")}
    for end, cut in (("", str.split), ("_char", lambda text: list(text.replace(" ", "")))):
        expected["rouge1" + end] = mean(f, cut)
        expected["rouge2" + end] = mean(lambda a, b: f(a, b, 2), cut)
        expected |= dict.fromkeys(("rougeL" + end, "rougeLsum" + end), mean(longest, cut))
    for name, options in BLEU.items():
        expected[name] = sacrebleu.metrics.BLEU(**options).corpus_score(found, [right]).score
    return expected


def classes():
    made = renderer(name="own", kind="classification", labels=("no", "yes"))
    given = records(RIGHT, text_a=["rain"] * 4)
    return made, given, one_hot([0, 1, 0, 0], 2), OF_CLASSES


def three_classes():
    made = renderer(name="own", kind="classification", labels=("maybe", "no", "yes"), positive="yes")
    given = records(RIGHT, text_a=["rain"] * 4)
    return made, given, one_hot([1, 2, 1, 1], 3), OF_CLASSES


def cloze():
    words = {"no": "no", "yes": "yes"}
    made = renderer(template="{text_a} [MASK]", verbalizers=words, labels=("no", "yes"))
    given = records(RIGHT, text_a=["rain"] * 4)
    return made, given, of_parts([0, 1, 0, 0], 2), OF_CLASSES


def label_sets():
    """Precisions of the samples 1, 1/2, 0, 0, recalls 1/2, 1, 0, 0; 2 of 3 predicted labels are right, 4 are there."""
    made = renderer(kind="typing", labels=("a", "b", "c"), marks={"mention": "and"})
    given = records([("a", "c"), ("b",), ("c",), ()], text=["rain"] * 4, mention=[(0, 4)] * 4)
    answers = [np.array([row]) for row in ([1.0, -1, -1], [-1, 0.1, 3], [-1, -1, 0.0], [-1, -1, -1])]
    expected = {"strict_accuracy": 1 / 4, "loose_micro_f1": 2 * 2 / (3 + 4), "loose_macro_f1": 3 / 8}
    return made, given, answers, expected


def choices():
    made = renderer(template="{inputs} [MASK]", positive="1")
    given = records([0, 1, 1, 0], inputs=["rain"] * 4, choices=[("falls", "runs")] * 4)
    return made, given, of_parts([0, 1, 0, 0], 2), OF_LABELS


def record_task():
    right, found = ANSWERED
    made = renderer(name="record", reader="superglue")
    fields = {"passage": [CONTEXT] * 2, "query": ["the @placeholder"] * 2}
    names = [tuple(sorted({*pair})) for pair in [("cold rain falls", "rain"), ("wet street", "cold street")]]
    given = records([(text,) for text in right], **fields, entities=names)
    numbers = [of.index(text) for of, text in zip(names, found, strict=True)]
    return made, given, of_parts(numbers, 2), references_of_texts(right, found)


def regression():
    right, found = [1.0, 2.0, 3.0, 5.0], [2.0, 1.0, 4.0, 3.0]
    made = renderer(kind="regression")
    expected = {
        "pearson": statistics.correlation(right, found),
        "spearman": statistics.correlation([1, 2, 3, 4], [2, 1, 4, 3]),
    }
    return made, records(right, text_a=["rain"] * 4), [np.array([[x]]) for x in found], expected


def written(kind, right, found, **fields):
    made = renderer(kind=kind, sequence_length=64)
    fields = {name: [value] * len(right) for name, value in fields.items()}
    return made, records(right, **fields), found, references_of_texts(right, found)


def seq2seq():
    return written("seq2seq", *ANSWERED, source="rain", target="cold")


def blanks():
    right, found = ANSWERED
    made = renderer(kind="blanks", blank_ratio=0.4)
    return made, records(right, text=right), found, references_of_texts(right, found)


def spans():
    right, found = ANSWERED
    made = renderer(kind="spans", question_length=8, answer_length=8)
    fields = {"question": ["what"] * 2, "context": [CONTEXT] * 2}
    given = records([(text,) for text in right], **fields, answers=[((t, CONTEXT.index(t)),) for t in right])
    return made, given, spans_of(made, given, found), references_of_texts(right, found)


def tagging(labels, right, numbers, expected):
    made = renderer(kind="tagging", labels=labels)
    given = records(right, words=[("rain",) * len(tags) for tags in right])
    return made, given, [np.eye(len(labels))[row] for row in numbers], expected


def entities():
    right = [("O", "B-PER", "I-PER"), ("B-PER", "O")]
    expected = {"entity_f1": 2 * 1 / (1 + 2), "tag_accuracy": 4 / 5}
    return tagging(("O", "B-PER", "I-PER"), right, [[0, 1, 2], [0, 0]], expected)


def parts_of_speech():
    right = [("NOUN", "VERB", "NOUN"), ("VERB", "NOUN")]
    return tagging(("NOUN", "VERB"), right, [[0, 1, 1], [1, 0]], {"tag_accuracy": 4 / 5})


KINDS = (
    *(classes, three_classes, cloze, choices, record_task, regression, seq2seq, blanks, spans),
    *(label_sets, entities, parts_of_speech),
)


# What answers that read no sample reach at best: the commonest of the labels above, or the frequencies of their tokens.
GUESSES = {
    **{kind: {"accuracy": 1 / 2, "matthews": 0.0} for kind in (classes, three_classes, cloze, choices)},
    **{kind: {"answer_em": 1 / 2, "answer_em_v2": 1 / 2} for kind in (record_task, spans)},
    seq2seq: {"exact_match": 1 / 2, "loss": math.log(2)},  # cold and an end, twice
    regression: {"pearson": 0.0, "spearman": 0.0},
    label_sets: {"strict_accuracy": 1 / 4, "loose_micro_f1": 2 * 3 / (8 + 4)},
    entities: {"tag_accuracy": 2 / 5, "entity_f1": 2 * 1 / (5 + 2)},
    parts_of_speech: {"tag_accuracy": 3 / 5},
    blanks: {"exact_match": 1 / 2},
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_run_that_learnt_nothing_is_told_by_every_metric_of_every_kind(kind, tmp_path):
    """A score that a guess reaches, and for correlations a negative one, gets words; the best one gets none."""
    made, given, *_ = kind()
    for metric, guess in GUESSES[kind].items():
        names = () if metric == "loss" else (metric,)
        config = dataclasses.replace(made.inputs.config, metrics=names)
        evaluation = Evaluation(config, made, given, ParallelContext.alone(), 8)
        found = [each[metric] for each in evaluation.guesses()]
        least = metric == "loss"
        assert (min if least else max)(found) == pytest.approx(guess), metric
        for name in ("records", "_samples"):  # many, so that chance explains little
            setattr(evaluation, name, getattr(evaluation, name) * 100)
        for value, told in ((guess, True), (-0.9, True), (guess / 2 if least else 1.0, False)):
            if least and value < 0:
                continue
            result = EvaluationResult({metric: value}, given, [], 0)
            said = little_learnt(Metrics((metric,)), {"data": evaluation}, {"data": result}, [])
            assert bool(said) == told, (metric, value)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_metric_of_a_type_matches_a_reference_or_refused_at_the_start(kind, monkeypatch):
    made, given, answers, expected = kind()
    task = made.inputs.config
    writes = task.writes_text
    monkeypatch.setattr(Evaluation, "_outputs", lambda self, *_: [] if writes else answers)
    monkeypatch.setattr(Evaluation, "_generate", lambda self, write: answers)
    for metric in METRICS:
        positive = task.positive if metric in WITH_POSITIVE else None
        negative = "no" if metric == "micro_f1" and metric in expected else None
        config = dataclasses.replace(task, metrics=(metric,), positive=positive, negative=negative)
        if metric not in expected:
            with pytest.raises(
                ConfigError, match=rf"names {metric}, but this task \(task.kind {task.kind}\)"
            ):
                check_metrics(config, made.prediction_type, made.labels)
            continue
        check_metrics(config, made.prediction_type, made.labels)
        evaluation = Evaluation(config, made, given, ParallelContext.alone(), 8)
        write = (lambda contexts: []) if writes else None
        measured = evaluation.run(Model(lambda batch: None, write)).metrics
        assert measured[metric] == pytest.approx(expected[metric]), metric


@pytest.mark.parametrize(
    "kind", [classes, three_classes, label_sets, cloze, choices, record_task, regression]
)
def test_predictions_come_with_the_share_of_each_class(kind, monkeypatch, tmp_path):
    made, given, answers, _ = kind()
    monkeypatch.setattr(Evaluation, "_outputs", lambda *_: answers)
    config = dataclasses.replace(made.inputs.config, metrics=())
    found = Evaluation(config, made, given, ParallelContext.alone(), 8).run(Model(lambda batch: None))
    write_file_predictions(tmp_path, config, {"data": found}, "--output")
    (file,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["label"] for line in lines] == found.predictions
    if kind in (record_task, regression):
        assert not any("scores" in line for line in lines)
        return
    for line, scores in zip(lines, answers, strict=True):
        if kind is label_sets:
            assert list(line["scores"].values()) == pytest.approx(
                torch.tensor(scores[0]).sigmoid().tolist(), abs=1e-4
            )
            assert [name for name, share in line["scores"].items() if share > 0.5] == line["label"]
            continue
        raw = scores[:, 0] if kind in (cloze, choices) else scores[0]
        expected = torch.tensor(raw).softmax(0).tolist()
        shares = line["scores"] if kind is choices else list(line["scores"].values())
        assert shares == pytest.approx(expected, abs=1e-4)
        names = range(2) if kind is choices else list(line["scores"])
        assert names[int(np.argmax(shares))] == line["label"]


def test_f1_needs_to_know_its_class():
    made = classes()[0]
    for labels, answers, positive, message in (
        (("a", "b", "c"), "classes", None, "task.positive is null; set it to one of a, b, c"),
        ((), "numbers of choices", None, "set it to the index of a choice, from 0"),
        (("a", "b"), "classes", "d", "task.positive is 'd'; it must be one of a, b"),
        ((), "numbers of choices", "b", "task.positive is 'b'; it must be the index of a choice"),
    ):  # fmt: skip
        task = renderer(kind="classification", labels=("a", "b"), metrics=("f1",), positive=positive).inputs
        with pytest.raises(ConfigError, match=message):
            check_metrics(task.config, answers, labels)
    task = renderer(kind="classification", labels=("no", "yes"), positive="yes").inputs.config
    with pytest.raises(ConfigError, match=r"task.positive is 'yes', but no metric of the task"):
        check_metrics(task, made.prediction_type, made.labels)


def test_a_score_weighs_bleu_as_the_other_metrics():
    made = renderer(kind="seq2seq", metrics=("bleu", "exact_match"))
    score = task_metrics(made.inputs.config).score
    assert score({"bleu": 40.0, "exact_match": 0.1}) == pytest.approx(0.25)
    assert score({"bleu": 30.0, "exact_match": 0.3}) > score({"bleu": 40.0, "exact_match": 0.1})


@pytest.mark.parametrize("name", ["pearson", "spearman"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none_have_no_correlation(name, bad):
    with pytest.raises(DataError, match=rf"value 1 is {bad}; a correlation needs finite numbers"):
        measure([name], [1.0, bad, 2.0], [1.0, 2.0, 3.0])


def test_answers_of_a_model_that_has_diverged_are_reported(monkeypatch):
    made, given, *_ = classes()

    def answer(batch):
        return torch.full((len(given), 2), math.nan), torch.zeros(len(given))

    evaluation = Evaluation(made.inputs.config, made, given, ParallelContext.alone(), 8)
    with pytest.raises(DataError, match=r"predicts NaN for sample 0.*precision=bf16.*lower optimizer.lr"):
        evaluation.run(Model(answer))


def question(answers, **more):
    return {"question": "film", "context": "good film bad plot", "answers": answers, **more}


def test_questions_without_an_answer_choose_their_metrics_or_are_refused_at_the_start(tmp_path):
    """By what the files hold, whatever the task is called."""
    answered = question([{"text": "film", "answer_start": 5}])
    lines = [answered, question([], is_impossible=True)]
    sizes = {"question_length": 4, "answer_length": 4, "labels": []}
    for train, validation, expected in (
        ([answered], [answered], ("answer_em", "answer_f1")),
        ([answered], lines, ("answer_em_v2", "answer_f1_v2")),
        (lines, [answered], ("answer_em_v2", "answer_f1_v2")),
    ):
        files = write_task(tmp_path / "task", name="mine", kind="spans", **sizes)
        for name, content in (("train", train), ("validation", validation)):
            write_lines(tmp_path / "task" / f"{name}.jsonl", content)
        made = task_of(files, tmp_path / "out")
        assert task_metrics(made.settings).names == expected
        assert task_metrics(made.renderer.inputs.config) == task_metrics(made.settings)
        (given,) = made.validation.values()
        evaluation = Evaluation(made.settings, made.renderer, given, ParallelContext.alone(), 8)
        zeros = torch.zeros(
            sum(len(part.positions) for sample in evaluation._samples for part in sample.target_groups), 2
        )
        measured = evaluation.run(Model(lambda batch, zeros=zeros: (zeros, zeros[:, 0]))).metrics
        assert set(measured) == set(expected)
    with pytest.raises(ConfigError, match=r"names answer_em, but the files have questions without an answer"):
        write_lines(tmp_path / "task" / "validation.jsonl", lines)
        task_of(files, tmp_path / "out", "task.metrics=[answer_em]")
