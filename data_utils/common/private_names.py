"""The names of torch and DeepSpeed that this program uses although their documentation promises none of them.

A start looks up those of its configuration and ends in one line where a version lacks one (`require_names`). Tests look
up all, and find uses that are missing here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import types
from collections.abc import Iterable
from typing import Any

from data_utils.common.errors import ConfigError

TESTED = {"torch": "2.13.0", "deepspeed": "0.19.8"}  # the versions of requirements.txt

_MISSING = object()
_CPU_KERNEL = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"
_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_PIPELINE = "deepspeed.runtime.pipe.module.PipelineModule"
_STAGE_3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_PARAMETER = (
    "deepspeed.runtime.zero.partition_parameters.Init"  # its methods give parameters these attributes
)

NAMES = {
    "torch": (
        "torch._foreach_add_", "torch._foreach_copy_", "torch._foreach_mul_", "torch._foreach_norm",  # ZeRO's buckets
        "torch.utils._pytree.tree_leaves",  # CUDA graphs
        "torch._C._len_torch_dispatch_stack",
        "torch.utils._python_dispatch.TorchDispatchMode",  # memory of a block, for `--dry-run`
        # Whether this CPU multiplies in half precision.
        "torch.cpu._is_amx_tile_supported", "torch.cpu._is_avx512_bf16_supported", "torch.cpu._is_amx_fp16_supported",
        # Attention on a CPU without its mask being kept, and with dropout.
        _CPU_KERNEL, f"{_CPU_KERNEL}_backward", "torch.ops.aten._softmax_backward_data",
        # Attention on a GPU: dropout, and every backward pass. torch.nn.attention.varlen has no dropout, and its
        # backward pass only as a node of autograd, which fills a tensor more for each launch.
        "torch.ops.aten._flash_attention_forward", "torch.ops.aten._flash_attention_backward",
        "torch.ops.aten._efficient_attention_forward", "torch.ops.aten._efficient_attention_backward",
        "torch.cuda.memory._record_memory_history", "torch.cuda.memory._dump_snapshot",  # profiler.memory
    ),
    "deepspeed": (
        "deepspeed.comm.new_group", "deepspeed.ops.__compatible_ops__",
        # The engines with an optimizer of ours.
        f"{_ENGINE}._configure_optimizer", f"{_ENGINE}.basic_optimizer", f"{_ENGINE}.fp16_enabled",
        f"{_ENGINE}.loss_scale", f"{_ENGINE}.dynamic_loss_scale", f"{_ENGINE}.dynamic_loss_scale_args",
        f"{_ENGINE}.set_gradient_accumulation_boundary",
        "deepspeed.runtime.config.DeepSpeedConfig", "deepspeed.runtime.fp16.loss_scaler.CreateLossScaler",
    ),
    "pipeline stages": (
        "deepspeed.runtime.utils.partition_balanced", "deepspeed.runtime.pipe.topology.PipeModelDataParallelTopology",
        "deepspeed.runtime.pipe.engine.PipelineEngine.set_train_batch_size",
        "deepspeed.runtime.pipe.engine.PipelineEngine.eval_batch",
        f"{_PIPELINE}._partition_layers", f"{_PIPELINE}._set_bounds", f"{_PIPELINE}._topo",
        f"{_PIPELINE}._layer_specs", f"{_PIPELINE}._local_start", f"{_PIPELINE}._local_stop",
        f"{_PIPELINE}.get_tied_weights_and_groups", f"{_PIPELINE}.forward_funcs", f"{_PIPELINE}.tied_modules",
        f"{_PIPELINE}.global_rank", f"{_PIPELINE}.parts", f"{_PIPELINE}.mpu",
    ),
    "ZeRO 3": (
        f"{_STAGE_3}._get_fp32_opt_state_partition", f"{_STAGE_3}._reassign_or_swap_out_partitioned_parameters",
        f"{_STAGE_3}._global_grad_norm", f"{_STAGE_3}.fp32_partitioned_groups_flat", f"{_STAGE_3}.grad_position",
        f"{_STAGE_3}.get_param_id", f"{_STAGE_3}.persistent_parameters", f"{_STAGE_3}.overflow",
        f"{_STAGE_3}.loss_scaler", f"{_STAGE_3}.param_groups", f"{_STAGE_3}.optimizer",
        f"{_PARAMETER}.ds_tensor", f"{_PARAMETER}.ds_numel", f"{_PARAMETER}.ds_shape", f"{_PARAMETER}.all_gather",
    ),
}  # fmt: skip


def lookup(name: str) -> Any:
    """The object of a name in `NAMES`. Raises ConfigError where the installed version lacks it."""
    assert any(name in names for names in NAMES.values()), name
    found = _find(name)
    if found is _MISSING:
        raise _gone([name])
    return found


def require_names(*groups: str) -> None:
    """Raise ConfigError that lists all names of these groups of `NAMES` that the installed versions lack."""
    gone = [name for group in groups for name in NAMES[group] if not has_name(name)]
    if gone:
        raise _gone(gone)


def groups_of(pipeline_parallel_size: int, zero_stage: int) -> list[str]:
    """The groups of names that a run with these sizes uses."""
    return [
        "torch",
        "deepspeed",
        *["pipeline stages"] * (pipeline_parallel_size > 1),
        *["ZeRO 3"] * (zero_stage == 3),
    ]


def has_name(name: str) -> bool:
    """Whether the installed version has a name: a module's, a class's, or of a class's instances by its methods."""
    if _find(name) is not _MISSING:
        return True
    path, _, attribute = name.rpartition(".")
    owner = _find(path)
    return isinstance(owner, type) and any(attribute in _names_in(kind) for kind in owner.__mro__)


def _find(name: str) -> Any:
    """The object of a dotted name; `_MISSING` where the installed version lacks it."""
    words = name.split(".")
    found: Any = importlib.import_module(words[0])
    for count, word in enumerate(words[1:], start=2):
        if not hasattr(found, word) and not _is_submodule(found, ".".join(words[:count])):
            return _MISSING
        found = getattr(found, word)
    return found


def _is_submodule(owner: Any, path: str) -> bool:
    """Whether a module that is not imported yet exists; then it is imported."""
    if not isinstance(owner, types.ModuleType):
        return False
    try:
        importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not f"{path}.".startswith(f"{error.name}."):  # what that module needs is missing
            raise
        return False
    return True


@functools.cache
def _names_in(kind: type) -> frozenset[str]:
    """The names in the compiled methods of a class: attributes of its instances are among them."""
    waiting = [member.__code__ for member in vars(kind).values() if isinstance(member, types.FunctionType)]
    names: set[str] = set()
    while waiting:
        code = waiting.pop()
        names.update(code.co_names)
        waiting.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(names)


def _gone(names: Iterable[str]) -> ConfigError:
    by_library: dict[str, list[str]] = {}
    for name in names:
        by_library.setdefault(name.partition(".")[0], []).append(name)
    found = "; ".join(
        f"{library} {_version(library)} has no {', '.join(gone)}" for library, gone in by_library.items()
    )
    tested = " and ".join(f"{library}=={TESTED[library]}" for library in by_library)
    return ConfigError(
        f"{found}, which this program uses though no documentation promises it; install {tested}, with which it is "
        "tested."
    )


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"
