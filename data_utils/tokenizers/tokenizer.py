"""One interface over BERT WordPiece, GPT-2 BPE, SentencePiece and Hugging Face tokenizer.json files.

special_tokens.py decides which ids the special tokens have. Text never becomes a special token: the literal "[MASK]" or
"<|endoftext|>" in a document is encoded with ordinary tokens, so a corpus cannot insert a mask or end a document. Only
`encode_with_specials`, meant for generation prompts, gives [MASK], [sMASK] and [gMASK] their ids.

Trade-offs: the libraries `tokenizers` and `sentencepiece` define the ids, so they agree with other users of the same
files; fast/encoders.py gives the same ids faster where it can. A tokenizer holds native objects and cannot be pickled:
workers are forks, or call `load_tokenizer` themselves. `encode_batch` releases the GIL and uses one thread. The
exception is the `tokenizers` library, which uses all cores. A program with one worker per core should set
TOKENIZERS_PARALLELISM=false in the environment before the first encode.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import importlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from data_utils.common.errors import DataError
from data_utils.tokenizers.fast.encoders import CheckedEncoder
from data_utils.tokenizers.fast.library_encoders import Encoder
from data_utils.tokenizers.published_tokens import added_to_published, own_special_tokens
from data_utils.tokenizers.special_tokens import SpecialTokens, all_special_names
from data_utils.tokenizers.tokenizer_readers import TokenizerConfig, read_files
from data_utils.tokenizers.word_marks import WordMarks, WordToken

PROMPT_MARKERS = {"[MASK]": "mask", "[sMASK]": "smask", "[gMASK]": "gmask"}

SENTENCE_ENDS = tuple(".?!;:。．｡？！；：…\n")  # noqa: RUF001
# These may follow the end of a sentence inside the same token.
CLOSERS = " \t\"')]}»”’）］｝】》〉」』"  # noqa: RUF001

# Kind -> the module here that has its `load_KIND`. It is imported when it is used: a run has one tokenizer or two.
MODULES = {
    "bert_wordpiece": "vocabulary_files",
    "gpt2_bpe": "vocabulary_files",
    "gpt_bpe": "vocabulary_files",
    "sentencepiece": "sentencepiece_tokenizer",
    "hf_json": "tokenizer_json",
}

FINGERPRINT_SCHEME = "glm-tokenizer-1"  # change it when the same files give other ids


def load_tokenizer(config: TokenizerConfig, encoder: str = "auto") -> Tokenizer:
    """Read the files of `config` and build the tokenizer.

    Args: encoder: one of `ENCODERS` of fast/encoders.py; ids are the same with each.
    Raises: DataError if a file is missing, too large, damaged or unusable; the message names the file. ConfigError as
        `use_encoder`.
    """
    config = config.local()
    loaders = importlib.import_module(f"data_utils.tokenizers.{MODULES[config.kind]}")
    tokenizer: Tokenizer = getattr(loaders, f"load_{config.kind}")(config, read_files(config))
    if encoder != "auto":
        tokenizer.use_encoder(encoder)
    return tokenizer


class Tokenizer(abc.ABC):
    """Text to ids and back. `vocab_size` counts special tokens and no padding."""

    config: TokenizerConfig
    special: SpecialTokens
    lacking: frozenset[str]  # roles that have no token: their ids stand for something else
    vocab_size: int
    num_tokens: int  # ids below this have a token
    fingerprint: str  # of kind, options and file contents, but not of the path
    special_names: dict[int, str]  # every id that is not text, and the name `decode` shows for it
    added_names: dict[int, str]  # those of them that have a token and are not in the files
    _encoder: Encoder

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, never a special token (but WordPiece and tokenizer.json may give `special.unk`)."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode many texts. A lone surrogate, which UTF-8 cannot hold, is encoded as U+FFFD.

        Returns: the ids of all texts in one int32 array, and the number of ids of each text as int64.
        """
        return self._encoder.encode(texts)

    @abc.abstractmethod
    def use_encoder(self, name: str) -> None:
        """Encode with the named one of `ENCODERS` from now on.

        Raises: ConfigError if it cannot encode as this tokenizer, or its package is missing.
        """

    def use_fast_encoder(self) -> None:
        """Make the fast encoder now, if there is one: processes that are forked afterwards share it."""
        if isinstance(self._encoder, CheckedEncoder):
            self._encoder.choose()

    @abc.abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode`, and for each token the first character of `text` that it stands for and the end, maybe the same."""

    def cuts(self, text: str) -> np.ndarray | None:
        """For each token of `encode`, whether the text was cut before it ahead of the model, as before punctuation.

        None: nothing is known of such cuts.
        """
        return None

    def encode_with_specials(self, text: str) -> list[int]:
        """`encode`, except that [MASK], [sMASK] and [gMASK] become their ids: the ids of a text with spans cut out.

        Spaces before a marker are dropped, because a predicted span has its own leading space.
        """
        # text, marker, text, marker, ..., text
        *texts_and_markers, last = re.split("(" + "|".join(map(re.escape, PROMPT_MARKERS)) + ")", text)
        ids: list[int] = []
        for before, marker in zip(texts_and_markers[::2], texts_and_markers[1::2], strict=True):
            ids += self.encode_part(before.rstrip(" "), at_start=not ids)
            ids.append(getattr(self.special, PROMPT_MARKERS[marker]))
        return ids + self.encode_part(last, at_start=not ids)

    def encode_part(self, text: str, *, at_start: bool) -> list[int]:
        """Ids of a part of a text: only the first has the space that some tokenizers put before every text."""
        if at_start or not self.adds_space:
            return self.encode(text)
        # A letter before the part takes that space, unless it becomes one token with what follows.
        for letter in "ax1":
            alone, both = self.encode(letter), self.encode(letter + text)
            if both[: len(alone)] == alone and not any(map(self.is_unknown, alone)):
                return both[len(alone) :]
        return self.encode(text)

    @functools.cached_property
    def adds_space(self) -> bool:
        """Whether a text is encoded with a space before it, as by SentencePiece."""
        marks, ids = self.word_marks, self.encode("a")
        return marks.kind == "space" and bool(ids) and self._name(ids[0]).startswith(marks.mark)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; special tokens appear by name, or not at all with `skip_special`.

        The inverse of `encode` for byte-level BPE; WordPiece and SentencePiece normalize text on the way in.
        Raises: ValueError for an id outside 0 .. vocab_size - 1.
        """
        ids = self._checked(ids)
        if skip_special:
            ids = [i for i in ids if i not in self.special_names]
        texts: list[str] = []
        for is_special, group in itertools.groupby(ids, key=self.special_names.__contains__):
            if is_special:
                texts.extend(self.special_names[i] for i in group)
            else:
                texts.append(self._decode_text(list(group), at_start=not texts))
        return self._separator.join(texts)

    def token_to_text(self, token_id: int) -> str:
        """One token for display: a special token's name, else its text, which may be part of a character."""
        (token_id,) = self._checked([token_id])
        return self.special_names.get(token_id) or self._display(token_id)

    @property
    @abc.abstractmethod
    def word_marks(self) -> WordMarks:
        """How tokens show where words begin."""

    def word_token(self, token_id: int) -> WordToken:
        """Whether a token begins or ends a word. One that is not text, or was added to the vocabulary, is a word."""
        marks, name = self.word_marks, self._name(token_id)
        if self.is_unknown(token_id):
            return marks.unknown_word_token(self.special_names.get(token_id, name), self._has(marks.mark))
        if token_id in self.special_names or self._is_added(token_id):
            return WordToken(True, True, self.special_names.get(token_id, name))
        return marks.word_token(name)

    @functools.cached_property
    def sentinels(self) -> tuple[int, ...]:
        """T5's sentinels in their order, as far as none is missing. Some files have them as ordinary tokens."""
        names = {self.special_names.get(i) or self._name(i): i for i in range(self.num_tokens)}
        ids = map(names.get, map("<extra_id_{}>".format, itertools.count()))
        return tuple(itertools.takewhile(lambda token: token is not None, ids))  # type: ignore[arg-type]

    def is_unknown(self, token_id: int) -> bool:
        """Whether a token stands for text that the vocabulary lacks."""
        return token_id == self.special.unk and "unk" not in self.lacking

    def sentence_end_ids(self) -> np.ndarray:
        """Bool array [vocab_size]: tokens whose text ends a sentence, apart from closing quotes and brackets."""
        ends = np.zeros(self.vocab_size, dtype=bool)
        for i in range(self.vocab_size):
            if i not in self.special_names:
                ends[i] = self._token_text(i).rstrip(CLOSERS).endswith(SENTENCE_ENDS)
        return ends

    def _set_vocabulary(
        self,
        known: Mapping[str, int],
        glm: tuple[SpecialTokens, int],
        names: dict[int, str],
        ids_in_files: Set[int],
    ) -> None:
        """Decide the ids of all roles, and what else is no text.

        Args:
            known: role -> id, for the roles that the files hold.
            glm: the ids and the vocabulary size with GLM's tokens.
            names: id -> name of what is no text in the files.
        """
        config = self.config
        if config.added_tokens == "glm":
            (self.special, size), self.lacking = glm, frozenset()
        else:
            size = max(ids_in_files) + 1
            roles, added = added_to_published(config.added_tokens, known.keys(), size)
            self.special, self.lacking = own_special_tokens({**known, **roles})
            names |= added
            size += len(added)
        self.num_tokens, self.vocab_size = size, config.vocab_size or size
        if self.vocab_size < size:
            raise DataError(
                f"tokenizer.vocab_size is {config.vocab_size}, but {config.path} has {size} tokens, including "
                f"added_tokens {config.added_tokens}; set it to {size} or more, or to null."
            )
        self.special_names = all_special_names(
            self.special, self.lacking, names, self.vocab_size, ids_in_files
        )
        added_ids = range(max(ids_in_files) + 1, self.num_tokens)
        self.added_names = {i: self.special_names[i] for i in added_ids if i in self.special_names}

    def _checked(self, ids: Iterable[int]) -> list[int]:
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is outside the vocabulary of {self.vocab_size}")
        return ids

    _separator = ""  # between text and special names when decoding

    @abc.abstractmethod
    def _decode_text(self, ids: list[int], at_start: bool) -> str: ...

    @abc.abstractmethod
    def _name(self, token_id: int) -> str:
        """The token as the files have it; of an id without one, an empty string."""

    @abc.abstractmethod
    def _has(self, name: str) -> bool:
        """Whether the files have a token."""

    def _is_added(self, token_id: int) -> bool:
        """Whether a text token is found before a text is cut into words."""
        return False

    @abc.abstractmethod
    def _token_text(self, token_id: int) -> str: ...

    @abc.abstractmethod
    def _display(self, token_id: int) -> str: ...


def fingerprint(
    config: TokenizerConfig, files: Mapping[str, bytes], options: Mapping[str, Any] | None
) -> str:
    """Args: options: what decides ids beside the kind, the files and what every kind has.

    `vocab_size` changes no id; datasets record it by itself.
    """
    if config.added_tokens != "glm":
        options = {**(options or {}), "added_tokens": config.added_tokens}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    identity = json.dumps([FINGERPRINT_SCHEME, config.kind, options, hashes], sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()
