"""A tokenizer.json of the library `tokenizers` -> tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import tokenizers

from data_utils.common.errors import DataError
from data_utils.common.setting_files import one_line, shown
from data_utils.tokenizers.library_tokenizer import HIDDEN, HuggingFaceTokenizer
from data_utils.tokenizers.published_tokens import named_roles
from data_utils.tokenizers.tokenizer import Tokenizer
from data_utils.tokenizers.tokenizer_readers import (
    TokenizerConfig,
    check_byte_alphabet,
    check_unique,
    check_vocab,
    merge_results,
    model_vocab,
    parse_json,
)


def load_hf_json(config: TokenizerConfig, files: Mapping[str, bytes]) -> Tokenizer:
    path = Path(config.path)
    tree = parse_json(files["tokenizer.json"], path)
    model, added = tree.get("model"), tree.get("added_tokens") or []
    if not isinstance(model, dict) or not isinstance(added, list):
        raise DataError(
            f"{path}: model or added_tokens is missing; give a tokenizer.json of the tokenizers library."
        )
    ids = model_vocab(model, path)
    for token in added:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise DataError(f"{path}: added token {str(token)[:50]!r} has no content; the file is damaged.")
        if ids.get(token["content"], token.get("id")) != token.get("id"):
            raise DataError(
                f"{path}: {token['content'][:50]!r} has the ids {ids[token['content']]} and {token.get('id')}; "
                "remove one."
            )
        ids[token["content"]] = token.get("id")
    check_vocab(ids, path)
    check_unique(ids, path)

    added_names = {token["content"] for token in added}
    # A text that spells a special token has other tokens for it, so none may be what texts are made of.
    text = merge_results(model, path) | {name for name in ids if len(name) == 1}
    candidates = (ids.keys() - text) | added_names
    role_names, unused = named_roles(candidates, model.get("type") == "BPE", config.added_tokens)
    for role, name in config.roles.items():
        if name not in added_names:
            raise DataError(
                f"tokenizer.roles.{role} is {shown(name)}, which is no added token of {path}; take one of its "
                "added_tokens, or leave the role out."
            )
    role_names |= config.roles
    hidden = {token["content"] for token in added if token.get("special")} | set(role_names.values()) | unused
    if hidden & text:
        raise DataError(f"{path}: special token {min(hidden & text)!r} is also ordinary text; rename it.")

    backend = _hidden_backend(tree, hidden, path)
    for name in added_names:  # the library numbers added tokens itself, without gaps
        actual = backend.token_to_id(HIDDEN + name if name in hidden else name)
        if actual != ids[name]:
            raise DataError(
                f"{path}: {name!r} has id {ids[name]} but loads as {actual}; close the gaps in the ids."
            )
    _check_alike(backend, added, hidden, path)
    byte_level = "ByteLevel" in json.dumps(tree.get("pre_tokenizer"))
    if model.get("type") == "BPE" and byte_level and not model.get("unk_token"):
        check_byte_alphabet(ids, path)
    return HuggingFaceTokenizer(config, files, backend, ids, role_names, hidden)


def _check_alike(
    backend: tokenizers.Tokenizer, added: list[dict[str, Any]], hidden: set[str], path: Path
) -> None:
    """Raise DataError for added tokens that the normalizer makes equal: the library takes one by chance."""
    if backend.normalizer is None:
        return
    seen: dict[str, str] = {}
    for name in (token["content"] for token in added if token.get("normalized", not token.get("special"))):
        other = name if name in hidden else seen.setdefault(backend.normalizer.normalize_str(name), name)
        if other != name:
            raise DataError(
                f"{path}: the added tokens {other[:50]!r} and {name[:50]!r} are equal after normalization, so the "
                "id of such text is undefined; remove one, or set its normalized to false."
            )


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
        # A model that lacks its unknown token fails here, not later in a corpus.
        backend.encode("a \U0010fffd")
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"{path}: the tokenizers library cannot use this file: {one_line(error)}; download it again."
        ) from None
    return backend
