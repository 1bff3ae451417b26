"""How the tokens of a vocabulary show where words begin.

The text of a token does not say it: `##` is a mark of WordPiece and a heading of Markdown. So the tokenizer's pipeline
is asked. There are four types of marks:
    prefix   of tokens that continue a word: WordPiece (`##` or another), BPE with such a prefix
    suffix   of tokens that end a word: `</w>` of GPT and CLIP
    joint    a suffix of tokens whose word goes on: `@@` of subword-nmt
    space    kept within tokens: byte-level BPE (`Ġ`), SentencePiece and Metaspace (`▁`), a plain one
Each token of a WordLevel model is a word. Where a pipeline drops spaces and marks nothing, or cuts text into
characters, nobody can know where words begin.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import tokenizers
from tokenizers import models

from data_utils.tokenizers.byte_symbols import byte_symbols

JOINT = "@@"
_JOINT_SHARE = 0.1  # of the tokens: in vocabularies of subword-nmt 30 to 50 of 100 end so
_BYTES = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # a token of byte fallback
# UTF-8 of U+4000 to U+9FFF begins with these: of a character that is cut into bytes, the first one tells its script.
_CHINESE_BYTES = {bytes([lead]) for lead in range(0xE4, 0xEA)}
# The Chinese characters that BERT sets apart.
_CHINESE = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2CEAF), (0x2F800, 0x2FA1F),
)  # fmt: skip


def is_chinese(text: str) -> bool:
    """Whether all of a text is Chinese characters."""
    if not text or text.isascii():
        return False
    return all(any(low <= ord(character) <= high for low, high in _CHINESE) for character in text)


class WordToken(NamedTuple):
    """What a token tells of words: does one begin with it, does one end with it, and which text does it stand for?"""

    begins: bool
    ends: bool
    text: str


@dataclass(frozen=True)
class WordMarks:
    """The marks of a vocabulary. `unknown` says why there are none, if so."""

    kind: str = "none"  # prefix, suffix, joint, space, word (each token is one), none
    mark: str = ""
    is_bytes: bool = False  # tokens are written in the 256 symbols of bytes
    trails: bool = False  # a space belongs to the word before it
    alone: bool = False  # a space is a word
    unknown: str = ""

    def word_token(self, name: str) -> WordToken:
        """What a token of text tells by its name in the vocabulary."""
        if self.kind == "word":
            return WordToken(True, True, name)
        # A name that is all mark is the text of the mark: a continued word has at least one more character.
        has_text = len(name) > len(self.mark)
        if self.kind == "prefix":
            continues = has_text and name.startswith(self.mark)
            return WordToken(not continues, False, name.removeprefix(self.mark) if continues else name)
        if self.kind in ("suffix", "joint"):
            is_marked = has_text and name.endswith(self.mark)
            ends = is_marked == (self.kind == "suffix")
            text = name.removesuffix(self.mark) if is_marked else name
            return WordToken(is_chinese(text[:1]), ends or is_chinese(text[-1:]), text + " " * ends)
        return self._read_spaces(self._token_bytes(name))

    def unknown_word_token(self, name: str, has_mark: bool) -> WordToken:
        """What the token for unknown text tells.

        Args: has_mark: the vocabulary has the mark as a token, so that unknown text follows it.
        """
        if self.kind == "space":
            return WordToken(not has_mark, False, name)
        return WordToken(self.kind != "suffix", self.kind != "prefix", name)

    def _token_bytes(self, name: str) -> bytes:
        """The UTF-8 of a token, which may be a cut-off character."""
        if self.is_bytes and _BYTES.keys() >= set(name):
            return bytes(map(_BYTES.__getitem__, name))
        if name.startswith("<0x") and (byte := _BYTE.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        return (name.replace(self.mark, " ") if self.mark else name).encode("utf-8", "replace")

    def _read_spaces(self, data: bytes) -> WordToken:
        text = data.decode("utf-8", "replace")
        first, last = text[:1], text[-1:]
        # A space stands before its word; other white space is cut from it. `▁` alone is the beginning of a word
        # whose characters follow, while a space after other characters ("e▁") ends theirs.
        begins = first.isspace() and not (self.trails and first == " ")
        ends = last.isspace() and (self.trails or self.alone or last != " " or not text.isspace())
        chinese = is_chinese(first) or data[:1] in _CHINESE_BYTES
        return WordToken(begins or chinese, ends or is_chinese(last), text)


def find_word_marks(backend: tokenizers.Tokenizer) -> WordMarks:
    """The marks of a pipeline of the library `tokenizers`, by its model and by what it makes of a space."""
    model = backend.model
    if isinstance(model, models.WordLevel):
        return WordMarks("joint", JOINT) if _has_joints(backend) else WordMarks("word")
    for kind, option in (("prefix", "continuing_subword_prefix"), ("suffix", "end_of_word_suffix")):
        if mark := getattr(model, option, None):
            return WordMarks(kind, mark)
    # The pipeline is asked what it makes of "a b": its description has a dozen ways to keep a space.
    name = type(model).__name__
    if len(_words(backend, "ab")) > 1:
        return WordMarks(unknown=f"its pre-tokenizer splits text into characters, so its {name} has no words")
    words = _words(backend, "a b")
    match = re.search("a(.*)b", "".join(words), re.DOTALL)
    space = match[1] if match else ""
    if not space and _has_joints(backend):
        return WordMarks("joint", JOINT)
    if len(space) != 1:
        habit = "drops spaces" if not space else f"writes a space as {space!r}"
        return WordMarks(unknown=f"it {habit}, and the tokens of its {name} do not mark words")
    return WordMarks(
        "space",
        space,
        is_bytes=space == "Ġ",
        trails=any(word.endswith("a" + space) for word in words),
        alone=space in words,
    )


def _words(backend: tokenizers.Tokenizer, text: str) -> list[str]:
    """The words of a text as the pipeline cuts it before its model."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is None:
        return [text]
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


def _has_joints(backend: tokenizers.Tokenizer) -> bool:
    """Whether texts come cut by subword-nmt: the decoder joins such tokens, or many of the vocabulary are such."""
    decode = backend.decoder.decode if backend.decoder is not None else " ".join
    if decode(["a" + JOINT, "b"]).strip() == "ab" and decode(["a", "b"]).strip() == "a b":
        return True
    names = backend.get_vocab(with_added_tokens=False)
    # Nothing else tells a WordLevel vocabulary of text that was cut by subword-nmt.
    joints = sum(name.endswith(JOINT) and name != JOINT for name in names)
    return joints >= _JOINT_SHARE * len(names)
