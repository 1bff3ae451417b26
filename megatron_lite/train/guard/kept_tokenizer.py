"""A tokenizer that is named on the Hugging Face hub, kept with the run that it was fetched for.

    DIRECTORY/tokenizer/ORG--NAME@COMMIT/   its files

So the run has the tokenizer of one commit for good, and a later start, on any machine that sees the directory, needs
neither the hub nor a cache.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from data_utils.base.files import disk_errors, sync_directory
from data_utils.text.tokenizer_readers import FILES, TokenizerConfig

_FOLDER = "tokenizer"


@dataclass(frozen=True)
class KeptTokenizer:
    """Where a run's tokenizer is read from at this start, and as what the run records it."""

    read: TokenizerConfig
    recorded: TokenizerConfig

    def keep(self) -> None:
        """Copy files of the hub to the run's directory, unless they are there. One process of a run does it."""
        target = Path(self.recorded.path)
        if self.read.path == self.recorded.path or target.exists():
            return
        partial = target.with_name(f"{target.name}.partial")
        with disk_errors(target, "run.directory"):
            shutil.rmtree(partial, ignore_errors=True)  # of a start that was killed
            partial.mkdir(parents=True)
            for pattern in FILES[self.read.kind]:
                for file in Path(self.read.path).glob(pattern):
                    shutil.copyfile(file, partial / file.name)
            sync_directory(partial)
            os.replace(partial, target)
            sync_directory(target.parent)


def kept_tokenizer(section: TokenizerConfig, run: Path) -> KeptTokenizer:
    """The tokenizer of a run. A name of the hub is fetched at the first start; later ones find it in the run.

    Raises: DataError for a name that cannot be fetched.
    """
    name = section.hub_name
    if name is None:
        path = section.absolute()
        return KeptTokenizer(path, path)
    folder = run.absolute() / _FOLDER
    owned = f"{name.repository.replace('/', '--')}@"
    is_commit = re.fullmatch(r"[0-9a-f]{40}", name.revision or "")
    held = sorted(folder.glob(f"{owned}{name.revision if is_commit else '*'}"))
    held = [path for path in held if not path.name.endswith(".partial")]
    if held:
        found = replace(section, path=str(held[-1]))
        return KeptTokenizer(found, found)
    local = section.absolute()
    commit = Path(local.path).name
    return KeptTokenizer(local, replace(section, path=str(folder / f"{owned}{commit}")))
