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
from megatron_lite.hf.common.verify_tokenizer import compare, compare_tokenizer, encoded, load_theirs
from megatron_lite.hf.common.weights import read_json, write_json
from megatron_lite.hf.published.systems import SYSTEMS_BY_NAME

TOKENIZER_CONFIG = "tokenizer_config.json"
GENERAL = "PreTrainedTokenizerFast"  # the class that reads a tokenizer.json as it is, in versions 4 and 5
_GENERATION = "generation_config.json"  # is imported with them
# Roles of the special tokens before and after a text.
_AFFIX_ROLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bert": (("cls",), ("sep",)),
    "bart": (("cls",), ("eos",)),
    **dict.fromkeys(("t5", "t5_1_1", "mt5"), ((), ("eos",))),
    "xlnet": ((), ("sep", "cls")),
    **dict.fromkeys(
        ("gpt", "gpt2", "glm4", "glm4_0414", "glm4_moe", "qwen2", "qwen3", "qwen3_moe", "olmoe"), ((), ())
    ),
    **dict.fromkeys(("llama", "mistral"), (("cls",), ())),
}
Affixes = tuple[list[int], ...]  # ids of the tokens before a text, and after it
_SENTENCEPIECE_FILES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "spm.model")
_VOCABULARIES = ("vocab.txt", "vocab.json", *_SENTENCEPIECE_FILES, "tokenizer.json")
_FILES = (
    "tokenizer.json", TOKENIZER_CONFIG, "special_tokens_map.json", "vocab.txt", "vocab.json", "merges.txt",
    *_SENTENCEPIECE_FILES, "added_tokens.json", "chat_template.jinja", _GENERATION,
)  # fmt: skip
CONVERTED = "tokenizer"  # directory of the imported files: the other files as transformers' tokenizer.json


def copy_tokenizer_files(source: Path, directory: Path) -> None:
    for name in _FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in _VOCABULARIES)


