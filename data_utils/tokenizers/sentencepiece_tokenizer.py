"""A SentencePiece .model -> tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import sentencepiece

from data_utils.common.errors import ConfigError, DataError
from data_utils.tokenizers.fast.library_encoders import SentencePieceEncoder, without_lone_surrogates
from data_utils.tokenizers.published_tokens import named_roles
from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.tokenizer import Tokenizer, fingerprint
from data_utils.tokenizers.tokenizer_readers import TokenizerConfig
from data_utils.tokenizers.word_marks import WordMarks

_SPACE = "▁"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. GLM's special tokens follow its last id; published ones are control pieces of the model.

    Text reaches neither.
    """

    def __init__(self, config: TokenizerConfig, files: Mapping[str, bytes]):
        self.config = config
        self.fingerprint = fingerprint(config, files, {"fixed_command_tokens": config.fixed_command_tokens})
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=files["model"])
            base_size = self._model.get_piece_size()
            pieces = {i: self._model.id_to_piece(i) for i in range(base_size)}
        except (RuntimeError, ValueError):  # ValueError: a piece that is not UTF-8
            raise DataError(f"{config.path} is not a SentencePiece model; give the .model file.") from None
        self._encoder = SentencePieceEncoder(self._model)
        if base_size == 0:
            raise DataError(f"{config.path} is an empty SentencePiece model; give the .model file.")
        control = {i: piece for i, piece in pieces.items() if self._model.is_control(i)}
        unknown = {i: piece for i, piece in pieces.items() if self._model.is_unknown(i)}
        by_name = {piece: i for i, piece in (control | unknown).items()}
        roles, _ = named_roles(by_name.keys(), False, config.added_tokens)
        known = {role: by_name[piece] for role, piece in roles.items()}
        glm = sentencepiece_special_tokens(base_size, config.fixed_command_tokens)
        names = control if config.added_tokens == "glm" else control | unknown
        self._set_vocabulary(known, glm, names, pieces.keys())

    def use_encoder(self, name: str) -> None:
        if name not in ("auto", "library"):
            raise ConfigError(
                f"--encoder {name} cannot be used with a tokenizer of kind sentencepiece; choose --encoder auto."
            )

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        mapping = self._model.encode(without_lone_surrogates(text), return_type="offset_mapping")
        return mapping["ids"], mapping["offsets"]

    def _decode_text(self, ids: list[int], at_start: bool) -> str:
        text = self._model.decode(ids)
        # The library drops the leading space, which is right at the start of a text only.
        return text if at_start or not self._model.id_to_piece(ids[0]).startswith(_SPACE) else " " + text

    @functools.cached_property
    def word_marks(self) -> WordMarks:  # type: ignore[override]
        pieces = map(self._model.id_to_piece, range(self._model.get_piece_size()))
        marked = [piece for piece in pieces if _SPACE in piece and piece.strip(_SPACE)]
        # A model that was trained with treat_whitespace_as_suffix has all of its spaces at the ends of pieces.
        trails = bool(marked) and all(
            piece.endswith(_SPACE) and not piece.startswith(_SPACE) for piece in marked
        )
        return WordMarks("space", _SPACE, trails=trails)

    def is_unknown(self, token_id: int) -> bool:
        is_in_model = token_id < self._model.get_piece_size()
        return (is_in_model and self._model.is_unknown(token_id)) or super().is_unknown(token_id)

    def _has(self, name: str) -> bool:
        return not self._model.is_unknown(self._model.piece_to_id(name))

    def _name(self, token_id: int) -> str:
        return self._model.id_to_piece(token_id) if token_id < self._model.get_piece_size() else ""

    def _token_text(self, token_id: int) -> str:
        piece = self._model.id_to_piece(token_id)
        return chr(int(piece[1:-1], 16)) if self._model.is_byte(token_id) else piece.replace(_SPACE, " ")

    def _display(self, token_id: int) -> str:
        return self._model.id_to_piece(token_id).replace(_SPACE, " ")


def load_sentencepiece(config: TokenizerConfig, files: Mapping[str, bytes]) -> Tokenizer:
    return SentencePieceTokenizer(config, files)


def sentencepiece_special_tokens(base_size: int, fixed_command_tokens: bool) -> tuple[SpecialTokens, int]:
    """Ids as in the released Chinese models, whose .model has 50000 pieces, and the vocabulary size.

    Without `fixed_command_tokens` gMASK has the id of eop, as in GLM-10B-Chinese. Id base_size + 5 is unused.
    """
    after_eop = ("smask", "gmask", "dblock") if fixed_command_tokens else ("smask", "dblock")
    offsets = {"pad": 0, "eos": 0, "sep": 1, "cls": 2, "mask": 3, "unk": 4, "sop": 6, "eop": 7, "gmask": 7}
    offsets |= {role: 8 + i for i, role in enumerate(after_eop)}
    special = SpecialTokens(**{role: base_size + offset for role, offset in offsets.items()})
    return special, special.dblock + 1
