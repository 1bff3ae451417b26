"""Ids of the special tokens: GLM's, found in a vocabulary or appended to it, or those of a published vocabulary.

`added_tokens` of a tokenizer decides. `glm` gives every role an id of its own, as the released GLM models have them:
`assign_special_tokens` (BERT, GPT-2, tokenizer.json) and `sentencepiece_special_tokens` (the Chinese models). `none`
leaves the vocabulary as its files have it, so that a published BERT or GPT-2 has its published size; a role without a
token shares another's id, and objectives that need the role are refused: `own_special_tokens`. `t5` adds T5's 100
sentinels to that, `optimus` those of OPTIMUS's three tokens that the files lack.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, fields

ADDED_TOKENS = ("glm", "none", "t5", "optimus")

# Role -> the name that is shown, and that train_tokenizer.py writes.
SPECIAL_NAMES = {
    "pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "gmask": "[gMASK]",
    "smask": "[sMASK]", "sop": "<|startofpiece|>", "eop": "<|endofpiece|>", "eos": "<|endoftext|>",
    "dblock": "[dBLOCK]",
}  # fmt: skip
# Further names under which a tokenizer.json may hold a role, tried in order after the name above.
_OTHER_NAMES = {
    "pad": ("<pad>", "<|padding|>"), "unk": ("<unk>",), "cls": ("<cls>", "<s>"), "sep": ("<sep>",),
    "mask": ("<mask>",), "sop": ("<sop>", "[sop]"), "eop": ("<eop>", "[eop]"),
    "eos": ("[EOS]", "</s>", "<eos>", "<|end_of_text|>"),
}  # fmt: skip
# XLNet's document end, and no `eop`: its <eop> ends a paragraph.
_PUBLISHED_NAMES = {"eos": ("<eod>", *_OTHER_NAMES["eos"]), "eop": ()}
# RoBERTa's vocabulary: one token ends texts, separates and pads, as in the released GLM-RoBERTa. It also holds
# "<|endoftext|>", which nothing uses. RoBERTa itself pads with <pad>.
ROBERTA_NAMES = {"cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "</s>", "unk": "<unk>", "mask": "<mask>"}
_ROBERTA_UNUSED = ("<pad>", "<|endoftext|>")
# Roles that the files lack get ids after the last one, in this order of the released GLM models.
_APPEND_ORDER = ("eos", "sop", "eop", "cls", "mask", "sep", "unk", "gmask", "smask", "dblock")
_T5_SENTINELS = 100
# As OPTIMUS's code adds them to GPT-2: <PAD> 50257, <BOS> 50258, <EOS> 50259.
_OPTIMUS_NAMES = {"pad": "<PAD>", "sop": "<BOS>", "eop": "<EOS>"}

NO_TOKEN = -1  # id of an eos that does not exist: no text ends with it


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens in a vocabulary.

    `smask` and `gmask` may equal `mask`, as in some releases, and `eos` may be NO_TOKEN, as in GPT.
    """

    cls: int
    sep: int
    mask: int
    smask: int
    gmask: int
    sop: int
    eop: int
    eos: int
    pad: int
    unk: int
    dblock: int


def assign_special_tokens(known_ids: Mapping[str, int], next_id: int) -> tuple[SpecialTokens, int]:
    """The ids of all roles: those that the files hold, and the others from `next_id` on, in _APPEND_ORDER.

    A missing eos is pad's id, else sep's; a missing pad is that of eos. For GPT-2 (known: eos) and BERT
    (known: pad, unk, cls, sep, mask) these are the ids of the released GLM models, except gMASK, sMASK and
    dBLOCK of BERT: the released models have one mask; ours use three padding rows of their embedding.

    Returns: the ids, and the vocabulary size that includes them.
    """
    ids = dict(known_ids)
    for substitute in ("pad", "sep"):
        if "eos" not in ids and substitute in ids:
            ids["eos"] = ids[substitute]
    for role in _APPEND_ORDER:
        if role not in ids:
            ids[role] = next_id
            next_id += 1
    ids.setdefault("pad", ids["eos"])
    return SpecialTokens(**ids), next_id


def sentencepiece_special_tokens(base_size: int, fixed_command_tokens: bool) -> tuple[SpecialTokens, int]:
    """Ids as in the released Chinese models, whose .model has 50000 pieces, and the vocabulary size.

    Without `fixed_command_tokens` gMASK has the id of eop, as in GLM-10B-Chinese. Id base_size + 5 is unused.
    """
    after_eop = ("smask", "gmask", "dblock") if fixed_command_tokens else ("smask", "dblock")
    offsets = {"pad": 0, "eos": 0, "sep": 1, "cls": 2, "mask": 3, "unk": 4, "sop": 6, "eop": 7, "gmask": 7}
    offsets |= {role: 8 + i for i, role in enumerate(after_eop)}
    special = SpecialTokens(**{role: base_size + offset for role, offset in offsets.items()})
    return special, special.dblock + 1


def own_special_tokens(known_ids: Mapping[str, int]) -> tuple[SpecialTokens, frozenset[str]]:
    """The ids of all roles in a vocabulary to which nothing is added, and the roles that it lacks.

    A missing eos is sep's id, since a document of BERT ends with [SEP]; without both there is none. Other missing roles
    share an id that exists, which nothing may rely on: `lacking` names them. Nothing needs a pad of its own, because
    padding is never computed.
    """
    ids = dict(known_ids)
    ids.setdefault("eos", ids.get("sep", NO_TOKEN))
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


def all_special_names(
    special: SpecialTokens,
    lacking: Set[str],
    names: Mapping[int, str],
    vocab_size: int,
    ids_in_files: Set[int],
) -> dict[int, str]:
    """Id -> name for the special tokens (the files' `names` first) and for ids that no token has."""
    all_names = dict(names)
    if not lacking:
        roles = asdict(special)
        for role in (*_APPEND_ORDER, "pad"):  # eop before gmask: where two share an id, the first name stays
            all_names.setdefault(roles[role], SPECIAL_NAMES[role])
    for i in set(range(vocab_size)) - ids_in_files - all_names.keys():
        all_names[i] = f"[reserved {i}]"
    return all_names
