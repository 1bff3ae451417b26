"""Special tokens of published vocabularies: by which names files hold them, and ids where GLM's are not added."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields

from data_utils.tokenizers.special_tokens import NO_TOKEN, ROBERTA_NAMES, SPECIAL_NAMES, SpecialTokens

# Further names under which a tokenizer.json may hold a role, tried in order after the name above.
_OTHER_NAMES = {
    "pad": ("<pad>", "<|padding|>"), "unk": ("<unk>",), "cls": ("<cls>", "<s>"), "sep": ("<sep>",),
    "mask": ("<mask>",), "sop": ("<sop>", "[sop]"), "eop": ("<eop>", "[eop]"),
    "eos": ("[EOS]", "</s>", "<eos>", "<|end_of_text|>"),
}  # fmt: skip
# XLNet's document end, and no `eop`: its <eop> ends a paragraph. Llama 3's beginning, and EuroBERT's mask.
_PUBLISHED_NAMES = {
    "eos": ("<eod>", *_OTHER_NAMES["eos"]), "eop": (), "cls": (*_OTHER_NAMES["cls"], "<|begin_of_text|>"),
    "mask": (*_OTHER_NAMES["mask"], "<|mask|>"),
}  # fmt: skip
_ROBERTA_UNUSED = ("<pad>", "<|endoftext|>")
_T5_SENTINELS = 100
# As OPTIMUS's code adds them to GPT-2: <PAD> 50257, <BOS> 50258, <EOS> 50259.
_OPTIMUS_NAMES = {"pad": "<PAD>", "sop": "<BOS>", "eop": "<EOS>"}


def named_roles(names: Set[str], may_be_roberta: bool, added_tokens: str) -> tuple[dict[str, str], Set[str]]:
    """Role -> name: each role by its first name among `names`, or all of them by RoBERTa's.

    Returns: the roles, and names that are neither text nor a role.
    """
    role_names: dict[str, str] = {}
    unused: Set[str] = set()
    own = {SPECIAL_NAMES[role] for role in ROBERTA_NAMES.keys() - {"eos"}}
    if may_be_roberta and names >= set(ROBERTA_NAMES.values()) and not names & own:
        role_names, unused = roberta_roles(names, added_tokens)
    others = _OTHER_NAMES if added_tokens == "glm" else _OTHER_NAMES | _PUBLISHED_NAMES
    for role, name in SPECIAL_NAMES.items():
        for candidate in (name, *others.get(role, ())):
            if role not in role_names and candidate in names:
                role_names[role] = candidate
    return role_names, unused


def roberta_roles(names: Set[str], added_tokens: str) -> tuple[dict[str, str], Set[str]]:
    """Role -> name by the names of RoBERTa's vocabulary, and names that are neither text nor a role."""
    roles, unused = dict(ROBERTA_NAMES), names & set(_ROBERTA_UNUSED)
    if added_tokens != "glm" and "<pad>" in names:
        roles["pad"], unused = "<pad>", unused - {"<pad>"}
    return roles, unused


def own_special_tokens(known_ids: Mapping[str, int]) -> tuple[SpecialTokens, frozenset[str]]:
    """The ids of all roles in a vocabulary to which nothing is added, and the roles that it lacks.

    A missing eos is sep's id, since a document of BERT ends with [SEP]; without both there is none. A missing sep is
    eos where texts of a masked language model begin with cls (XLM-RoBERTa, EuroBERT). A missing sop is eos.
    Other missing roles share an id that exists, which nothing may rely on: `lacking` names them. Nothing needs a pad
    of its own, because padding is never computed.
    """
    ids = dict(known_ids)
    ids.setdefault("eos", ids.get("sep", NO_TOKEN))
    if {"cls", "mask"} <= ids.keys() and ids["eos"] != NO_TOKEN:
        ids.setdefault("sep", ids["eos"])
    roles = [field.name for field in fields(SpecialTokens)]
    lacking = frozenset(role for role in roles if role not in ids or ids[role] == NO_TOKEN) - {"pad"}
    shared = next((ids[role] for role in ("eos", "unk", "pad") if ids.get(role, NO_TOKEN) != NO_TOKEN), 0)
    masks = dict.fromkeys(("gmask", "smask", "dblock"), ids.get("mask", shared))
    return SpecialTokens(**{**dict.fromkeys(roles, shared), **masks, **ids}), lacking


def added_to_published(
    added_tokens: str, known: Set[str], next_id: int
) -> tuple[dict[str, int], dict[int, str]]:
    """The tokens that `added_tokens` appends to a published vocabulary, with ids from `next_id`.

    T5's first sentinel, <extra_id_0>, has the largest id, and no sentinel has a role. OPTIMUS's tokens fill the roles
    that are not `known`.
    Returns: role -> id, and id -> name.
    """
    if added_tokens == "t5":
        return {}, {next_id + _T5_SENTINELS - 1 - i: f"<extra_id_{i}>" for i in range(_T5_SENTINELS)}
    lacking = [role for role in _OPTIMUS_NAMES if added_tokens == "optimus" and role not in known]
    ids = {role: next_id + i for i, role in enumerate(lacking)}
    return ids, {ids[role]: _OPTIMUS_NAMES[role] for role in lacking}
