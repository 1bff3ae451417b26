"""Special token ids in the config.json and generation_config.json of a published system.

The defaults of a class are the ids of its published vocabulary. Another vocabulary has other ids, so every one is
written, as null where the vocabulary has no such token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from data_utils.common.errors import CheckpointError
from data_utils.tokenizers.special_tokens import NO_TOKEN
from data_utils.tokenizers.tokenizer import Tokenizer
from megatron_lite.hf.files.system_table import PublishedSystem
from megatron_lite.hf.files.weights import read_json, write_json
from megatron_lite.inference.states import PromptTemplate

GENERATION_JSON = "generation_config.json"


def special_ids(
    tokenizer: Tokenizer, system: PublishedSystem, roles: Mapping[str, str] | None, name: str
) -> dict[str, int | None]:
    """Fields of config.json. Args: roles: of the tokenizer, by field; None: the system's. name: of the model.

    Raises: CheckpointError for a padding token in texts, where the class counts positions by it.
    """
    special, lacking = tokenizer.special, tokenizer.lacking
    roles = system.roles if roles is None else roles
    if system.skips_pad and special.pad in (special.cls, special.sep, special.mask):
        raise CheckpointError(
            f"{name} pads with {tokenizer.special_names[special.pad]}, which its texts hold too, but a "
            f"{system.model_type} of transformers counts positions by the padding token; only runs whose tokenizer has "
            "one of its own can be exported."
        )
    ids = {field: None if role in lacking else getattr(special, role) for field, role in roles.items()}
    if special.pad == special.unk and not system.is_encoder_decoder:
        ids["pad_token_id"] = None  # without a mask `generate` would take unknown words for padding
    return dict.fromkeys(system.unused_ids) | ids


def writing_ids(system: PublishedSystem, layout: PromptTemplate | None) -> dict[str, Any]:
    """Fields of both files that say how a decoder begins. Args: layout: in which it was trained; None: it was not."""
    if layout is None or not layout.start:
        return {}
    (start,) = layout.start
    ids: dict[str, Any] = {"decoder_start_token_id": start}
    if system.forces_ends:  # an answer that is cut at the longest length has no end here
        ids |= {"forced_bos_token_id": next(iter(layout.forced), None), "forced_eos_token_id": None}
    return ids


def write_generation_config(
    directory: Path,
    described: PretrainedConfig,
    system: PublishedSystem,
    layout: PromptTemplate | None,
    *,
    is_kept: bool,
) -> None:
    """Write the file of a class that writes. That of an import stays, but for how a decoder begins.

    Args: described: config.json. is_kept: whether the directory has the files of an import.
    """
    path, written = directory / GENERATION_JSON, writing_ids(system, layout)
    if not (system.is_causal or system.is_encoder_decoder) or (is_kept and not (written and path.exists())):
        return
    if is_kept:
        values = read_json(path)
    else:
        ends = () if layout is None else (token for token in layout.ends if token != NO_TOKEN)
        values = {name: getattr(described, name, None) for name in ("bos_token_id", "pad_token_id")}
        values["eos_token_id"] = sorted(set(ends)) or described.eos_token_id
    values |= written
    write_json(path, {name: value for name, value in values.items() if value is not None})
