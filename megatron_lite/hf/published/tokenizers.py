"""Tokenizer files of a published system: copied into a run by an import, and written again by an export."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import processors
from transformers import TokenizersBackend

from data_utils.common.errors import CheckpointError, ConfigError, DataError, UserError
from data_utils.common.setting_files import shown
from data_utils.common.settings import build
from data_utils.tokenizers.library_tokenizer import HuggingFaceTokenizer
from data_utils.tokenizers.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer, read_files
from megatron_lite.hf.files.tokenizer_proof import compare, encoded, load_theirs, tokenizer_proof
from megatron_lite.hf.files.weights import read_json, write_json
from megatron_lite.hf.glm.tokenizer_files import visible_backend
from megatron_lite.hf.published.systems import SYSTEMS_BY_NAME

TOKENIZER_CONFIG = "tokenizer_config.json"
GENERAL = "PreTrainedTokenizerFast"  # the class that reads a tokenizer.json as it is, in versions 4 and 5
_GENERATION = "generation_config.json"  # is kept with them
# Roles of the tokens before and after a text.
_AROUND: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bert": (("cls",), ("sep",)),
    "bart": (("cls",), ("eos",)),
    **dict.fromkeys(("t5", "t5_1_1", "mt5"), ((), ("eos",))),
    "xlnet": ((), ("sep", "cls")),
    **dict.fromkeys(("gpt", "gpt2", "glm4", "glm4_0414", "qwen2", "qwen3"), ((), ())),
    **dict.fromkeys(("llama", "mistral"), (("cls",), ())),
}
Around = tuple[list[int], ...]
_PIECES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "spm.model")
_VOCABULARIES = ("vocab.txt", "vocab.json", *_PIECES, "tokenizer.json")
_FILES = (
    "tokenizer.json", TOKENIZER_CONFIG, "special_tokens_map.json", "vocab.txt", "vocab.json", "merges.txt",
    *_PIECES, "added_tokens.json", "chat_template.jinja", _GENERATION,
)  # fmt: skip
CONVERTED = (
    "tokenizer"  # directory in the kept files: a tokenizer.json of what transformers makes of the others
)


def copy_tokenizer_files(source: Path, directory: Path) -> None:
    for name in _FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in _VOCABULARIES)


def brought_tokenizer(source: Path, directory: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer section that gives the ids of `source`'s AutoTokenizer, from its files copied to `directory`.

    Files are used as they came if they do, so that corpora of the published files fit. Else what transformers makes of
    them (a class's lower case, options of tokenizer_config.json) is written as a tokenizer.json of its own.

    Args: options: of the section, which go over what is found; a kind among them must give the same ids.
    Raises: CheckpointError or ConfigError.
    """
    if not has_tokenizer(source):
        raise ConfigError(
            f"{source} has no tokenizer of a known kind ({', '.join(_VOCABULARIES)}); set tokenizer.kind and "
            "tokenizer.path."
        )
    theirs, kind = load_theirs(source, directory), options.get("kind")
    remedy = "leave tokenizer.kind and its options out."
    if kind is None:
        remedy = f"its class does not read these files: give its own, or set tokenizer_class in {TOKENIZER_CONFIG}."
    refusal: UserError | None = None
    for candidate in _candidates(directory, theirs):
        if kind in (None, candidate["kind"]):
            section = {**candidate, **options}
            try:
                tokenizer = load_tokenizer(build(TokenizerConfig, section, "tokenizer."))
                compare(tokenizer, theirs).require(
                    f"{source} by tokenizer.kind {tokenizer.config.kind}", remedy
                )
                return section
            except (DataError, CheckpointError) as error:
                refusal = refusal or error
    if refusal is None:
        raise ConfigError(f"{source} has no files for tokenizer.kind {shown(kind)}; leave it out.")
    raise refusal


def require_same_ids(key: str, tokenizer: Tokenizer, source: Path, copies: Path) -> None:
    """Raise CheckpointError if a user's own tokenizer gives other ids than the source's.

    Args: key: of its section. copies: as for `load_theirs`.
    """
    if has_tokenizer(source):
        tokenizer_proof(tokenizer, source, copies=copies).require(
            f"{key}.path {tokenizer.config.path}",
            f"leave {key}.path out, or use another tokenizer with --no-verify.",
        )


def _candidates(directory: Path, theirs: TokenizersBackend) -> Iterator[dict[str, str | bool]]:
    """Sections for the files, those first that the corpora of these systems are usually built with."""
    if (directory / "vocab.txt").exists():
        lowercase = bool(theirs.init_kwargs.get("do_lower_case", True))
        yield {"kind": "bert_wordpiece", "path": str(directory / "vocab.txt"), "lowercase": lowercase}
    if (directory / "vocab.json").exists():
        described = read_json(directory / "config.json")
        kind = "gpt_bpe" if described.get("model_type") == "openai-gpt" else "gpt2_bpe"
        yield {"kind": kind, "path": str(directory)}
    if (directory / "tokenizer.json").exists():
        yield {"kind": "hf_json", "path": str(directory / "tokenizer.json")}
    converted = directory / CONVERTED / "tokenizer.json"
    converted.parent.mkdir()
    converted.write_text(theirs.backend_tokenizer.to_str(), encoding="utf-8")
    yield {"kind": "hf_json", "path": str(converted)}
    shutil.rmtree(converted.parent)  # the caller asks for another one: this one is not used
    if (directory / "spiece.model").exists():
        yield {"kind": "sentencepiece", "path": str(directory / "spiece.model")}


