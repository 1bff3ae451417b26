"""Ids of the special tokens: GLM's, found in a vocabulary or appended to it.

`added_tokens` of a tokenizer decides. `glm` gives every role an id of its own, as the released GLM models have them.
`none` leaves the vocabulary as its files have it, so that a published one has its published size, `t5` and `optimus`
add to it what those systems add: published_tokens.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass

ADDED_TOKENS = ("glm", "none", "t5", "optimus")

# Role -> the name that is shown, and that train_tokenizer.py writes.
SPECIAL_NAMES = {
    "pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "gmask": "[gMASK]",
    "smask": "[sMASK]", "sop": "<|startofpiece|>", "eop": "<|endofpiece|>", "eos": "<|endoftext|>",
    "dblock": "[dBLOCK]",
}  # fmt: skip
# RoBERTa's vocabulary: one token ends texts, separates and pads, as in the released GLM-RoBERTa. It also holds
# "<|endoftext|>", which nothing uses. RoBERTa itself pads with <pad>.
ROBERTA_NAMES = {"cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "</s>", "unk": "<unk>", "mask": "<mask>"}
# Roles that the files lack get ids after the last one, in this order of the released GLM models.
_APPEND_ORDER = ("eos", "sop", "eop", "cls", "mask", "sep", "unk", "gmask", "smask", "dblock")
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
