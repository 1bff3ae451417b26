"""Run the core of the tests with the oldest or the newest packages that pyproject.toml allows.

    python scripts/check_versions.py oldest
    python scripts/check_versions.py newest --python ~/.pyenv/versions/3.13.0/bin/python
    python scripts/check_versions.py newest -- tests/train/test_engine.py -x

The oldest are the lower bound of each range on the oldest Python, the newest what pip chooses now on the newest one.
They are installed once, in build/versions/oldest and build/versions/newest (up to 8 GB, because the newest torch brings
CUDA along): remove the folder to install newer releases. What comes after -- goes to pytest; tests that it names run
instead of the core. The output ends with the versions, and what passed and failed of each list of the core; the exit
status is pytest's.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import json
import os
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from data_utils.common.errors import ArgumentParser, ConfigError, run_command

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build/versions"
EXCLUDED = ("lm-eval",)  # extras: 750 MB, and no test of the core uses it

# What this program uses of other packages, in few minutes: names of lists, and their files or tests below tests/. First
# what needs no torch.
CORE = {
    "configuration": ("config/test_tree.py",),
    "datasets": ("data/dataset/test_indexed_dataset.py", "data/build/test_build.py"),
    "columns of files": ("data/tokenizers/test_column_files.py",),
    "tokenizers": (
        "data/tokenizers/test_tokenizers.py",
        "data/tokenizers/test_package_encoders.py::test_installed_packages_give_the_librarys_ids",
    ),
    "cleaning": ("data/cleaning/test_filters.py::test_filters_equal_datatroves_classes",),
    "batches": (
        "data/loader/test_collate.py",
        "data/objectives/test_recipes.py::test_compiled_and_plain_python_agree",
    ),
    "undocumented names": ("data/common/test_private_names.py", "config/test_deepspeed_table.py"),
    "model": ("transformer/test_compat.py", "transformer/test_model.py", "transformer/test_attention.py"),
    "kernels": ("transformer/test_kernels.py",),
    "training": ("train/test_engine.py", "train/test_pretrain_cli.py"),
    "optimizers": ("train/test_optimizers.py::test_fifty_steps_match_the_library",),
    "tensor and pipeline parallelism": (
        "train/test_stages.py",
        "train/test_parity.py::test_some_further_cases_equal_one_process",
    ),
    "checkpoints": ("checkpoint/test_checkpoint.py", "checkpoint/test_reshard.py"),
    "transformers": (
        "hf/test_hf_model.py",
        "hf/test_published.py",
        "hf/test_hf_export.py::test_rotary_models_there_and_back",
    ),
    "LoRA": ("hf/test_hf_peft.py", "train/test_lora.py"),
    "generation": ("inference/test_generation.py",),
    "fine-tuning": ("finetune/test_run.py::test_a_task_is_learnt_from_initial_weights",),
    "trackers": (
        "train/test_trackers.py::test_they_hold_what_metrics_jsonl_holds_and_a_resumed_run_is_the_same_run",
    ),
}


def default_python(end: str, requires: str) -> str:
    """The command of the oldest or the newest Python in a range such as ">=3.11,<3.14"."""
    allowed = [f"3.{minor}" for minor in range(100) if SpecifierSet(requires).contains(f"3.{minor}")]
    return f"python{allowed[0 if end == 'oldest' else -1]}"


def check_python(command: str, requires: str) -> tuple[str, str]:
    """The path and the version of a Python. Raises ConfigError if it is missing, or outside the range."""
    path = shutil.which(command)
    code = "import platform; print(platform.python_version())"
    done = subprocess.run([path, "-I", "-c", code], capture_output=True, text=True) if path else None
    if path is None or done is None or done.returncode:
        raise ConfigError(f"there is no {command}; install it, or name another Python with --python.")
    version = done.stdout.strip()
    if not SpecifierSet(requires).contains(version):
        raise ConfigError(
            f"{command} is Python {version}, but pyproject.toml requires {requires}; name another with --python."
        )
    return path, version


def requirements(end: str, project: dict) -> list[str]:
    """The dependencies and the extras of pyproject.toml, for "oldest" the lower bound of each range."""
    extras = project["optional-dependencies"]
    lines = [
        *project["dependencies"],
        *(line for name in extras if name not in EXCLUDED for line in extras[name]),
    ]
    return [_lower_bound(line) for line in lines] if end == "oldest" else lines


def _lower_bound(line: str) -> str:
    """`name==2.0` of `name>=2.0,<3`; a requirement without a lower bound as it is."""
    requirement = Requirement(line)
    bounds = [bound.version for bound in requirement.specifier if bound.operator in (">=", "==")]
    return f"{requirement.name}=={bounds[0]}" if bounds else line


def make_environment(end: str, python: str, version: str, wanted: list[str]) -> Path:
    """The Python of the environment of an end, which is made where it is missing or of other requirements."""
    folder = FOLDER / end
    text = "\n".join([f"# Python {version}", *wanted, ""])
    complete, file = folder / "complete", folder / "requirements.txt"
    inner = folder / "bin/python"
    if complete.exists() and complete.read_text(encoding="utf-8") == text:
        return inner
    print(f"installing {len(wanted)} requirements and what they need into {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run([python, "-m", "venv", folder])
    file.write_text(text, encoding="utf-8")
    _run([inner, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--requirement", file])
    complete.write_text(text, encoding="utf-8")
    return inner


def _run(command: list[str | Path]) -> None:
    status = subprocess.run(command).returncode
    if status:
        raise ConfigError(f"{' '.join(map(str, command))} ended with status {status}; see the message above.")


def installed_versions(python: Path, wanted: list[str]) -> str:
    """Name and version of each requirement, in one line."""
    command = [str(python), "-m", "pip", "list", "--disable-pip-version-check", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {_canonical(entry["name"]): entry["version"] for entry in json.loads(done.stdout)}
    names = sorted({Requirement(line).name for line in wanted}, key=str.lower)
    return ", ".join(f"{name} {found.get(_canonical(name), 'missing')}" for name in names)


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-")


def run_tests(python: Path, results: Path, arguments: list[str]) -> int:
    """The exit status of pytest, which writes JUnit's XML to `results`."""
    names_tests = any((ROOT / argument.partition("::")[0]).exists() for argument in arguments)
    tests = [] if names_tests else [f"tests/{test}" for chosen in CORE.values() for test in chosen]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    environment["PATH"] = f"{python.parent}:{environment['PATH']}"
    results.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", *tests, f"--junit-xml={results}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def summary(results: Path) -> Iterable[str]:
    """One line for each list, with what failed below it."""
    by_module = {_module(test): name for name, tests in CORE.items() for test in tests}
    counts: dict[str, Counter[str]] = {}
    failed: dict[str, list[str]] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        if not case.get("name"):  # it was interrupted
            continue
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        # A file that cannot be imported has a name and no class.
        module = case.get("classname") or case.get("name") or ""
        name = by_module.get(module, "other tests")
        counts.setdefault(name, Counter())[outcome] += 1
        if outcome == "failed":
            failed.setdefault(name, []).append(f"    {module}: {case.get('name')}")
    for name in (*CORE, "other tests"):
        if name in counts:
            count = counts[name]
            yield f"{name}: {count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped"
            yield from failed.get(name, [])


def _module(test: str) -> str:
    """`tests.config.test_tree` of `config/test_tree.py::test_one`, as JUnit's XML has it."""
    return "tests." + test.partition(".py")[0].replace("/", ".")


def main() -> int:
    usage = "%(prog)s [-h] [--python PYTHON] {oldest,newest} [-- ARGUMENTS_OF_PYTEST]"
    parser = ArgumentParser(description=__doc__, usage=usage)
    parser.add_argument("end", choices=("oldest", "newest"), help="the end of the ranges")
    parser.add_argument("--python", help="a Python's name or path (default: the end's, such as python3.11)")
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, of_pytest = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requires = project["requires-python"]
    command = os.path.expanduser(options.python or default_python(options.end, requires))
    path, version = check_python(command, requires)
    wanted = requirements(options.end, project)
    python = make_environment(options.end, path, version, wanted)
    results = FOLDER / f"{options.end}.xml"
    status = run_tests(python, results, of_pytest)
    print(f"\n{options.end}: Python {version}, {installed_versions(python, wanted)}")
    if results.exists():
        print(*summary(results), sep="\n")
    return status


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
