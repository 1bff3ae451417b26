"""Files of labelled samples -> TaskRecords, by the format that `task.reader` names.

Fields of a TaskRecord, and its label. Names of the format stay where patterns use them.

    task, reader           fields                                          label
    boolq                  question, passage                               false, true
    cb                     premise, hypothesis                             entailment, contradiction, neutral
    rte, axb, axg          premise, hypothesis (axb: its sentence1 and 2)  entailment, not_entailment
    copa                   premise, choice1, choice2, question (cause or   0 or 1, the number of the choice
                           effect)
    wic                    word, sentence1, sentence2, and, if given,      false, true
                           start1, end1, start2, end2
    wsc                    text (words joined by single blanks),           false, true
                           span1_index, span1_text, span2_index (the
                           pronoun's place among the words, corrected),
                           span2_text, candidates (() if not given)
    multirc                passage, question, answer; index (passage,      0, 1
                           question, answer), group (passage, question)
    record                 passage, query, entities (distinct, sorted)     the right answers, distinct
    glue                   text_a and, for pairs, text_b                   a class; stsb: a number
    jsonl                  text, or text_a and text_b, or what             a class; a number
                           task.text_fields and task.template name
      choices              inputs, choices                                 the number of the right one
      race                 context, question, choices                      the number of the right one
    squad, jsonl spans     question, context, answers ((text, start), ...) the answers' texts; () if the text has none;
                                                                           squad_questions: the question
    jsonl with marks       text, spans (start, end) by the names of task.marks,    a class; typing: classes
                           entities ((start, end, number), ...)
    conll, jsonl tagging   words                                           tags, entities as BIO
    pairs, jsonl seq2seq   source, target (missing without a label)        the target; of summaries a sentence in each
                                                                           line
    text                   text; *.blank: also masked (with `<blank>`),    the text
                           fillings
    synthetic              see synthetic.py

Lists are tuples. A label is None where the file gives none; it must be there if `labelled`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from data_utils.common.errors import ConfigError
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers import conll, glue, superglue
from data_utils.tasks.readers.files import BadLine, Intake, TaskRecords, label_name, plain_name
from data_utils.tasks.readers.json_lines import read_json_lines
from data_utils.tasks.readers.questions import read_squad
from data_utils.tasks.readers.source_target import read_pairs
from data_utils.tasks.readers.synthetic import labels_of_synthetic, read_synthetic
from data_utils.tasks.readers.texts import read_texts

_READERS: dict[str, Callable[[Intake], TaskRecords]] = {
    "jsonl": read_json_lines,
    "superglue": superglue.read_superglue,
    "glue": glue.read_glue,
    "squad": read_squad,
    "conll": conll.read_conll,
    "pairs": read_pairs,
    "text": read_texts,
    "synthetic": read_synthetic,
}
_LABELS = {
    **glue.LABELS,
    **superglue.LABELS,
    **conll.LABELS,
    "yelp2": ("0", "1"),
    **{
        name: tuple(map(str, range(1, count + 1)))
        for name, count in (("yelp5", 5), ("agnews", 4), ("yahoo", 10))
    },
}
_NAMING = ("jsonl", "glue")  # readers of which one may name the fields


def read_records(config: TaskConfig, path: Path | str, *, labelled: bool) -> TaskRecords:
    """The samples of a file in its order.

    Args:
        path: a file, also compressed; for pairs that of the sources; for synthetic tasks NAME:key=value,...
        labelled: whether each sample must have a label, as for training and validation.
    Returns: a list whose `skipped` counts the lines that task.skip_bad_lines has left out.
    Raises:
        DataError with file, line, value, rule and remedy for what cannot be read.
        ConfigError for settings that the reader cannot follow.
    """
    if config.label_field is not None and config.reader not in _NAMING:
        raise ConfigError(
            f"task.label_field is {config.label_field!r}, but task.reader {config.reader} has a fixed label field; "
            f"remove task.label_field or use one of the readers {', '.join(_NAMING)}."
        )
    if config.reader != "jsonl" and (config.kind == "typing" or config.marks or config.entity_ids):
        raise ConfigError(
            f"task.reader is {config.reader}, but mentions and entities are read from JSON lines only; set it to "
            "jsonl, or remove task.marks and task.entity_ids."
        )
    return _READERS[config.reader](Intake(config, path, labelled, task_labels(config)))


def with_labels(config: TaskConfig) -> TaskConfig:
    """The task with the sorted labels of its training file, where it needs classes and nothing else says which.

    Tags of entities are completed: B-TYPE and I-TYPE for each type. Raises: DataError as `read_records`.
    """
    needs_labels = config.kind in ("classification", "tagging", "typing")
    if not needs_labels or config.train is None or task_labels(config):
        return config
    intake = Intake(config, config.train, True, None)
    _READERS[config.reader](intake)
    found = intake.found
    if config.kind == "tagging" and any(name[:2] in ("B-", "I-") for name in found):
        types = {name[2:] for name in found if name[:2] in ("B-", "I-")}
        found = found | {"O"} | {begin + type_ for type_ in types for begin in ("B-", "I-")}
    is_numeric = all(name.lstrip("-").isdecimal() for name in found)
    return replace(config, labels=tuple(sorted(found, key=int if is_numeric else None)))


def task_labels(config: TaskConfig) -> tuple[str, ...]:
    """The names of a task's classes or tags in the order of their numbers.

    These are task.labels, else the labels that task.verbalizers names, else the task's own. () where there are none:
    numbers, texts, and choices that each sample brings along.
    """
    try:
        names = config.labels or tuple(map(label_name, config.verbalizers))
    except BadLine as problem:
        raise ConfigError(f"task.verbalizers: {problem}; write the class in quotes.") from None
    if len(set(names)) != len(names):
        raise ConfigError(
            f"task.labels contains a name twice ({', '.join(names)}); each class must appear once."
        )
    if names:
        return names
    if config.reader == "synthetic":
        paths = [path for path in (config.train, *config.validation, *config.test) if path is not None]
        return labels_of_synthetic((*paths, config.name)[0])
    return _LABELS.get(plain_name(config.name), ())
