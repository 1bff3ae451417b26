"""The structure of the code: which module imports which. tests/test_house.py holds the rules."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A package may import itself and the packages before it.
PACKAGES = (
    "data_utils.common",
    "data_utils.storage",
    "data_utils.tokenizers",
    "data_utils.corpus",
    "data_utils.objectives",
    "data_utils.tasks",
    "data_utils.tasks.readers",
    "data_utils.tasks.templates",
    "data_utils.tasks.metrics",
    "data_utils.dataset",
    "data_utils.build",
    "data_utils.cleaning",
    "data_utils.loader",
    "megatron_lite.config",
    "megatron_lite.parallel",
    "megatron_lite.transformer.kernels",
    "megatron_lite.transformer.attention_backends",
    "megatron_lite.transformer",
    "megatron_lite.checkpoint",
    "megatron_lite.optim",
    "megatron_lite.engine",
    "megatron_lite.telemetry",
    "megatron_lite.runtime",
    "megatron_lite.train",
    "megatron_lite.report",
    "megatron_lite.estimate",
    "megatron_lite.inference",
    "megatron_lite.embedding",
    "megatron_lite.hf.common",
    "megatron_lite.hf.published",
    "megatron_lite.hf.glm",
    "megatron_lite.hf",
    "megatron_lite.models.optimus",
    "megatron_lite.models.electra",
    "megatron_lite.models.ernie_thu",
    "megatron_lite.models.text_pairs",
    "megatron_lite.models.tsdae",
    "megatron_lite.finetune",
    "megatron_lite.analysis",
    "pretrain_glm",
    "scripts",
)


def product_files() -> list[Path]:
    """Every Python file of the product, the tests and benchmarks left out."""
    files = [
        path for name in ("data_utils", "megatron_lite", "scripts") for path in (ROOT / name).rglob("*.py")
    ]
    return sorted([ROOT / "pretrain_glm.py", *files])


def test_files() -> list[Path]:
    """Every Python file of the tests, with what they share."""
    return sorted((ROOT / "tests").rglob("*.py"))


def module_name(path: Path) -> str:
    """`data_utils.common.files` for data_utils/common/files.py; a package for its __init__.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package_index(module: str) -> int | None:
    """The index in PACKAGES of a module's package; None for a directory that only holds packages."""
    names = [package for package in PACKAGES if module == package or module.startswith(f"{package}.")]
    return PACKAGES.index(max(names, key=len)) if names else None


def imports_of(source: str, modules: set[str], *, with_types: bool = True) -> Iterator[tuple[str, int]]:
    """(module, line) for every import of one of `modules`, anywhere in a file.

    Args: with_types: also the imports under `if TYPE_CHECKING`, which only a type checker runs.
    """
    tree = ast.parse(source)
    only_types: set[ast.AST] = set()
    if not with_types:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
                only_types |= {inner for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if node in only_types:
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            if all(name in modules for name in names[:-1]):
                names.pop()  # `from package import module, module`
        for name in names:
            if name in modules:
                yield name, node.lineno


@functools.cache
def import_graph(*, with_types: bool = True) -> dict[str, dict[str, int]]:
    """module -> {imported module: line}. Args: with_types: as of `imports_of`."""
    sources = {module_name(path): path.read_text(encoding="utf-8") for path in product_files()}
    return {
        name: dict(imports_of(source, set(sources), with_types=with_types))
        for name, source in sources.items()
    }


def cycles(graph: dict[str, dict[str, int]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (Tarjan's algorithm)."""
    number = itertools.count()
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = next(number)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def upward_imports(graph: dict[str, dict[str, int]]) -> list[str]:
    """`module:line imports module` for every import from a package into a later one."""
    lines = []
    for name, others in graph.items():
        index = package_index(name)
        for other, line in others.items():
            target = package_index(other)
            if index is not None and target is not None and target > index:
                lines.append(f"{name}:{line} imports {other}")
    return lines


def imports_of_tests(source: str) -> list[str]:
    """Imported modules that are test files."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module or ''}.{alias.name}" for alias in node.names]
    return [name for name in names if any(part.startswith("test_") for part in name.split("."))]


def sleeps(source: str) -> list[int]:
    """Lines that name time.sleep; code in strings, for other processes, is not looked at."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        is_module = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "time"
        if (names and node.module == "time" and "sleep" in names) or (is_module and node.attr == "sleep"):
            lines.append(node.lineno)
    return sorted(lines)
