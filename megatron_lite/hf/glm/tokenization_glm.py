"""Tokenizers of GLM for transformers. Part of an export's code.

`GLMTokenizerFast` holds a WordPiece or byte-level BPE vocabulary (tokenizer.json),
`GLMSentencePieceTokenizer` a SentencePiece model (tokenizer.model; needs the sentencepiece package). In both,
[MASK], [sMASK] and [gMASK] in a text mark blanks. Spaces before a blank are dropped, since the predicted span begins
with one, and a tokenizer that puts a space before every text puts none after a blank. A text is wrapped in [CLS] and
the end-of-text token.

`build_inputs_for_generation`, `build_inputs_for_training` and `build_inputs_for_multiple_choice` append part
B: sop and span for each blank, with the two position ids.
"""

# transformers annotates its base classes more narrowly than it lets them be used.
# mypy: ignore-errors

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import BatchEncoding, PreTrainedTokenizer, PreTrainedTokenizerFast

MARKERS = {"[MASK]": "mask_token", "[sMASK]": "smask_token", "[gMASK]": "gmask_token"}
_OWN_ROLES = ("smask_token", "gmask_token", "sop_token", "eop_token", "dblock_token")
NO_LABEL = -100
# A noncharacter that follows a blank where the tokenizer puts a space before every text: it takes that space.
JOIN = "\ufdd1"
# With a JOIN: transformers marks the texts of a list twice.
_MARKER = re.compile(f" *({'|'.join(map(re.escape, MARKERS))}){JOIN}?")


