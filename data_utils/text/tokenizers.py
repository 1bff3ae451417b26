"""One interface over BERT WordPiece, GPT-2 BPE, SentencePiece and Hugging Face tokenizer.json files.

special_tokens.py decides which ids the special tokens have. Text never becomes a special token: the literal "[MASK]" or
"<|endoftext|>" in a document is encoded with ordinary tokens, so a corpus cannot insert a mask or end a document. Only
`encode_with_specials`, meant for generation prompts, gives [MASK], [sMASK] and [gMASK] their ids.

Trade-offs: the libraries `tokenizers` and `sentencepiece` define the ids, so they agree with other users of the same
files; fast/encoders.py gives the same ids faster where it can. A tokenizer holds native objects and cannot be pickled,
so a worker calls `load_tokenizer` itself. `encode_batch` releases the GIL and uses one thread. The exception is the
`tokenizers` library, which uses all cores. A program with one worker per core should set TOKENIZERS_PARALLELISM=false
in the environment before the first encode.
"""

from __future__ import annotations

import abc
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from data_utils.base.errors import DataError
from data_utils.base.setting_files import one_line
from data_utils.text.fast.encoders import library_or_faster
from data_utils.text.fast.library_encoders import Encoder, SentencePieceEncoder, without_lone_surrogates
from data_utils.text.special_tokens import (
    ROBERTA_NAMES,
    SPECIAL_NAMES,
    SpecialTokens,
    added_to_published,
    all_special_names,
    assign_special_tokens,
    named_roles,
    own_special_tokens,
    roberta_roles,
    sentencepiece_special_tokens,
)
from data_utils.text.tokenizer_readers import (
    TokenizerConfig,
    check_byte_alphabet,
    check_vocab,
    decode_utf8,
    merge_results,
    model_vocab,
    parse_json,
    parse_merges,
    read_files,
)

PROMPT_MARKERS = {"[MASK]": "mask", "[sMASK]": "smask", "[gMASK]": "gmask"}

SENTENCE_ENDS = tuple(".?!;:。．｡？！；：…\n")  # noqa: RUF001
# These may follow the end of a sentence inside the same token.
CLOSERS = " \t\"')]}»”’）］｝】》〉」』"  # noqa: RUF001

FINGERPRINT_SCHEME = "glm-tokenizer-1"  # change it when the same files give other ids
# A noncharacter, put before special names inside the `tokenizers` library, so that no text equals one.
HIDDEN = "\ufdd0"


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Read the files of `config` and build the tokenizer.

    Raises: DataError if a file is missing, too large, damaged or unusable; the message names the file.
    """
    loaders = {
        "bert_wordpiece": _load_bert_wordpiece,
        "gpt2_bpe": _load_gpt2_bpe,
        "gpt_bpe": _load_gpt_bpe,
        "sentencepiece": SentencePieceTokenizer,
        "hf_json": _load_hf_json,
    }
    return loaders[config.kind](config, read_files(config))


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
        """Encode many texts.

        Returns: the ids of all texts in one int32 array, and the number of ids of each text as int64.
        A lone surrogate, which UTF-8 cannot hold, is encoded as U+FFFD.
        """
        return self._encoder.encode(texts)

    @abc.abstractmethod
    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode`, and for each token the first character of `text` that it stands for and the end, maybe the same."""

    def encode_with_specials(self, text: str) -> list[int]:
        """`encode`, except that [MASK], [sMASK] and [gMASK] become their ids.

        Spaces before a marker are dropped, because a predicted span has its own leading space.
        """
        parts = re.split("(" + "|".join(map(re.escape, PROMPT_MARKERS)) + ")", text)
        ids = []
        for i in range(0, len(parts) - 1, 2):  # text, marker, text, marker, ..., text
            ids += self.encode(parts[i].rstrip(" "))
            ids.append(getattr(self.special, PROMPT_MARKERS[parts[i + 1]]))
        return ids + self.encode(parts[-1])

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; special tokens appear by name, or not at all with `skip_special`.

        The inverse of `encode` for byte-level BPE; WordPiece and SentencePiece normalise text on the way in.
        Raises: ValueError for an id outside 0 .. vocab_size - 1.
        """
        ids = self._checked(ids)
        if skip_special:
            ids = [i for i in ids if i not in self.special_names]
        parts: list[str] = []
        for is_special, group in itertools.groupby(ids, key=self.special_names.__contains__):
            if is_special:
                parts.extend(self.special_names[i] for i in group)
            else:
                parts.append(self._decode_text(list(group), at_start=not parts))
        return self._separator.join(parts)

    def token_to_text(self, token_id: int) -> str:
        """One token for display: a special token's name, else its text, which may be part of a character."""
        (token_id,) = self._checked([token_id])
        return self.special_names.get(token_id) or self._display(token_id)

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
                f"tokenizer.vocab_size is {config.vocab_size}, but {config.path} has {size} tokens with those of "
                f"added_tokens {config.added_tokens}; set it to {size} or more, or to null."
            )
        self.special_names = all_special_names(
            self.special, self.lacking, names, self.vocab_size, ids_in_files
        )
        own = range(max(ids_in_files) + 1, self.num_tokens)
        self.added_names = {i: self.special_names[i] for i in own if i in self.special_names}

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
    def _token_text(self, token_id: int) -> str: ...

    @abc.abstractmethod
    def _display(self, token_id: int) -> str: ...


