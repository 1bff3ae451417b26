"""What all ranks of a run must begin with: its settings, the contents of its data sets, the program, the libraries.

Ranks with other settings or another program would train on, each in its own way, and no number would say so.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json

from data_utils.common.settings import leaves, to_tree
from data_utils.dataset.manifest import read_manifest
from data_utils.objectives import OBJECTIVES
from megatron_lite.config.tree import Config
from megatron_lite.metrics import version

_LIBRARIES = ("torch", "deepspeed", "numpy")


def facts(config: Config, device: str) -> dict[str, str]:
    """Name -> value in words, to be compared between ranks. Args: device: the kind on which this rank computes.

    Raises: DataError for a corpus without a manifest.
    """
    found = {key: repr(value) for key, value in leaves(to_tree(config))}
    for name in ("train", "validation"):
        for number, corpus in enumerate(getattr(config.data, name)):
            for prefix in filter(None, (corpus.prefix, corpus.decoder_prefix)):
                found[f"the contents of {prefix} (data.{name}[{number}])"] = _contents(prefix)
    found["the program's version"] = version.release() or "unknown"
    found["the digest of the program's files"] = version.sources()
    for choice in config.objective_choices:
        package = OBJECTIVES.package(choice.name)
        if package:
            found[f"the package of {choice.name}"] = package
    for library in _LIBRARIES:
        found[f"the version of {library}"] = _version_of(library)
    found["the device"] = device
    return found


def _version_of(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:  # on the path of modules alone
        return "unknown"


def _contents(prefix: str) -> str:
    """12 hexadecimal digits that change with the files of a data set."""
    files = json.dumps(read_manifest(prefix)["files"], sort_keys=True)
    return hashlib.sha256(files.encode()).hexdigest()[:12]