class GLMTokenizationMixin:
    """Blanks in texts, and part B, for both tokenizers."""

    padding_side = "left"
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012  what transformers expects here

    @property
    def blank_token_ids(self) -> set[int]:
        """The ids that stand for a blank."""
        return {self.mask_token_id, self.smask_token_id, self.gmask_token_id}

    def _mark_blanks(self, text):
        """The text with this vocabulary's names of blanks, without spaces before them; also in nested lists."""
        if isinstance(text, str):
            after = self.init_kwargs.get("after_blank", "")
            return _MARKER.sub(lambda match: str(getattr(self, MARKERS[match[1]])) + after, text)
        if isinstance(text, (list, tuple)):
            return type(text)(self._mark_blanks(item) for item in text)
        return text

    def __getattr__(self, name):
        """Tokens of roles that transformers does not know; version 4 keeps these in `init_kwargs` only."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            token = self.__dict__.get("init_kwargs", {}).get(name.removesuffix("_id"))
            if name.removesuffix("_id") not in _OWN_ROLES or token is None:
                raise
            return self.convert_tokens_to_ids(str(token)) if name.endswith("_id") else str(token)

    def _encode_plus(self, text, text_pair=None, **kwargs) -> BatchEncoding:
        return super()._encode_plus(self._mark_blanks(text), text_pair=self._mark_blanks(text_pair), **kwargs)

    # Version 4 calls this for several texts; version 5 has one method.
    def _batch_encode_plus(self, batch_text_or_text_pairs, **kwargs) -> BatchEncoding:
        return super()._batch_encode_plus(self._mark_blanks(batch_text_or_text_pairs), **kwargs)

    # Part B

    def build_inputs_for_generation(
        self, encoded: BatchEncoding, spans: Sequence[Sequence[Sequence[int]]] | None = None
    ) -> BatchEncoding:
        """Inputs of `generate` for the next blank of each text.

        Args:
            encoded: what the tokenizer returned for the texts, padded or not.
            spans: for each text, the token ids that fill its first blanks; None = the first blank is next.
        Returns: int64 tensors [B, S], padded on the left: input_ids (ending in sop), attention_mask, position_ids,
            block_position_ids.
        Raises: ValueError for a text without a blank that is left to fill.
        """
        texts = self._parts_a(encoded)
        spans = [[]] * len(texts) if spans is None else spans
        examples = [
            self._example(text, filled, open_next=True) for text, filled in zip(texts, spans, strict=True)
        ]
        inputs = self._padded(examples)
        del inputs["labels"]
        return inputs

    def build_inputs_for_training(
        self, encoded: BatchEncoding, targets: Sequence[Sequence[str]]
    ) -> BatchEncoding:
        """Inputs and labels for the spans `targets`, for each text one string per blank, in text order.

        Returns: as build_inputs_for_generation, and labels [B, S] (not shifted, -100 = no loss).
        """
        examples = []
        for text, strings in zip(self._parts_a(encoded), targets, strict=True):
            blanks = sum(token in self.blank_token_ids for token in text)
            if len(strings) != blanks:
                raise ValueError(f"a text has {blanks} blanks but {len(strings)} targets; give one for each.")
            spans = [self.encode(string, add_special_tokens=False) for string in strings]
            examples.append(self._example(text, spans))
        return self._padded(examples)

    def build_inputs_for_multiple_choice(
        self, encoded: BatchEncoding, choices: Sequence[Sequence[str]]
    ) -> BatchEncoding:
        """Inputs that score each choice in the only blank of its text. Every text has the same number of choices.

        Returns: int64 tensors [B, C, S]: input_ids, attention_mask, position_ids, block_position_ids, choice_labels.
        """
        texts = self._parts_a(encoded)
        if len(texts) != len(choices) or len({len(options) for options in choices}) != 1:
            raise ValueError("give one list of choices per text, all of one length.")
        flat = [(text, option) for text, options in zip(texts, choices, strict=True) for option in options]
        examples = [
            self._example(text, [self.encode(option, add_special_tokens=False)]) for text, option in flat
        ]
        inputs = self._padded(examples)
        inputs["choice_labels"] = inputs.pop("labels")
        return BatchEncoding({name: x.view(len(texts), -1, x.shape[-1]) for name, x in inputs.items()})

    def _parts_a(self, encoded: BatchEncoding) -> list[list[int]]:
        """Token ids of each text without padding. A text whose final [gMASK] is to be continued has no end token."""
        sequences = [ids.tolist() if isinstance(ids, torch.Tensor) else ids for ids in encoded["input_ids"]]
        masks = encoded.get("attention_mask")
        if sequences and isinstance(sequences[0], int):  # one text, not a list of texts
            sequences, masks = [sequences], None if masks is None else [masks]
        continued = [self.gmask_token_id, self.eos_token_id]
        texts = []
        for i, tokens in enumerate(sequences):
            is_token = [True] * len(tokens) if masks is None else [bool(x) for x in masks[i]]
            text = [token for token, keep in zip(tokens, is_token, strict=True) if keep]
            is_open = self.gmask_token_id != self.mask_token_id and text[-2:] == continued
            texts.append(text[:-1] if is_open else text)
        return texts

    def _example(
        self, text: list[int], spans: Sequence[Sequence[int]], open_next: bool = False
    ) -> dict[str, list[int]]:
        """Part A, and the spans of its first blanks as part B. Args: open_next: end in sop, for the next blank."""
        if len(text) > self.model_max_length:
            raise ValueError(
                f"a text has {len(text)} tokens with [CLS] and the end, but the model has positions for "
                f"{self.model_max_length}; shorten it by {len(text) - self.model_max_length} tokens."
            )
        blanks = [position for position, token in enumerate(text) if token in self.blank_token_ids]
        if len(spans) + open_next > len(blanks):
            raise ValueError(f"a text has {len(blanks)} blanks; mark more with [MASK], [sMASK] or [gMASK].")
        example = {
            "input_ids": list(text),
            "position_ids": list(range(len(text))),
            "block_position_ids": [0] * len(text),
            "labels": [NO_LABEL] * len(text),
        }
        inputs = [[self.sop_token_id, *span] for span in spans] + [[self.sop_token_id]] * open_next
        for tokens, blank in zip(inputs, blanks, strict=False):
            example["input_ids"] += tokens
            example["position_ids"] += [blank] * len(tokens)
            example["block_position_ids"] += range(1, len(tokens) + 1)
            example["labels"] += [*tokens[1:], self.eop_token_id]
        return example

    def _padded(self, examples: list[dict[str, list[int]]]) -> BatchEncoding:
        """Tensors [B, S] of the examples, padded on the left, and their attention_mask."""
        fill = {
            "input_ids": self.pad_token_id,
            "position_ids": 0,
            "block_position_ids": 0,
            "labels": NO_LABEL,
        }
        lengths = [len(example["input_ids"]) for example in examples]
        longest = max(lengths)
        inputs = {
            name: torch.tensor([[value] * (longest - len(each[name])) + each[name] for each in examples])
            for name, value in fill.items()
        }
        inputs["attention_mask"] = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths])
        return BatchEncoding(inputs)


class GLMTokenizerFast(GLMTokenizationMixin, PreTrainedTokenizerFast):
    """WordPiece or BPE from a tokenizer.json that holds every special token."""


class GLMSentencePieceTokenizer(GLMTokenizationMixin, PreTrainedTokenizer):
    """A SentencePiece model; the special tokens follow its last piece, as listed in tokenizer_config.json."""

    vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012

    def __init__(self, vocab_file: str, **kwargs):
        try:
            import sentencepiece
        except ImportError:
            raise ImportError(
                "this GLM tokenizer needs the sentencepiece package: pip install sentencepiece"
            ) from None
        self.vocab_file = vocab_file
        self._model = sentencepiece.SentencePieceProcessor(model_file=str(vocab_file))
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        """Pieces of the model, without special tokens."""
        return self._model.get_piece_size()

    def get_vocab(self) -> dict[str, int]:
        pieces = {self._model.id_to_piece(i): i for i in range(self.vocab_size)}
        return {**pieces, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **kwargs) -> list[str]:
        rest = text.removeprefix(JOIN)
        # A letter before the rest takes the space, unless it becomes one piece with what follows.
        for letter in "ax1" if rest != text else "":
            alone, both = (self._model.encode(each, out_type=str) for each in (letter, letter + rest))
            if both[: len(alone)] == alone:
                return both[len(alone) :]
        return self._model.encode(rest, out_type=str)

    def _convert_token_to_id(self, token: str) -> int:
        return self._model.piece_to_id(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._model.id_to_piece(index) if index < self.vocab_size else f"[reserved {index}]"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        texts: list[str] = []
        pieces: list[str] = []
        for token in [*tokens, None]:
            if token is not None and token not in self.added_tokens_encoder:
                pieces.append(token)
                continue
            if pieces:
                # The library drops the leading space, which is right only at the start of a text.
                lost_space = " " if texts and pieces[0].startswith("▁") else ""
                texts.append(lost_space + self._model.decode_pieces(pieces))
                pieces = []
            texts.append(token or "")
        return "".join(texts)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [self.cls_token_id, *token_ids_0, *(token_ids_1 or []), self.eos_token_id]

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        name = self.vocab_files_names["vocab_file"]
        target = Path(save_directory) / (f"{filename_prefix}-{name}" if filename_prefix else name)
        if Path(self.vocab_file).resolve() != target.resolve():
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)


GLMTokenizerFast.register_for_auto_class("AutoTokenizer")
GLMSentencePieceTokenizer.register_for_auto_class("AutoTokenizer")