# ---- the `tokenizers` library: WordPiece, BPE, tokenizer.json ----


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
        self.fingerprint = _fingerprint(config, files, options)
        known = {role: ids[name] for role, name in role_names.items()}
        names = {ids[name]: name for name in (*hidden, *role_names.values())}
        glm = assign_special_tokens(known, max(ids.values()) + 1)
        self._set_vocabulary(known, glm, dict(names), set(ids.values()))
        self._backend = backend
        self._encoder = library_or_faster(backend, [*names.values(), *map(str, hidden)])
        self._is_forbidden = np.zeros(self.vocab_size, dtype=bool)
        self._is_forbidden[list(names)] = True
        # Decoded words have spaces between them.
        if backend.decoder is None or isinstance(backend.decoder, (decoders.WordPiece, decoders.BPEDecoder)):
            self._separator = " "

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = self._encoder.encode(texts)
        # [UNK], or text that spells a hidden name, prefix included
        ids[self._is_forbidden[ids]] = self.special.unk
        return ids, lengths

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self._backend.encode(without_lone_surrogates(text), add_special_tokens=False)
        return [self.special.unk if self._is_forbidden[i] else i for i in encoded.ids], encoded.offsets

    def _decode_text(self, ids: list[int], at_start: bool) -> str:
        text = self._backend.decode(ids, skip_special_tokens=False)
        # A Metaspace decoder drops the leading space, which is right at the start of a text only.
        lost_space = not at_start and str(self._backend.id_to_token(ids[0])).startswith("▁")
        return " " + text if lost_space and not text.startswith(" ") else text

    def _token_text(self, token_id: int) -> str:
        return self._backend.decode([token_id], skip_special_tokens=False)

    def _display(self, token_id: int) -> str:
        text = self._token_text(token_id)
        return text if text and "\ufffd" not in text else str(self._backend.id_to_token(token_id))


def _load_bert_wordpiece(config: TokenizerConfig, files: Mapping[str, bytes]) -> Tokenizer:
    path = Path(config.path)
    # Not splitlines(): U+2028 and U+0085 are tokens of some vocabularies.
    lines = decode_utf8(files["vocab.txt"], path).replace("\r\n", "\n").removesuffix("\n").split("\n")
    ids = {token: i for i, token in enumerate(lines)}
    if len(ids) != len(lines):
        again = next(token for i, token in enumerate(lines) if ids[token] != i)
        raise DataError(f"{path}: token {again!r} appears twice; a vocab.txt holds each token on one line.")
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


def _load_gpt2_bpe(config: TokenizerConfig, files: Mapping[str, bytes]) -> Tokenizer:
    ids, path = _vocab_json(config, files), Path(config.path)
    role_names, unused = _gpt2_roles(ids.keys(), path, config.added_tokens)
    check_byte_alphabet(ids, path)
    backend = _bpe(config, files, ids)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return HuggingFaceTokenizer(config, files, backend, ids, role_names, unused)


def _load_gpt_bpe(config: TokenizerConfig, files: Mapping[str, bytes]) -> Tokenizer:
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
        raise DataError(f"{path}: ids in vocab.json must be 0 .. {len(ids) - 1}, each once; fetch it again.")
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
            f"{path}: vocab.json and merges.txt do not belong together: {one_line(error)}; fetch both from one model."
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


