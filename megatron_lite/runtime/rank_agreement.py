"""What must be equal on all ranks of a run: settings, contents of data sets, the program, the libraries.

Ranks with different settings or programs would train on, and no metric would show it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json

from data_utils.common.settings import leaves, to_tree
from data_utils.dataset.manifest import read_manifest
from data_utils.objectives import OBJECTIVES
from megatron_lite.config.attention import IMPLEMENTATIONS
from megatron_lite.config.tree import Config
from megatron_lite.telemetry import version

_ATTENTION = tuple(one.package.name for one in IMPLEMENTATIONS.values() if one.package is not None)
_LIBRARIES = ("torch", "deepspeed", "numpy", *_ATTENTION)


def facts(config: Config, device: str) -> dict[str, str]:
    """Name -> value in words, to be compared between ranks. Args: device: the type on which this rank computes.

    Raises: DataError for a corpus without a manifest.
    """
    values = {key: repr(value) for key, value in leaves(to_tree(config))}
    for name in ("train", "validation"):
        for number, corpus in enumerate(getattr(config.data, name)):
            for prefix in filter(None, (corpus.prefix, corpus.decoder_prefix)):
                values[f"the contents of {prefix} (data.{name}[{number}])"] = _contents(prefix)
    values["the program's version"] = version.release() or "unknown"
    values["the digest of the program's files"] = version.sources()
    for choice in config.objective_choices:
        package = OBJECTIVES.package(choice.name)
        if package:
            values[f"the package of {choice.name}"] = package
    for library in _LIBRARIES:
        values[f"the version of {library}"] = _version_of(library)
    values["the device"] = device
    return values


def _version_of(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:  # importable from PYTHONPATH, or not installed
        return "unknown"


def _contents(prefix: str) -> str:
    """12 hexadecimal digits that change with the files of a data set."""
    files = json.dumps(read_manifest(prefix)["files"], sort_keys=True)
    return hashlib.sha256(files.encode()).hexdigest()[:12]
