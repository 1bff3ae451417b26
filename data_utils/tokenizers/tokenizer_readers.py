"""Reads, parses and checks the files of a tokenizer; tokenizer.py makes tokenizers of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.hub import HubName, fetch_small, hub_name
from data_utils.common.setting_files import one_line, shown
from data_utils.common.settings import REQUIRED, checked, setting, setting_mapping
from data_utils.common.untrusted import read_bounded
from data_utils.tokenizers.byte_symbols import byte_symbols
from data_utils.tokenizers.special_tokens import ADDED_TOKENS, SPECIAL_NAMES

log = logging.getLogger(__name__)

# Kind -> names of its files in a directory.
FILES = {
    "bert_wordpiece": ("vocab.txt",),
    "gpt2_bpe": ("vocab.json", "merges.txt"),
    "gpt_bpe": ("vocab.json", "merges.txt"),
    "sentencepiece": ("*.model",),
    "hf_json": ("tokenizer.json",),
}
KINDS = tuple(FILES)

MAX_FILE_BYTES = 256 * 2**20
MAX_VOCAB_SIZE = 2**22
_UTF8_BYTES = {*range(0xC0), *range(0xC2, 0xF5)}
# Printable ASCII and white space, the second and later bytes of all characters, the first of accented letters and of
# typographic quotes.
_ORDINARY_BYTES = {0x09, 0x0A, *range(0x20, 0x7F), *range(0x80, 0xC0), 0xC3, 0xE2}


@dataclass(frozen=True, kw_only=True)
@checked("tokenizer")
class TokenizerConfig:
    """A tokenizer's kind, files and options. Options of other kinds are ignored."""

    kind: str = setting(REQUIRED, "Tokenizer file format.", one_of=KINDS)
    path: str = setting(
        REQUIRED,
        "vocab.txt, vocab.json, .model or tokenizer.json, its directory, or a Hugging Face hub name: "
        "org/name or org/name@revision.",
        is_path=True,
        on_resume="free",
    )
    added_tokens: str = setting(
        "glm",
        "Tokens appended to the vocabulary of the files: glm = GLM's special tokens that are missing; none "
        "= keep the published vocabulary (BERT, RoBERTa, GPT-2, ...); t5 = 100 sentinels (a T5 "
        "tokenizer.json has them already); optimus = <PAD>, <BOS> and <EOS> if missing.",
        one_of=ADDED_TOKENS,
    )
    vocab_size: int | None = setting(
        None,
        "Size of the vocabulary if larger than the number of tokens (T5: 32128 for 32100; ERNIE 1.0: 18000 "
        "for 17964); null = number of tokens.",
        at_least=1,
        at_most=MAX_VOCAB_SIZE,
    )
    lowercase: bool = setting(
        True, "bert_wordpiece: lower-case the text and strip accents; set to false for cased models."
    )
    fixed_command_tokens: bool = setting(
        True,
        "sentencepiece: gMASK has its own id (GLM-large-Chinese); false = it shares the id of eop "
        "(GLM-10B-Chinese).",
    )
    roles: dict[str, str] = setting_mapping(
        "hf_json: role -> token, for special tokens whose names are not those of docs/tokenizers.md, for example "
        "{eos: <|im_end|>}."
    )

    def __post_init__(self) -> None:
        if self.roles and self.kind != "hf_json":
            raise ConfigError(
                f"tokenizer.roles is set, but in files of tokenizer.kind {self.kind} each role has one name; leave it "
                "out."
            )
        for role, token in self.roles.items():
            if role not in SPECIAL_NAMES:
                raise ConfigError(
                    f"tokenizer.roles has {shown(role)}; it must be one of {', '.join(SPECIAL_NAMES)}."
                )
            if not isinstance(token, str):
                raise ConfigError(
                    f"tokenizer.roles.{role} is {shown(token)}; it must be the token as text, in quotes."
                )

    @property
    def hub_name(self) -> HubName | None:
        """The path, if it is a name of the hub."""
        return hub_name(self.path)

    def local(self) -> TokenizerConfig:
        """The configuration with a path on this machine; a name of the hub becomes the path of its files in the cache.

        Raises: DataError for a name that cannot be fetched.
        """
        if (name := self.hub_name) is None:
            return self
        fetched = fetch_small(name, "tokenizer.path", "tokenizer.path=DIR", FILES[self.kind])
        return replace(self, path=str(fetched.directory))

    def absolute(self) -> TokenizerConfig:
        """The configuration with an absolute path, so that a run can be opened from any working directory."""
        return replace(self, path=os.path.abspath(self.local().path))


def parse_merges(text: str, path: Path) -> list[tuple[str, str]]:
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    first = 1 if lines[0].startswith("#version") else 0
    merges = []
    for number, line in enumerate(lines[first:], start=first + 1):
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise DataError(f"{path}: line {number} of merges.txt ({line[:50]!r}) must be two tokens.")
        merges.append((left, right))
    return merges


def model_vocab(model: Mapping[str, Any], path: Path) -> dict[str, Any]:
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        return dict(vocab)
    if isinstance(vocab, list) and all(isinstance(entry, list) and len(entry) == 2 for entry in vocab):
        return {str(token): i for i, (token, _) in enumerate(vocab)}  # Unigram: token and score
    raise DataError(f"{path}: the model has no vocabulary; give a tokenizer.json of the tokenizers library.")


