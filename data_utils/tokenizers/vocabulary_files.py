"""A vocab.txt of BERT, or a vocab.json with merges.txt (GPT-2, RoBERTa, GPT) -> tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from data_utils.common.errors import DataError
from data_utils.common.setting_files import one_line
from data_utils.tokenizers.library_tokenizer import HuggingFaceTokenizer
from data_utils.tokenizers.published_tokens import roberta_roles
from data_utils.tokenizers.special_tokens import ROBERTA_NAMES, SPECIAL_NAMES
from data_utils.tokenizers.tokenizer import Tokenizer
from data_utils.tokenizers.tokenizer_readers import (
    TokenizerConfig,
    check_byte_alphabet,
    check_vocab,
    decode_utf8,
    parse_json,
    parse_merges,
)


def load_bert_wordpiece(config: TokenizerConfig, files: Mapping[str, bytes]) -> Tokenizer:
    path = Path(config.path)
    # Not splitlines(): U+2028 and U+0085 are tokens of some vocabularies.
    lines = decode_utf8(files["vocab.txt"], path).replace("\r\n", "\n").removesuffix("\n").split("\n")
    ids = {token: i for i, token in enumerate(lines)}
    if len(ids) != len(lines):
        again = next(token for i, token in enumerate(lines) if ids[token] != i)
        raise DataError(
            f"{path}: token {again!r} appears twice; each token of a vocab.txt must be on its own line."
        )
    role_names = {role: SPECIAL_NAMES[role] for role in ("pad", "unk", "cls", "sep", "mask")}
    missing = [name for name in role_names.values() if name not in ids]
    if missing:
        raise DataError(
            f"{path}: no {', '.join(missing)} in {len(ids)} tokens; give the vocab.txt of a BERT model."
        )
    word_piece = models.WordPiece(ids, unk_token=role_names["unk"], max_input_chars_per_word=100)
    backend = tokenizers.Tokenizer(word_piece)
    backend.normalizer = normalizers.BertNormalizer(lowercase=config.lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # isolates brackets: no word is "[MASK]"
    backend.decoder = decoders.WordPiece(prefix="##")
    return HuggingFaceTokenizer(config, files, backend, ids, role_names)


def load_gpt2_bpe(config: TokenizerConfig, files: Mapping[str, bytes]) -> Tokenizer:
    ids, path = _vocab_json(config, files), Path(config.path)
    role_names, unused = _gpt2_roles(ids.keys(), path, config.added_tokens)
    check_byte_alphabet(ids, path)
    backend = _bpe(config, files, ids)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return HuggingFaceTokenizer(config, files, backend, ids, role_names, unused)


def load_gpt_bpe(config: TokenizerConfig, files: Mapping[str, bytes]) -> Tokenizer:
    """GPT's: lower case, BERT's words, and a mark at the end of each word instead of a space before it."""
    ids, path, end = _vocab_json(config, files), Path(config.path), "</w>"
    if "<unk>" not in ids or not any(name.endswith(end) for name in ids):
        raise DataError(
            f"{path}: vocab.json has no <unk> or no token that ends in {end}; gpt_bpe is for the vocabulary of GPT: "
            "use kind gpt2_bpe for that of GPT-2."
        )
    backend = _bpe(config, files, ids, unk_token="<unk>", end_of_word_suffix=end)
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix=end)
    return HuggingFaceTokenizer(config, files, backend, ids, {"unk": "<unk>"})


def _vocab_json(config: TokenizerConfig, files: Mapping[str, bytes]) -> dict[str, int]:
    path = Path(config.path)
    ids = parse_json(files["vocab.json"], path / "vocab.json")
    check_vocab(ids, path / "vocab.json")
    if sorted(ids.values()) != list(range(len(ids))):
        raise DataError(
            f"{path}: ids in vocab.json must be 0 .. {len(ids) - 1}, each once; download it again."
        )
    return ids


def _bpe(
    config: TokenizerConfig, files: Mapping[str, bytes], ids: dict[str, int], **options: str
) -> tokenizers.Tokenizer:
    path = Path(config.path)
    merges = parse_merges(decode_utf8(files["merges.txt"], path / "merges.txt"), path)
    try:
        return tokenizers.Tokenizer(models.BPE(ids, merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"{path}: vocab.json and merges.txt do not belong together: {one_line(error)}; download both from the "
            "same model."
        ) from None


def _gpt2_roles(names: Set[str], path: Path, added_tokens: str) -> tuple[dict[str, str], Set[str]]:
    """Role -> name in a vocab.json of GPT-2 or RoBERTa, and names there that are neither text nor a role."""
    if names >= set(ROBERTA_NAMES.values()):
        return roberta_roles(names, added_tokens)
    eos, other = SPECIAL_NAMES["eos"], sorted(names & set(ROBERTA_NAMES.values()))
    if eos in names and not other:
        return {"eos": eos}, set()
    has = (
        f"has {', '.join(other)} but not {', '.join(sorted(set(ROBERTA_NAMES.values()) - names))}"
        if other
        else f"has no {eos}"
    )
    raise DataError(
        f"{path}: vocab.json {has}; gpt2_bpe is for the vocabulary of GPT-2 or RoBERTa: use kind hf_json with this "
        "model's tokenizer.json."
    )
