"""The figures of the house: `python tests/support/figures.py` prints each; tests hold those that may only fall.

With `--sentences` it also prints each place that the lint of English refuses (english.py), with `--loaded` each file
that a run loads.

Those of a training step are of a GLM run in one process on a CPU, see trace_batch.py.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_utils.base.settings import merge
from support import english, house
from support.project import small_corpus, small_run

# Names of systems in code; in text and comments they may stand.
SYSTEMS = re.compile(
    r"(^|[^a-z])(bert|gpt2?|xlnet|unilm|unilmv2|optimus|t5|bart|mass|ernie|albert|roberta|spanbert|elmo|siatl)([^a-z]|$)"
)
# Where a system may be named: its own room, its objective, conversions, and what belongs to one system by its purpose.
OWN_ROOMS = ("megatron_lite.hf", "megatron_lite.optimus", "megatron_lite.knowledge.huggingface")
ENTRIES = (
    "data_utils.base.planes",
    "megatron_lite.model.input.batch",
    "megatron_lite.model.layers.tensor_parallel",
    "megatron_lite.model.trunk.glm",
)


def top_level_imports(path: Path, modules: set[str]) -> Iterator[str]:
    """Modules of the product that are loaded with this file: imports outside of functions and of TYPE_CHECKING."""
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            continue
        nodes = [statement] if isinstance(statement, ast.Import | ast.ImportFrom) else []
        for node in nodes:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from (name for name in names if name in modules)


def loaded_with(entry: str) -> set[str]:
    """The modules that importing `entry` loads, packages around them included."""
    files = {house.module_name(path): path for path in house.product_files()}
    found: set[str] = set()
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        parents = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
        waiting += [parent for parent in parents if parent in files]
        waiting += top_level_imports(files[name], set(files))
    return found


def lines_of(modules: set[str]) -> int:
    files = {house.module_name(path): path for path in house.product_files()}
    return sum(house.line_count(files[name]) for name in modules)


def code_names(path: Path) -> Iterator[str]:
    """Identifiers, imported names and short strings of a file, in words of lower case; docstrings are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.alias):
            names = [node.name]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 30:
            names = [node.value]
        yield from (re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower() for name in names)


def files_that_name_systems() -> list[str]:
    """Files of megatron_lite outside of conversions and of systems' own rooms whose code names a system."""
    found = []
    for path in house.product_files():
        name = house.module_name(path)
        is_trunk = name.startswith("megatron_lite.") and not name.startswith(OWN_ROOMS)
        if is_trunk and any(SYSTEMS.search(word) for word in code_names(path)):
            found.append(name)
    return found


def of_the_code() -> dict[str, int]:
    """Figures that need no run."""
    counts = [house.line_count(path) for path in house.product_files()]
    return {
        **{
            f"lines loaded by importing {entry.rpartition('.')[2]}": lines_of(loaded_with(entry))
            for entry in ENTRIES
        },
        "files of the trunk that name a system": len(files_that_name_systems()),
        "lines of the product": sum(counts),
        "files over 400 lines": sum(count > 400 for count in counts),
        "sentences that the lint of English refuses": len(english.refused()),
    }


def traced_step(corpus: Path, directory: Path) -> dict[str, Any]:
    """Results of trace_batch.py for a small run. Args: corpus: of `small_corpus`. directory: of the run."""
    short = {"training": {"steps": 2}, "schedule": {"warmup_steps": 1}}
    config = directory / "config.yaml"
    config.write_text(yaml.safe_dump(merge(small_run(corpus, directory / "run"), short)))
    done = subprocess.run(
        [sys.executable, "tests/support/trace_batch.py", str(directory / "trace.json"), "--config", str(config)],
        cwd=house.ROOT, env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert not done.returncode, done.stdout + done.stderr
    return json.loads((directory / "trace.json").read_text())


def of_a_step(traced: dict[str, Any]) -> dict[str, int]:
    """Figures of a run that trace_batch.py has traced."""
    return {
        "files that hold the batch or its activations": len(traced["files"]),
        "types that carry it": len(traced["carriers"]),
        "changes of file from step to loss": traced["changes"],
        "returns to a file that was left": traced["returns"],
        "lines loaded by a run": sum(house.line_count(house.ROOT / name) for name in traced["loaded"]),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        traced = traced_step(small_corpus(Path(directory)), Path(directory))
    for name, count in {**of_the_code(), **of_a_step(traced)}.items():
        print(f"{name:60}{count:7,}")
    for title, names in (
        ("files of the trunk that name a system", files_that_name_systems()),
        ("types that carry a batch", traced["carriers"]),
        ("files that a run loads", traced["loaded"] if "--loaded" in sys.argv[1:] else ()),
    ):
        print(f"\n{title}", *names, sep="\n    ")
    if "--sentences" in sys.argv[1:]:
        print(*english.refused(), sep="\n")


if __name__ == "__main__":
    main()