def write_tokenizer(
    directory: Path,
    tokenizer: Tokenizer,
    ids: Mapping[str, int],
    kept: Path,
    system: str | None,
    *,
    has_segments: bool,
) -> None:
    """Write files with which the directory's AutoTokenizer gives the run's ids.

    Those that were imported, bit for bit, if they do. Else those of the run's tokenizer, if the class that reads them
    also puts the system's tokens around a text. Else a tokenizer.json for the general class, which changes nothing.

    Args:
        ids: of the special tokens by their names in config.json, which is in the directory.
        kept: files of the import, if there was one.
        has_segments: whether the class is to be given the segment of each token.
    """
    copy_tokenizer_files(kept, directory)
    if has_tokenizer(kept) and _encodes_as(directory, tokenizer):
        return
    around = tuple(
        [special_id(tokenizer, role) for role in part if role not in tokenizer.lacking]
        for part in _AROUND.get(system or "", _AROUND["bert"])
    )
    for name in _FILES:
        if name != _GENERATION:
            (directory / name).unlink(missing_ok=True)
    segments = ["token_type_ids"] if has_segments else []
    inputs: dict[str, Any] = {"model_input_names": ["input_ids", *segments, "attention_mask"]}
    if (
        system in SYSTEMS_BY_NAME and SYSTEMS_BY_NAME[system].padding_side == "left"
    ):  # XLNet's, whose heads read the last token
        inputs["padding_side"] = "left"
    _write_files(directory, tokenizer, ids, inputs)
    if isinstance(tokenizer, HuggingFaceTokenizer) and not _encodes_as(directory, tokenizer, around):
        _write_general(directory, tokenizer, ids, around, inputs)


def special_id(tokenizer: Tokenizer, role: str) -> int:
    return int(getattr(tokenizer.special, role))


def _encodes_as(directory: Path, tokenizer: Tokenizer, around: Around | None = None) -> bool:
    try:
        theirs = load_theirs(directory)
        if around is not None:
            before, after = around
            if encoded(theirs, ["a"]) != [[*before, *tokenizer.encode("a"), *after]]:
                return False
        return compare(tokenizer, theirs).difference is None
    except CheckpointError:
        return False


def _write_files(
    directory: Path, tokenizer: Tokenizer, ids: Mapping[str, int], inputs: Mapping[str, Any]
) -> None:
    """The files of the run's tokenizer for the class of its system, with what it adds to them."""
    for name, content in read_files(tokenizer.config).items():
        (directory / ("spiece.model" if name == "model" else name)).write_bytes(content)
    options, kind, added = dict(inputs), tokenizer.config.kind, tokenizer.added_names
    if kind == "bert_wordpiece":
        options |= {"tokenizer_class": "BertTokenizer", "do_lower_case": tokenizer.config.lowercase}
    elif kind == "hf_json":  # the class of a system makes of this file what its version takes for right
        options |= {"tokenizer_class": GENERAL, **_roles(tokenizer), **_named(tokenizer, ids)}
    elif kind == "gpt2_bpe" and "mask" not in tokenizer.lacking and not added:
        # Training masks a token with the space before it; the class of version 5 does not take that space by itself.
        name = tokenizer.special_names[tokenizer.special.mask]
        options["mask_token"] = {
            "__type": "AddedToken", "content": name, "lstrip": True, "rstrip": False, "normalized": False,
            "single_word": False, "special": True,
        }  # fmt: skip
    if added and (kind == "hf_json" or tokenizer.config.added_tokens != "t5"):  # T5's class adds its own
        options["added_tokens_decoder"] = {
            str(i): {"content": name, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
            for i, name in added.items()
        }
        options |= _named(tokenizer, ids)
    write_json(directory / TOKENIZER_CONFIG, options)


def _write_general(
    directory: Path,
    tokenizer: HuggingFaceTokenizer,
    ids: Mapping[str, int],
    around: Around,
    inputs: Mapping[str, Any],
) -> None:
    """A tokenizer.json of the whole pipeline, with special tokens found in a text and put around it.

    The first text has segment 0, a second one segment 1, and CLS segment 2 where it ends a text.

    The run's files stay next to it where they have other names, so that an import finds the tokenizer of the corpora.
    """
    named = {i: name for i, name in tokenizer.special_names.items() if i < tokenizer.num_tokens}
    backend = visible_backend(tokenizer, named)
    before, after = ([named[i] for i in part] for part in around)
    last = [f"{name}:2" for name in after[1:]]
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after[:1], *last],
        pair=[*before, "$A", *after[:1], "$B:1", *(f"{name}:1" for name in after[:1]), *last],
        special_tokens=[(named[i], i) for i in {*around[0], *around[1]}],
    )
    (directory / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    options: dict[str, Any] = {"tokenizer_class": GENERAL, **inputs}
    if tokenizer.config.kind == "bert_wordpiece":
        options["do_lower_case"] = tokenizer.config.lowercase
    write_json(directory / TOKENIZER_CONFIG, options | _roles(tokenizer) | _named(tokenizer, ids))


def _roles(tokenizer: Tokenizer) -> dict[str, str]:
    """Tokens by the names of their roles in tokenizer_config.json; that of padding also where config.json has none."""
    roles = (role for role in ("cls", "sep", "mask", "unk", "pad") if role not in tokenizer.lacking)
    return {f"{role}_token": tokenizer.special_names[special_id(tokenizer, role)] for role in roles}


def _named(tokenizer: Tokenizer, ids: Mapping[str, int]) -> dict[str, str]:
    return {
        f"{role}_token": tokenizer.special_names[ids[f"{role}_token_id"]]
        for role in ("pad", "eos", "bos")
        if f"{role}_token_id" in ids
    }
