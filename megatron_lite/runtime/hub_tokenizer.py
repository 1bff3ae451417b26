"""A tokenizer that is named on the Hugging Face hub, kept with the run that it was fetched for.

    DIRECTORY/tokenizer/ORG--NAME@COMMIT/            its files
    DIRECTORY/tokenizer/ORG--NAME@REVISION@COMMIT/   the same of a branch or tag that was named

So the run has the tokenizer of one commit for good, and a later start, on any machine that sees the directory, needs
neither the hub nor a cache.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from data_utils.common.files import disk_errors, sync_directory
from data_utils.tokenizers.tokenizer_readers import FILES, TokenizerConfig

_FOLDER, _COMMIT = "tokenizer", "[0-9a-f]{40}"


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
        # A name that exists is complete: files are copied beside it, and the directory is renamed.
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
    folder, revision = run.absolute() / _FOLDER, name.revision or ""
    owned = f"{name.repository.replace('/', '--')}@"
    is_commit = re.fullmatch(_COMMIT, revision)
    if revision and not is_commit:  # another branch or tag is another tokenizer
        owned += f"{revision.replace('/', '--')}@"
    held = [path for path in folder.glob(f"{owned}*") if re.fullmatch(_COMMIT, path.name.removeprefix(owned))]
    held = [path for path in held if not is_commit or path.name.endswith(revision)]
    if held:
        found = replace(section, path=str(min(held)))
        return KeptTokenizer(found, found)
    local = section.absolute()
    return KeptTokenizer(local, replace(section, path=str(folder / f"{owned}{Path(local.path).name}")))