def merge_results(model: Mapping[str, Any], path: Path) -> set[str]:
    """The tokens that a BPE model makes by merging two others, hence ordinary text."""
    merges, prefix = model.get("merges") or [], model.get("continuing_subword_prefix") or ""
    if not isinstance(merges, list):
        merges = [merges]  # refused below
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(token, str) for token in pair)):
            raise DataError(f"{path}: merge {str(pair)[:50]!r} must be two tokens; the file is damaged.")
        # The library would abort the process.
        if not (isinstance(prefix, str) and pair[1].startswith(prefix)):
            raise DataError(
                f"{path}: merge {str(pair)[:50]!r} lacks the prefix {prefix!r}; the file is damaged."
            )
    return {left + right.removeprefix(prefix) for left, right in pairs}


def read_files(config: TokenizerConfig) -> dict[str, bytes]:
    """Contents of the tokenizer's files under their usual names. Raises: DataError."""
    path = Path(config.path)
    if not path.exists():
        raise DataError(
            f"tokenizer {path} does not exist; set path to its file or directory (scripts/train_tokenizer.py makes "
            "one), or to a repository of the Hugging Face hub, org/name@main."
        )
    if config.kind == "sentencepiece":
        return {"model": _read(_find_sentencepiece_model(path))}
    first, *other_names = FILES[config.kind]
    directory = path if path.is_dir() else path.parent
    contents = {first: _read(path / first if path.is_dir() else path)}
    return contents | {name: _read(directory / name) for name in other_names}


def _find_sentencepiece_model(path: Path) -> Path:
    if path.is_file():
        return path
    candidates = sorted(path.glob("*.model"))
    if len(candidates) != 1:
        names = ", ".join(candidate.name for candidate in candidates) or "none"
        raise DataError(f"{path} must hold one .model file, but has {names}; set path to the file itself.")
    return candidates[0]


def _read(path: Path) -> bytes:
    try:
        content = read_bounded(path, MAX_FILE_BYTES)
    except FileNotFoundError as error:
        raise DataError(f"tokenizer file {path}: {error.strerror}; check its kind and path.") from None
    except ValueError as error:
        raise DataError(f"tokenizer file {path} {error}; check its kind and path.") from None
    if not content:
        raise DataError(f"tokenizer file {path} is empty; download it again.")
    return content


def decode_utf8(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"tokenizer file {path} is not UTF-8 text; check its kind and path.") from None


def parse_json(content: bytes, path: Path) -> dict[str, Any]:
    try:
        tree = orjson.loads(decode_utf8(content, path))
    except orjson.JSONDecodeError as error:
        raise DataError(
            f"tokenizer file {path} is not valid JSON: {one_line(error)}; check its kind and path, or download it "
            "again."
        ) from None
    if not isinstance(tree, dict):
        raise DataError(
            f"tokenizer file {path} must hold a JSON object, not {type(tree).__name__}; check its kind and path."
        )
    return tree


def check_vocab(ids: Mapping[str, Any], path: Path) -> None:
    if not ids:
        raise DataError(f"{path}: the vocabulary is empty; download the file again.")
    for token, token_id in ids.items():
        if type(token_id) is not int or not 0 <= token_id < MAX_VOCAB_SIZE:
            raise DataError(
                f"{path}: id of {token[:50]!r} is {token_id!r}; it must be 0 .. {MAX_VOCAB_SIZE - 1}."
            )


def check_unique(ids: Mapping[str, int], path: Path) -> None:
    """Raise DataError for an id of two tokens: which of them text gets would be chance."""
    token_of_id: dict[int, str] = {}
    for token, token_id in ids.items():
        earlier = token_of_id.setdefault(token_id, token)
        if earlier != token:
            raise DataError(
                f"{path}: {earlier[:50]!r} and {token[:50]!r} both have the id {token_id}; give each token its own id, "
                "or remove one."
            )


def check_byte_alphabet(ids: Mapping[str, int], path: Path) -> None:
    """Raise DataError if bytes of ordinary text have no token, for the library drops them; warn of rare ones.

    UTF-8 has no byte C0, C1 or F5 to FF. Released vocabularies lack more: SmolLM2's has no token for some control
    characters and for bytes that begin rare scripts.
    """
    missing = [
        byte for byte, symbol in enumerate(byte_symbols()) if symbol not in ids and byte in _UTF8_BYTES
    ]
    if needed := [byte for byte in missing if byte in _ORDINARY_BYTES]:
        raise DataError(
            f"{path}: {len(needed)} bytes of ordinary text have no token ({_shown_bytes(needed)}), so text would be "
            "lost; train the tokenizer with the full byte alphabet."
        )
    if missing:
        log.warning(
            "%s has no token for %d bytes of UTF-8 (%s); text with them is dropped, as by the tokenizers library, "
            "for example %s",
            path,
            len(missing),
            _shown_bytes(missing),
            ", ".join(f"U+{point:04X}" for point in map(_character_with, missing[:8])),
        )


def _shown_bytes(values: list[int]) -> str:
    return " ".join(f"{byte:02X}" for byte in values[:12]) + " ..." * (len(values) > 12)


def _character_with(byte: int) -> int:
    """The first character whose UTF-8 has a byte below 80 or of C2 to F4, the first of several."""
    lead = bytes([byte]) if byte < 0x80 else b""
    if byte >= 0xC2:
        second = {0xE0: 0xA0, 0xF0: 0x90}.get(byte, 0x80)
        lead = bytes([byte, second, 0x80, 0x80][: 2 + (byte >= 0xE0) + (byte >= 0xF0)])
    return ord(lead.decode())
