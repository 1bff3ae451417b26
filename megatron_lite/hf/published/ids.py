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
from megatron_lite.hf.common.system_table import PublishedSystem
from megatron_lite.hf.common.weights import read_json, write_json
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


def generation_ids(system: PublishedSystem, template: PromptTemplate | None) -> dict[str, Any]:
    """Fields of both files that say how a decoder begins. Args: template: of its training; None: it was not trained."""
    if template is None or not template.start:
        return {}
    (start,) = template.start
    ids: dict[str, Any] = {"decoder_start_token_id": start}
    if system.forces_ends:  # here no end is forced on a completion that is cut at the longest length
        ids |= {"forced_bos_token_id": next(iter(template.forced), None), "forced_eos_token_id": None}
    return ids


def write_generation_config(
    directory: Path,
    class_config: PretrainedConfig,
    system: PublishedSystem,
    template: PromptTemplate | None,
    *,
    is_imported: bool,
) -> None:
    """Write the file of a class that generates. The file of an import stays, but for how a decoder begins.

    Args: class_config: config.json. is_imported: whether the directory has the files of an import.
    """
    path, decoder_ids = directory / GENERATION_JSON, generation_ids(system, template)
    if not (system.is_causal or system.is_encoder_decoder):
        return
    if is_imported and not (decoder_ids and path.exists()):
        return
    if is_imported:
        values = read_json(path)
    else:
        ends = () if template is None else (token for token in template.ends if token != NO_TOKEN)
        values = {name: getattr(class_config, name, None) for name in ("bos_token_id", "pad_token_id")}
        values["eos_token_id"] = sorted(set(ends)) or class_config.eos_token_id
    values |= decoder_ids
    write_json(path, {name: value for name, value in values.items() if value is not None})