def import_tokenizer(source: Path, directory: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer section that gives the ids of `source`'s AutoTokenizer, from its files copied to `directory`.

    If the files themselves give these ids, they are used, so that corpora of the published files fit. If not, what
    transformers makes of them (a class's lower case, options of tokenizer_config.json) is written as a tokenizer.json.

    Args: options: settings of the section, which override; a kind among them must give the same ids.
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
    reason = ""
    for candidate in _candidates(directory, theirs):
        if kind in (None, candidate["kind"]):
            section = {**candidate, **options}
            try:
                tokenizer = load_tokenizer(build(TokenizerConfig, section, "tokenizer."))
                what = f"{source} by tokenizer.kind {tokenizer.config.kind}"
                compare(tokenizer, theirs).require(what, remedy)
                roles = _roles_by_class(tokenizer, theirs) if candidate["kind"] == "hf_json" else {}
                if roles and "roles" not in options:
                    section["roles"] = roles
                    tokenizer = load_tokenizer(build(TokenizerConfig, section, "tokenizer."))
                    compare(tokenizer, theirs).require(what, "set tokenizer.roles={}.")
                return section
            except (DataError, CheckpointError) as error:
                # What transformers makes of the files fails for the tokenizer itself, others may for their kind.
                if refusal is None or CONVERTED in Path(candidate["path"]).parts[-2:-1]:
                    refusal = error
                    reason = (
                        str(error)
                        .replace(candidate["path"], str(source))
                        .replace(str(directory), str(source))
                    )
    if refusal is None:
        raise ConfigError(f"{source} has no files for tokenizer.kind {shown(kind)}; leave it out.")
    raise type(refusal)(reason)


def _roles_by_class(tokenizer: Tokenizer, theirs: TokenizersBackend) -> dict[str, str]:
    """Roles that the tokenizer has found no name for, and the token that transformers' class has for each.

    A beginning of texts counts only where the class puts it before a text: other files name a token that their model
    has never seen there (SmolLM2).
    """
    named = {
        "eos": theirs.eos_token,
        "sep": theirs.sep_token,
        "mask": theirs.mask_token,
        "cls": theirs.cls_token,
    }
    if theirs.bos_token is not None and _first(theirs) == theirs.bos_token_id:
        named["cls"] = theirs.bos_token
    added = {token.content for token in theirs.added_tokens_decoder.values()}
    return {role: str(name) for role, name in named.items() if role in tokenizer.lacking and name in added}


def puts_before_texts(role: str, tokenizer: Tokenizer, source: Path, copies: Path) -> bool:
    """Whether the source's class puts the token of a role before a text. Args: copies: as for `load_theirs`."""
    return role not in tokenizer.lacking and _first(load_theirs(source, copies)) == special_id(
        tokenizer, role
    )


def _first(theirs: TokenizersBackend) -> int | None:
    """The first token that the class makes of a text."""
    return next(iter(encoded(theirs, ["a"])[0]), None)


def require_same_ids(key: str, tokenizer: Tokenizer, source: Path, copies: Path) -> None:
    """Raise CheckpointError if a user's own tokenizer gives other ids than the source's.

    Args: key: of its section. copies: as for `load_theirs`.
    """
    if has_tokenizer(source):
        compare_tokenizer(tokenizer, source, copies=copies).require(
            f"{key}.path {tokenizer.config.path}",
            f"leave {key}.path out, or use another tokenizer with --no-verify.",
        )


def _candidates(directory: Path, theirs: TokenizersBackend) -> Iterator[dict[str, Any]]:
    """Sections for the files, first those with which corpora of these systems are usually built."""
    if (directory / "vocab.txt").exists():
        lowercase = bool(theirs.init_kwargs.get("do_lower_case", True))
        yield {"kind": "bert_wordpiece", "path": str(directory / "vocab.txt"), "lowercase": lowercase}
    if (directory / "vocab.json").exists():
        config_json = read_json(directory / "config.json")
        kind = "gpt_bpe" if config_json.get("model_type") == "openai-gpt" else "gpt2_bpe"
        yield {"kind": kind, "path": str(directory)}
    if (directory / "tokenizer.json").exists():
        yield {"kind": "hf_json", "path": str(directory / "tokenizer.json")}
    converted = directory / CONVERTED / "tokenizer.json"
    converted.parent.mkdir()
    converted.write_text(theirs.backend_tokenizer.to_str(), encoding="utf-8")
    yield {"kind": "hf_json", "path": str(converted)}
    shutil.rmtree(converted.parent)  # the caller takes the next candidate: this one is not used
    if (directory / "spiece.model").exists():
        yield {"kind": "sentencepiece", "path": str(directory / "spiece.model")}


def write_tokenizer(
    directory: Path,
    tokenizer: Tokenizer,
    ids: Mapping[str, int],
    imported: Path,
    system: str | None,
    *,
    has_segments: bool,
) -> None:
    """Write files with which the directory's AutoTokenizer gives the run's ids.

    The imported files, bit for bit, if they give these ids. If not, the files of the run's tokenizer, if the class that
    reads them also adds the system's special tokens to a text. If not, a tokenizer.json for the general class, which
    reads it as it is.

    Args:
        ids: of the special tokens by their names in config.json, which is in the directory.
        imported: directory of the import's files, if there was an import.
        has_segments: whether the tokenizer gives the class the segment of each token.
    """
    copy_tokenizer_files(imported, directory)
    if has_tokenizer(imported) and _gives_same_ids(directory, tokenizer):
        return
    affixes = tuple(
        [special_id(tokenizer, role) for role in roles if role not in tokenizer.lacking]
        for roles in _AFFIX_ROLES.get(system or "", _AFFIX_ROLES["bert"])
    )
    for name in _FILES:
        if name != _GENERATION:
            (directory / name).unlink(missing_ok=True)
    segments = ["token_type_ids"] if has_segments else []
    inputs: dict[str, Any] = {"model_input_names": ["input_ids", *segments, "attention_mask"]}
    # XLNet's heads read the last token.
    if system in SYSTEMS_BY_NAME and SYSTEMS_BY_NAME[system].padding_side == "left":
        inputs["padding_side"] = "left"
    _write_files(directory, tokenizer, ids, inputs)
    if isinstance(tokenizer, HuggingFaceTokenizer) and not _gives_same_ids(directory, tokenizer, affixes):
        _write_general(directory, tokenizer, ids, affixes, inputs)


def special_id(tokenizer: Tokenizer, role: str) -> int:
    return int(getattr(tokenizer.special, role))


def _gives_same_ids(directory: Path, tokenizer: Tokenizer, affixes: Affixes | None = None) -> bool:
    try:
        theirs = load_theirs(directory)
        if affixes is not None:
            before, after = affixes
            if encoded(theirs, ["a"]) != [[*before, *tokenizer.encode("a"), *after]]:
                return False
        return compare(tokenizer, theirs).difference is None
    except CheckpointError:
        return False


def _write_files(
    directory: Path, tokenizer: Tokenizer, ids: Mapping[str, int], inputs: Mapping[str, Any]
) -> None:
    """Write the files of the run's tokenizer for the class of its system, with the tokens that the run adds."""
    for name, content in read_files(tokenizer.config).items():
        (directory / ("spiece.model" if name == "model" else name)).write_bytes(content)
    options, kind, added = dict(inputs), tokenizer.config.kind, tokenizer.added_names
    if kind == "bert_wordpiece":
        options |= {"tokenizer_class": "BertTokenizer", "do_lower_case": tokenizer.config.lowercase}
    elif kind == "hf_json":  # the class of a system would change what this file says
        options |= {"tokenizer_class": GENERAL, **_role_tokens(tokenizer), **_token_names(tokenizer, ids)}
    taking_space = _taking_space(tokenizer)
    if kind == "sentencepiece" and tokenizer.config.added_tokens == "t5":  # T5's class adds its own
        added, taking_space = {}, set()
    if described := added | {i: tokenizer.token_to_text(i) for i in taking_space}:
        options["added_tokens_decoder"] = {
            str(i): {
                "content": name, "special": True, "normalized": False, "lstrip": i in taking_space, "rstrip": False,
                "single_word": False,
            }
            for i, name in sorted(described.items())
        }  # fmt: skip
    if added:
        options |= _token_names(tokenizer, ids)
    write_json(directory / TOKENIZER_CONFIG, options)


def _write_general(
    directory: Path,
    tokenizer: HuggingFaceTokenizer,
    ids: Mapping[str, int],
    affixes: Affixes,
    inputs: Mapping[str, Any],
) -> None:
    """Write a tokenizer.json of the whole pipeline, which recognizes special tokens in a text and adds the affixes.

    The first text has segment 0, a second text segment 1, and CLS segment 2 where it ends a text.

    The run's files stay next to it where they have other names, so that an import finds the tokenizer of the corpora.
    """
    special_names = {i: name for i, name in tokenizer.special_names.items() if i < tokenizer.num_tokens}
    backend = tokenizer.with_visible_specials(special_names, _taking_space(tokenizer))
    before, after = ([special_names[i] for i in ids] for ids in affixes)
    last = [f"{name}:2" for name in after[1:]]
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after[:1], *last],
        pair=[*before, "$A", *after[:1], "$B:1", *(f"{name}:1" for name in after[:1]), *last],
        special_tokens=[(special_names[i], i) for i in {*affixes[0], *affixes[1]}],
    )
    (directory / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    options: dict[str, Any] = {"tokenizer_class": GENERAL, **inputs}
    if tokenizer.config.kind == "bert_wordpiece":
        options["do_lower_case"] = tokenizer.config.lowercase
    write_json(directory / TOKENIZER_CONFIG, options | _role_tokens(tokenizer) | _token_names(tokenizer, ids))


def _taking_space(tokenizer: Tokenizer) -> set[int]:
    """Tokens of hidden text, where a word has the space before it: in training they hide that space too."""
    if tokenizer.word_marks.kind != "space":
        return set()
    masks = (
        special_id(tokenizer, role) for role in ("mask", "smask", "gmask") if role not in tokenizer.lacking
    )
    return {*masks, *tokenizer.sentinels}


def _role_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Fields of tokenizer_config.json for cls, sep, mask, unk and pad -> tokens."""
    roles = (role for role in ("cls", "sep", "mask", "unk", "pad") if role not in tokenizer.lacking)
    return {f"{role}_token": tokenizer.special_names[special_id(tokenizer, role)] for role in roles}


def _token_names(tokenizer: Tokenizer, ids: Mapping[str, int]) -> dict[str, str]:
    """Fields of tokenizer_config.json for pad, eos and bos -> tokens. Args: ids: as config.json has them."""
    return {
        f"{role}_token": tokenizer.special_names[ids[f"{role}_token_id"]]
        for role in ("pad", "eos", "bos")
        if f"{role}_token_id" in ids
    }
