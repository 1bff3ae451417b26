"""Reads untrusted config.json files, which are checked before a model is built from them, and writes exported ones.

Types are checked strictly. Sizes are compared with the tensors that the weights' headers list, before a model of such
sizes takes memory. Fields by which transformers would load another model than the directory's are refused.
"""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field as Limits
from transformers import PretrainedConfig
from transformers.utils import logging as transformers_logging
from typing_extensions import TypedDict

from data_utils.common.errors import CheckpointError, UserError
from data_utils.common.setting_files import one_line, shorten, shown
from data_utils.common.settings import keys_of
from data_utils.common.untrusted import conform
from megatron_lite.config.model import BLOCK_POSITIONS, ModelConfig
from megatron_lite.hf.common.system_table import PublishedSystem
from megatron_lite.hf.common.weights import MAX_TENSORS, Weights, read_json, write_json

CONFIG_JSON = "config.json"
MAX_POSITION = 1 << 24
MAX_LABELS = 1 << 16  # transformers makes a name for each
Size = Annotated[int, Limits(ge=1)]
Rate = Annotated[float, Limits(ge=0, lt=1)]

# Fields by which transformers loads other weights than model.safetensors or pytorch_model.bin hold.
_OTHER_WEIGHTS = {
    "quantization_config": "quantized weights are not supported; fetch the model in fp32, bf16 or fp16",
    "transformers_weights": "weights under another name are not read; fetch the model as it was published",
}
_ADAPTER = "adapter_config.json"


class _AnyModel(TypedDict, total=False):
    """Fields of config.json that are checked whatever the model is."""

    model_type: str
    architectures: list[str] | None
    num_labels: Annotated[int, Limits(ge=0, le=MAX_LABELS)] | None
    id2label: dict[Annotated[str, Limits(pattern=r"^\d{1,9}$")], str] | None
    label2id: dict[str, int] | None
    problem_type: str | None


class OwnLayout(TypedDict):
    """Fields of GLM in our layout, also in a directory that transformers saved again."""

    vocab_size: Size
    hidden_size: Size
    num_layers: Size
    num_attention_heads: Size
    max_position: Size
    positions: NotRequired[typing.Literal["learned_blocks", "rotary"]]
    block_positions: NotRequired[typing.Literal[BLOCK_POSITIONS]]  # type: ignore[valid-type]
    rotary_share: NotRequired[Annotated[float, Limits(gt=0, le=1)]]
    rotary_base: NotRequired[Annotated[float, Limits(gt=1)]]
    attention_window: NotRequired[Annotated[int, Limits(ge=0, le=MAX_POSITION)]]
    global_every: NotRequired[Size]
    rotary_base_local: NotRequired[Annotated[float, Limits(gt=1)] | None]
    rms_norm: NotRequired[bool]
    ffn: NotRequired[typing.Literal["plain", "gated"]]
    ffn_size: NotRequired[Size | None]
    biases: NotRequired[typing.Literal["all", "none"]]
    layernorm_epsilon: Annotated[float, Limits(gt=0)]
    gelu: typing.Literal["tanh", "erf"]
    embedding_dropout: Rate
    attention_dropout: Rate
    output_dropout: Rate


class _ReleasedLayout(TypedDict):
    """Fields of a released GLM that are read; the other sizes follow from its tensors."""

    num_attention_heads: NotRequired[Size]
    embedding_dropout_prob: NotRequired[Rate]
    attention_dropout_prob: NotRequired[Rate]
    output_dropout_prob: NotRequired[Rate]


