"""Tokenizers of the library `tokenizers`, whatever files they come from."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders

from data_utils.common.errors import DataError
from data_utils.tokenizers.fast.encoders import library_or_faster, named_encoder
from data_utils.tokenizers.fast.library_encoders import Encoder, without_lone_surrogates
from data_utils.tokenizers.special_tokens import ROBERTA_NAMES, assign_special_tokens
from data_utils.tokenizers.tokenizer import Tokenizer, fingerprint
from data_utils.tokenizers.tokenizer_readers import TokenizerConfig
from data_utils.tokenizers.word_marks import WordMarks, find_word_marks

# A noncharacter, put before special names inside the `tokenizers` library, so that no text equals one.
HIDDEN = "\ufdd0"


def special_token(name: str, takes_space: bool = False) -> tokenizers.AddedToken:
    """A special token that is found before a text is normalized. Args: takes_space: with the space before it."""
    return tokenizers.AddedToken(name, special=True, normalized=False, lstrip=takes_space)


class HuggingFaceTokenizer(Tokenizer):
    """A pipeline of the `tokenizers` library, whose special tokens text cannot reach."""

    def __init__(
        self,
        config: TokenizerConfig,
        files: Mapping[str, bytes],
        backend: tokenizers.Tokenizer,
        ids: Mapping[str, int],
        role_names: Mapping[str, str],
        hidden: Iterable[str] = (),
    ):
        """
        Args:
            backend: encodes; its names of the tokens in `hidden` carry the prefix HIDDEN.
            ids: id of every token in the files.
            role_names: role -> name, for the roles that the files hold.
            hidden: names that are not text, besides those of `role_names`.
        """
        self.config = config
        options: dict[str, Any] | None = None
        if config.kind == "bert_wordpiece":
            options = {"lowercase": config.lowercase}
        elif role_names.items() >= ROBERTA_NAMES.items():
            options = {"names": "roberta"}
        if config.roles:
            options = {**(options or {}), "roles": dict(config.roles)}
        self.fingerprint = fingerprint(config, files, options)
        known = {role: ids[name] for role, name in role_names.items()}
        names = {ids[name]: name for name in (*hidden, *role_names.values())}
        glm = assign_special_tokens(known, max(ids.values()) + 1)
        self._set_vocabulary(known, glm, dict(names), set(ids.values()))
        self._backend = backend
        self._backend_names = [*names.values(), *map(str, hidden)]
        self._is_forbidden = np.zeros(self.vocab_size, dtype=bool)
        self._is_forbidden[list(names)] = True
        # Decoded words have spaces between them.
        if backend.decoder is None or isinstance(backend.decoder, (decoders.WordPiece, decoders.BPEDecoder)):
            self._separator = " "

    @functools.cached_property
    def _encoder(self) -> Encoder:  # type: ignore[override]
        return library_or_faster(self._backend, self._backend_names)

    def use_encoder(self, name: str) -> None:
        self._encoder = named_encoder(name, self._backend, self._backend_names)

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = self._encoder.encode(texts)
        # [UNK], or text that spells a hidden name, prefix included
        ids[self._is_forbidden[ids]] = self.special.unk
        return ids, lengths

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self._backend.encode(without_lone_surrogates(text), add_special_tokens=False)
        return [self.special.unk if self._is_forbidden[i] else i for i in encoded.ids], encoded.offsets

    def cuts(self, text: str) -> np.ndarray:
        words = self._backend.encode(without_lone_surrogates(text), add_special_tokens=False).word_ids
        return np.array([word != before for word, before in zip(words, [None, *words], strict=False)], bool)

    def with_visible_specials(
        self, names: Mapping[int, str], taking_space: Set[int] = frozenset()
    ) -> tokenizers.Tokenizer:
        """A copy of the library's tokenizer that finds special tokens in a text, for an export.

        Args: names: of the special tokens to find, by id. taking_space: those of them that take the space before them.
        Raises: DataError if one would have another id.
        """
        visible = tokenizers.Tokenizer.from_str(self._backend.to_str().replace(HIDDEN, ""))
        visible.add_special_tokens([special_token(names[i], i in taking_space) for i in sorted(names)])
        for token_id, name in names.items():
            if visible.token_to_id(name) != token_id:
                raise DataError(
                    f"{self.config.path}: {name!r} has id {token_id}, but would load as {visible.token_to_id(name)}."
                )
        return visible

    def _decode_text(self, ids: list[int], at_start: bool) -> str:
        text = self._backend.decode(ids, skip_special_tokens=False)
        if at_start or self.word_marks.kind != "space" or text.startswith(" "):
            return text
        # A Metaspace decoder drops the leading space, which is right at the start of a text only.
        return " " * self._name(ids[0]).startswith(self.word_marks.mark) + text

    @functools.cached_property
    def word_marks(self) -> WordMarks:  # type: ignore[override]
        return find_word_marks(self._backend)

    @functools.cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    def _is_added(self, token_id: int) -> bool:
        return token_id in self._added

    @functools.cached_property
    def _unknown(self) -> int | None:
        own = getattr(self._backend.model, "unk_token", None)
        return None if own is None else self._backend.token_to_id(own)

    def is_unknown(self, token_id: int) -> bool:
        return token_id == self._unknown or super().is_unknown(token_id)

    def _has(self, name: str) -> bool:
        return self._backend.token_to_id(name) is not None

    def _name(self, token_id: int) -> str:
        return self._backend.id_to_token(token_id) or ""

    def _token_text(self, token_id: int) -> str:
        return self._backend.decode([token_id], skip_special_tokens=False)

    def _display(self, token_id: int) -> str:
        text = self._token_text(token_id)
        return text if text and "\ufffd" not in text else str(self._backend.id_to_token(token_id))
