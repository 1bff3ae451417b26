"""Minimal pairs: two sentences that differ in one point, of which one is acceptable.

The format is that of BLiMP (doi 10.1162/tacl_a_00321). A file, compressed or not, has a JSON object a line:
"sentence_good" and "sentence_bad", "UID" (the paradigm; without it the name of the file) and "linguistics_term" (the
phenomenon, to which several paradigms belong). BLiMP itself has seven pairs that are one sentence twice; they are read
like the others.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path

from data_utils.common.errors import DataError
from data_utils.common.setting_files import shorten, shown
from data_utils.corpus.json_records import UnusableRecord, parse_json_object
from data_utils.corpus.stored_files import compression_suffix
from data_utils.tasks.readers.files import file_suffix, numbered_lines

# Means over the paradigms of BLiMP in percent, computed from the scores by paradigm that its authors publish
# (github.com/alexwarstadt/blimp); of people the mean in their paper (arXiv:1912.00582, table 3).
PUBLISHED = {"5-gram": 61.2, "Transformer-XL": 69.6, "LSTM": 69.8, "GPT-2": 83.0, "people": 88.6}
BLIMP_PARADIGMS = 67

# Scores of a sentence, see megatron_lite/finetune/minimal_pairs.py.
SCORES = ("left-to-right", "words", "tokens", "blanks")


_OTHER_FORMATS = (".csv", ".tsv", ".parquet", ".arrow", ".txt")
_CONVERSION = "pandas: read_csv or read_parquet, then to_json(FILE, orient='records', lines=True)"


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
    paradigms: dict[str, list[MinimalPair]] = {}
    pairs = [pair for file in pair_files(path) for pair in _read_file(file, paradigms)]
    if most is None:
        return pairs
    return [pair for paradigm in paradigms.values() for pair in paradigm[:most]]


def pair_files(path: Path) -> list[Path]:
    """The files that `read_minimal_pairs` reads. Raises: DataError for a directory without, or with one twice."""
    if not path.is_dir():
        return [path]
    # Hidden files are not the benchmark's: macOS writes ._NAME.jsonl beside NAME.jsonl.
    files = sorted(
        file for file in path.iterdir() if file_suffix(file) == ".jsonl" and not file.name.startswith(".")
    )
    if not files:
        raise DataError(
            f"{path} has no .jsonl file; name the directory of the benchmark's files, and write others as JSON lines "
            f"({_CONVERSION})."
        )
    first: dict[str, Path] = {}
    for file in files:
        if first.setdefault(_name(file), file) != file:
            raise DataError(
                f"{path} has {first[_name(file)].name} and {file.name}, whose pairs would count twice; keep one."
            )
    return files


def _is_control(sign: str) -> bool:
    return unicodedata.category(sign) == "Cc"


def _name(path: Path) -> str:
    """The name of a file without its endings."""
    return Path(path.name[: len(path.name) - len(compression_suffix(path))]).stem


def _read_file(path: Path, paradigms: dict[str, list[MinimalPair]]) -> list[MinimalPair]:
    """The pairs of a file. Args: paradigms: those that were read, by paradigm; the new ones are added."""
    if not path.is_file():
        reason = "is not a file" if path.exists() else "does not exist"
        raise DataError(
            f"{path} {reason}; minimal pairs are a file of JSON lines or a directory of such files."
        )
    if file_suffix(path) in _OTHER_FORMATS:
        raise DataError(
            f"{path} is not a file of JSON lines by its name; write it as one ({_CONVERSION}), with the fields "
            "sentence_good and sentence_bad."
        )
    pairs = []
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            tree = parse_json_object(line)
        except UnusableRecord as error:
            raise DataError(f"{path}:{number}: {error}; correct the line.") from None
        for name in ("sentence_good", "sentence_bad"):
            if name not in tree:
                raise DataError(
                    f"{path}:{number}: there is no field {name} (fields: {shorten(', '.join(tree)) or 'none'}); "
                    "each line needs the texts sentence_good and sentence_bad: rename the fields."
                )
            text = tree[name]
            if not isinstance(text, str) or not text.strip():
                raise DataError(
                    f"{path}:{number}: {name} is {shown(text)}; each line needs the texts sentence_good and "
                    "sentence_bad."
                )
        # null is as good as nothing: tables that are written as JSON have it where a name is missing.
        names = {
            "UID": tree.get("UID") or _name(path),
            "linguistics_term": tree.get("linguistics_term") or "",
        }
        for name, value in names.items():
            if not isinstance(value, str) or any(map(_is_control, value)):
                raise DataError(
                    f"{path}:{number}: {name} is {shown(value)}; it is a name: write text of one line, or leave "
                    "it out."
                )
        pair = MinimalPair(
            names["UID"], names["linguistics_term"], tree["sentence_good"], tree["sentence_bad"]
        )
        same_paradigm = paradigms.setdefault(pair.paradigm, [])
        if same_paradigm and same_paradigm[0].phenomenon != pair.phenomenon:
            raise DataError(
                f"{path}:{number}: the paradigm {pair.paradigm} is of {pair.phenomenon!r} here, and of "
                f"{same_paradigm[0].phenomenon!r} in an earlier line; a paradigm has one linguistics_term: correct one."
            )
        same_paradigm.append(pair)
        pairs.append(pair)
    if not pairs:
        raise DataError(f"{path} has no pair; it needs a JSON object with two sentences a line.")
    if all(pair.is_one_sentence for pair in pairs):
        raise DataError(
            f"{path}: in all {len(pairs)} pairs sentence_good and sentence_bad are equal; a pair needs two sentences."
        )
    return pairs