@contextlib.contextmanager
def by_transformers(path: Path) -> Iterator[None]:
    """Context that turns any exception of transformers, over files that may be damaged, into a CheckpointError."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # What a library in Rust panics of is no Exception: a regular expression that tries too much.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = one_line(error)
        raise CheckpointError(
            f"{path}: transformers cannot use it ({type(error).__name__}: {reason}); correct its JSON files, or "
            "fetch them again."
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context without the warnings of transformers, which would be printed among the output of a command."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def read_config_json(directory: Path) -> dict[str, Any]:
    """config.json of a directory of weights. Raises: CheckpointError for what cannot be imported."""
    _require_files(directory)
    if (directory / _ADAPTER).exists():
        raise CheckpointError(
            f"{directory} has {_ADAPTER}, of an adapter on another model; import that, and then the adapter with "
            "scripts/convert_checkpoint.py import --input ADAPTER --base RUN."
        )
    path = directory / CONFIG_JSON
    config_json = read_json(path)
    for name, reason in _OTHER_WEIGHTS.items():
        if config_json.get(name) is not None:
            raise CheckpointError(f"{path} has {name}; {reason}.")
    _conformed(path, config_json, _AnyModel)
    return config_json


def code_of(config_json: Mapping[str, Any]) -> str | None:
    """What a directory says of a model with code of its own, None without such code."""
    classes = config_json.get("auto_map")
    if not isinstance(classes, Mapping) or not any(
        str(name).startswith(("AutoModel", "AutoConfig")) for name in classes
    ):
        return None
    return f"auto_map names code of its own ({shorten(', '.join(map(str, classes.values())), 100)}), which is not run"


def write_config(directory: Path, class_config: PretrainedConfig, former: Mapping[str, Any]) -> None:
    """Write config.json. Args: former: fields that other versions of transformers read (`former_fields`)."""
    class_config.save_pretrained(directory)
    values = read_json(directory / CONFIG_JSON)
    values |= {**former, "torch_dtype": values["dtype"]}  # the name of dtype up to version 4.55
    write_json(directory / CONFIG_JSON, dict(sorted(values.items())))


def own_layout(path: Path, config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The section `model` of GLM in our layout, and `vocab_size`. Raises: CheckpointError."""
    fields = _conformed(path / CONFIG_JSON, config_json, OwnLayout)
    return {**{k: v for k, v in fields.items() if k != "gelu"}, "activation": f"gelu_{fields['gelu']}"}


def released_layout(path: Path, config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a released GLM by their names. Raises: CheckpointError."""
    return _conformed(path / CONFIG_JSON, config_json, _ReleasedLayout)


def check_fields(path: Path, config_json: Mapping[str, Any], system: PublishedSystem) -> None:
    """Raise CheckpointError for a field of a published system that is not of the type of its setting."""
    hints, shape = keys_of(ModelConfig), {}
    for entry in system.fields:
        outer, _, inner = entry.theirs.partition(".")
        field_type = hints[entry.ours][0] if entry.names is None else type(next(iter(entry.names)))
        field_type = field_type if entry.reads is None else Any
        if entry.ours in ("num_layers", "decoder_layers"):  # a class makes lists of this length
            field_type = Annotated[int, Limits(le=MAX_TENSORS)]
        shape[outer] = dict[str, Any] | None if inner else field_type
    _conformed(path / CONFIG_JSON, config_json, TypedDict(f"_{system.model_type}", shape, total=False))  # type: ignore[operator]


def check_sizes(path: Path, settings: Mapping[str, Any], weights: Weights, file: str = CONFIG_JSON) -> None:
    """Raise CheckpointError for sizes beyond all tensors, before a model of such sizes is made.

    Args: settings: of the section `model`, from the file of this name.
    """
    largest = max((size for shape in weights.shapes.values() for size in shape), default=0)
    # Rotary positions have no table to compare with; learned ones are compared with it later.
    limits = {"max_position": MAX_POSITION}
    # ALBERT's layers are one block.
    blocks = 0 if settings.get("system") == "albert" else settings.get("num_layers", 0)
    if blocks + settings.get("decoder_layers", 0) > len(weights.shapes):
        raise CheckpointError(
            f"{path / file} declares {blocks + settings.get('decoder_layers', 0)} layers, but the weights have only "
            f"{len(weights.shapes)} tensors; fetch both again."
        )
    for name, value in settings.items():
        limit = limits.get(name, max(largest, len(weights.shapes)))
        if isinstance(value, int) and value > limit:
            raise CheckpointError(
                f"{path / file} sets model.{name} to {shown(value)}, but these weights allow {limit} at most; fetch "
                "both again."
            )


def _require_files(directory: Path) -> None:
    """Raise CheckpointError for a pipe or a device among the files: reading it could block forever."""
    for path in sorted(directory.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise CheckpointError(f"{path} is not a regular file; fetch the directory again.")


def _conformed(path: Path, config_json: Mapping[str, Any], shape: Any) -> dict[str, Any]:
    try:
        return conform(dict(config_json), shape)
    except ValueError as error:
        raise CheckpointError(f"{path} {error}; fetch it again, or correct it.") from None