def _load_hf_json(config: TokenizerConfig, files: Mapping[str, bytes]) -> Tokenizer:
    path = Path(config.path)
    tree = parse_json(files["tokenizer.json"], path)
    model, added = tree.get("model"), tree.get("added_tokens") or []
    if not isinstance(model, dict) or not isinstance(added, list):
        raise DataError(
            f"{path}: no model and added_tokens; give a tokenizer.json of the tokenizers library."
        )
    ids = model_vocab(model, path)
    for token in added:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise DataError(f"{path}: added token {str(token)[:50]!r} has no content; the file is damaged.")
        ids[token["content"]] = token.get("id")
    check_vocab(ids, path)

    added_names = {token["content"] for token in added}
    merged = merge_results(model, path)
    candidates = (ids.keys() - merged) | added_names
    role_names, unused = named_roles(candidates, model.get("type") == "BPE", config.added_tokens)
    hidden = {token["content"] for token in added if token.get("special")} | set(role_names.values()) | unused
    if hidden & merged:
        raise DataError(f"{path}: special token {min(hidden & merged)!r} is also a merge result; rename it.")

    backend = _hidden_backend(tree, hidden, path)
    for name in added_names:  # the library numbers added tokens itself, without gaps
        actual = backend.token_to_id(HIDDEN + name if name in hidden else name)
        if actual != ids[name]:
            raise DataError(
                f"{path}: {name!r} has id {ids[name]} but loads as {actual}; close the gaps in the ids."
            )
    byte_level = "ByteLevel" in json.dumps(tree.get("pre_tokenizer"))
    if model.get("type") == "BPE" and byte_level and not model.get("unk_token"):
        check_byte_alphabet(ids, path)
    return HuggingFaceTokenizer(config, files, backend, ids, role_names, hidden)


def _hidden_backend(tree: Mapping[str, Any], hidden: set[str], path: Path) -> tokenizers.Tokenizer:
    """The pipeline of a tokenizer.json, names in `hidden` prefixed, without template, truncation, padding."""

    def hide(name: Any) -> Any:
        return HIDDEN + name if isinstance(name, str) and name in hidden else name

    model = dict(tree["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hide(name): token_id for name, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[hide(piece), score] for piece, score in model["vocab"]]
    if "unk_token" in model:
        model["unk_token"] = hide(model["unk_token"])
    if "dropout" in model:
        model["dropout"] = None  # one text, one encoding
    added = [
        {**token, "content": hide(token["content"]), "special": token["content"] in hidden}
        for token in tree.get("added_tokens") or []
    ]
    changed = {
        "truncation": None,
        "padding": None,
        "post_processor": None,
        "model": model,
        "added_tokens": added,
    }
    try:
        backend = tokenizers.Tokenizer.from_str(orjson.dumps({**tree, **changed}).decode())
        backend.encode_special_tokens = True  # special tokens are not looked for in text
        backend.encode(
            "a \U0010fffd"
        )  # a model that lacks its unknown token fails here, not later in a corpus
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"{path}: the tokenizers library cannot use this file: {one_line(error)}; fetch it again."
        ) from None
    return backend


# ---- SentencePiece ----


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. GLM's special tokens follow its last id; published ones are control pieces of the model.

    Text reaches neither.
    """

    def __init__(self, config: TokenizerConfig, files: Mapping[str, bytes]):
        self.config = config
        self.fingerprint = _fingerprint(config, files, {"fixed_command_tokens": config.fixed_command_tokens})
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

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self._model.encode(without_lone_surrogates(text), return_type="offset_mapping")
        return found["ids"], found["offsets"]

    def _decode_text(self, ids: list[int], at_start: bool) -> str:
        text = self._model.decode(ids)
        # The library drops the leading space, which is right at the start of a text only.
        return text if at_start or not self._model.id_to_piece(ids[0]).startswith("▁") else " " + text

    def _token_text(self, token_id: int) -> str:
        piece = self._model.id_to_piece(token_id)
        return chr(int(piece[1:-1], 16)) if self._model.is_byte(token_id) else piece.replace("▁", " ")

    def _display(self, token_id: int) -> str:
        return self._model.id_to_piece(token_id).replace("▁", " ")


# ---- shared ----


def _fingerprint(
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
