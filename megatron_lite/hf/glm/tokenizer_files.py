"""Writes the tokenizer of a GLM run for transformers, and compares the ids of both.

The original files are copied to `training_tokenizer/`: a run that continues from the export needs a tokenizer with the
fingerprint that its corpora record.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers, processors

from data_utils.common.errors import CheckpointError
from data_utils.tokenizers.library_tokenizer import HuggingFaceTokenizer, special_token
from data_utils.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from data_utils.tokenizers.tokenizer import Tokenizer, TokenizerConfig, read_files
from megatron_lite.hf.common.verify_tokenizer import TokenizerComparison, awkward_texts
from megatron_lite.hf.common.weights import TRAINING_TOKENIZER
from megatron_lite.hf.glm.tokenization_glm import (
    JOIN,
    MARKERS,
    GLMSentencePieceTokenizer,
    GLMTokenizerFast,
)

# Encoded by both tokenizers in the comparison: case, accents, white space, punctuation, blanks, other scripts.
SAMPLE_TEXTS = (
    "Paris is the [MASK] of France.",
    "  Two spaces,\ta tab\nand a newline. [sMASK] It ends here: [gMASK]",
    "naïve café — “quotes” 1,234.5 x^2 #tag @name C++ (braces) [brackets] <angles>",
    "自然语言处理很有趣。北京是[MASK]的首都吗？ مرحبا Привет 😀",  # noqa: RUF001
    "",
)


def write_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> str:
    """Write `tokenizer` for transformers, and its original files. Returns: the name of its class.

    Raises: DataError if transformers would give other ids.
    """
    files = read_files(tokenizer.config)
    originals = directory / TRAINING_TOKENIZER
    originals.mkdir(parents=True)
    for name, content in files.items():
        (originals / ("tokenizer.model" if name == "model" else name)).write_bytes(content)
    names = {
        f"{role}_token": tokenizer.special_names[token_id]
        for role, token_id in asdict(tokenizer.special).items()
    }
    options: dict[str, Any] = {**names, "model_max_length": max_length, "padding_side": "left"}
    if tokenizer.adds_space:
        options["after_blank"] = JOIN
    exported: GLMTokenizerFast | GLMSentencePieceTokenizer
    if isinstance(tokenizer, SentencePieceTokenizer):
        added = {
            i: special_token(name)
            for i, name in tokenizer.special_names.items()
            if i in _special_ids(tokenizer)
        }
        exported = GLMSentencePieceTokenizer(
            str(originals / "tokenizer.model"), added_tokens_decoder=added, **options
        )
    else:
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        exported = GLMTokenizerFast(tokenizer_object=_glm_backend(tokenizer), **options)
    exported.save_pretrained(directory)
    return type(exported).__name__


def training_tokenizer(config: TokenizerConfig, directory: Path) -> dict[str, Any]:
    """The `tokenizer` section of a configuration that uses the original files copied to `directory`."""
    path = directory / "tokenizer.model" if config.kind == "sentencepiece" else directory
    return {**asdict(config), "path": str(path)}


def exported_tokenizer(tokenizer: Tokenizer, directory: Path) -> GLMTokenizerFast | GLMSentencePieceTokenizer:
    """A directory's tokenizer, of the class for a run's tokenizer."""
    cls = GLMSentencePieceTokenizer if isinstance(tokenizer, SentencePieceTokenizer) else GLMTokenizerFast
    return cls.from_pretrained(directory)


def compare_glm_tokenizer(tokenizer: Tokenizer, directory: Path) -> TokenizerComparison:
    """Compare the special ids, and the tokens of texts that are hard to encode.

    Texts that spell special tokens other than blanks are left out: transformers reads these as tokens.
    Raises: CheckpointError where the tokenizers differ.
    """
    exported = exported_tokenizer(tokenizer, directory)
    for role, token_id in asdict(tokenizer.special).items():
        actual = getattr(exported, f"{role}_token_id")
        if actual != token_id:
            raise CheckpointError(
                f"{directory}: the exported tokenizer gives {role} id {actual} instead of {token_id}."
            )
    names = {*tokenizer.special_names.values()} - set(MARKERS)
    texts = [*SAMPLE_TEXTS, *(text for text in awkward_texts() if not any(name in text for name in names))]
    for text in texts:
        expected = [tokenizer.special.cls, *tokenizer.encode_with_specials(text), tokenizer.special.eos]
        actual = exported(text, verbose=False)["input_ids"]  # no warning if the model takes fewer tokens
        if actual != expected:
            raise CheckpointError(
                f"{directory}: the exported tokenizer encodes {text!r} as {actual}, the run as {expected}."
            )
    return TokenizerComparison(type(exported).__name__, len(texts), 0, 0, None)


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    return set(asdict(tokenizer.special).values())


def _glm_backend(tokenizer: HuggingFaceTokenizer) -> tokenizers.Tokenizer:
    """The training tokenizer, changed to find special tokens in texts and to put [CLS] and eos around them."""
    names = {token_id: tokenizer.special_names[token_id] for token_id in _special_ids(tokenizer)}
    backend = tokenizer.with_visible_specials(names)
    if tokenizer.adds_space:
        removed = pre_tokenizers.Split(tokenizer.word_marks.mark + JOIN, "removed")
        own = [] if backend.pre_tokenizer is None else [backend.pre_tokenizer]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*own, removed])
    special = tokenizer.special
    cls, eos = tokenizer.special_names[special.cls], tokenizer.special_names[special.eos]
    backend.post_processor = processors.TemplateProcessing(
        single=[cls, "$A", eos],
        pair=[cls, "$A", "$B", eos],
        special_tokens=[(cls, special.cls), (eos, special.eos)],
    )
    return backend
