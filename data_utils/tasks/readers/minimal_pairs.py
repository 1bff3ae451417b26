"""Minimal pairs: two sentences that differ in one point, of which one is acceptable.

The format is that of BLiMP (doi 10.1162/tacl_a_00321). A file has a JSON object a line: "sentence_good" and
"sentence_bad", "UID" (the paradigm; without it the name of the file) and "linguistics_term" (the phenomenon, to which
several paradigms belong). BLiMP itself has seven pairs that are one sentence twice; they are read like the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data_utils.common.errors import DataError
from data_utils.common.setting_files import shown
from data_utils.corpus.json_records import UnusableRecord, parse_json_object
from data_utils.tasks.readers.files import numbered_lines

# Means over the paradigms of BLiMP in percent, computed from the scores by paradigm that its authors publish
# (github.com/alexwarstadt/blimp).
PUBLISHED = {"5-gram": 61.2, "Transformer-XL": 69.6, "LSTM": 69.8, "GPT-2": 83.0}
BLIMP_PARADIGMS = 67

# Scores of a sentence, see megatron_lite/finetune/minimal_pairs.py.
SCORES = ("left-to-right", "words", "tokens", "blanks")


@dataclass(frozen=True)
class MinimalPair:
    paradigm: str
    phenomenon: str  # "" = the file does not name it
    good: str
    bad: str

    @property
    def is_one_sentence(self) -> bool:
        return self.good == self.bad


def read_minimal_pairs(path: Path, most: int | None = None) -> list[MinimalPair]:
    """The pairs of a file, or of all .jsonl files of a directory in the order of their names.

    Args: most: pairs of each paradigm, the first ones; None = all.
    Raises: DataError with file and line for a pair that cannot be compared.
    """
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise DataError(f"{path} has no .jsonl file; name the directory of the benchmark's files.")
    else:
        files = [path]
    pairs = [pair for file in files for pair in _read_file(file)]
    if most is None:
        return pairs
    paradigms: dict[str, list[MinimalPair]] = {}
    for pair in pairs:
        paradigms.setdefault(pair.paradigm, []).append(pair)
    return [pair for paradigm in paradigms.values() for pair in paradigm[:most]]


def _read_file(path: Path) -> list[MinimalPair]:
    pairs = []
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            tree = parse_json_object(line)
        except UnusableRecord as error:
            raise DataError(f"{path}, line {number}: {error}; correct the line.") from None
        texts = {name: tree.get(name) for name in ("sentence_good", "sentence_bad")}
        for name, text in texts.items():
            if not isinstance(text, str) or not text.strip():
                raise DataError(
                    f"{path}, line {number}: {name} is {shown(text)}; each line needs the texts sentence_good and "
                    "sentence_bad."
                )
        good, bad = str(texts["sentence_good"]), str(texts["sentence_bad"])
        names = [tree.get("UID", path.stem), tree.get("linguistics_term", "")]
        if not all(isinstance(name, str) for name in names):
            raise DataError(
                f"{path}, line {number}: UID and linguistics_term are {shown(names)}; they are names."
            )
        pairs.append(MinimalPair(str(names[0]), str(names[1]), good, bad))
    if not pairs:
        raise DataError(f"{path} has no pair; it needs a JSON object with two sentences a line.")
    if all(pair.is_one_sentence for pair in pairs):
        raise DataError(
            f"{path}: in all {len(pairs)} pairs sentence_good and sentence_bad are equal; a pair needs two sentences."
        )
    return pairs
