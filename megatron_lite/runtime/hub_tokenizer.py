"""A tokenizer of the Hugging Face hub, copied into the directory of the run that uses it.

    DIRECTORY/tokenizer/ORG--NAME@COMMIT/            the files
    DIRECTORY/tokenizer/ORG--NAME@REVISION@COMMIT/   the files of a branch or tag

So a run always reads the tokenizer of one commit, and a later start, on any machine that sees the directory, needs
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
class RunTokenizer:
    """A run's tokenizer: the section from which this start reads it, and the section that the run records."""

    read: TokenizerConfig
    recorded: TokenizerConfig

    def copy_to_run(self) -> None:
        """Copy files of the hub to the run's directory, unless they are there. One process of a run calls this."""
        target = Path(self.recorded.path)
        if self.read.path == self.recorded.path or target.exists():
            return
        # A name that exists is complete: files are copied beside it, and the directory is renamed.
        partial = target.with_name(f"{target.name}.partial")
        with disk_errors(target, "run.directory"):
            shutil.rmtree(partial, ignore_errors=True)  # left by a start that was killed
            partial.mkdir(parents=True)
            for pattern in FILES[self.read.kind]:
                for file in Path(self.read.path).glob(pattern):
                    shutil.copyfile(file, partial / file.name)
            sync_directory(partial)
            os.replace(partial, target)
            sync_directory(target.parent)


def run_tokenizer(section: TokenizerConfig, run: Path) -> RunTokenizer:
    """The tokenizer of a run. A name of the hub is fetched at the first start; later ones find it in the run.

    Raises: DataError for a name that cannot be fetched.
    """
    name = section.hub_name
    if name is None:
        path = section.absolute()
        return RunTokenizer(path, path)
    folder, revision = run.absolute() / _FOLDER, name.revision or ""
    prefix = f"{name.repository.replace('/', '--')}@"
    is_commit = re.fullmatch(_COMMIT, revision)
    if revision and not is_commit:  # another branch or tag is another tokenizer
        prefix += f"{revision.replace('/', '--')}@"
    copies = [
        path for path in folder.glob(f"{prefix}*") if re.fullmatch(_COMMIT, path.name.removeprefix(prefix))
    ]
    copies = [path for path in copies if not is_commit or path.name.endswith(revision)]
    if copies:
        in_run = replace(section, path=str(min(copies)))
        return RunTokenizer(in_run, in_run)
    local = section.absolute()
    return RunTokenizer(local, replace(section, path=str(folder / f"{prefix}{Path(local.path).name}")))
