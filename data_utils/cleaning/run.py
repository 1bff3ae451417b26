"""A cleaning run from its options to its output.

    OUTPUT/text/00000.jsonl ...   the clean text, in the order of the input
    OUTPUT/manifest.json          the record: rules, thresholds, counts, versions
    OUTPUT/report.json, .html     counts and ten examples of each rule
    OUTPUT.cleaning/              the work: plan.json, data, logs and counts of the stages; removed at the end

The output is renamed into place when it is complete. What changes it is in the plan, so the same command continues, and
another is refused. The output does not depend on workers or the executor; the number of tasks only cuts it into other
files.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_utils.build.contamination import NGRAM_WORDS, EvaluationTexts
from data_utils.cleaning.counts import Rule, merged_records, merged_rules
from data_utils.cleaning.recipe import RecipeFile
from data_utils.common.errors import ConfigError, DataError
from data_utils.common.files import disk_errors, locked, put_in_place, require_new_directory, write_atomically
from data_utils.common.setting_files import shown
from data_utils.common.settings import leaves, to_tree
from data_utils.common.untrusted import parse_json, read_bounded
from data_utils.common.urls import is_url, without_secrets
from data_utils.corpus.documents import RecordCounts, check_options, check_text_key, read_document_files
from data_utils.corpus.inputs import expand_inputs
from data_utils.corpus.stored_files import InputFile, read_errors
from data_utils.dataset.cleaning_record import FILE, TEXT, record_bytes
from data_utils.storage.objects import StoredObject, input_change

if TYPE_CHECKING:
    from data_utils.cleaning.executors import Execution
    from data_utils.cleaning.reader import Reading
    from data_utils.cleaning.stages import Inputs, WorkFolders

_PLAN_VERSION = 3
_PLAN = "plan.json"
_INPUTS = ("input", "held-out")  # of a plan: a list of [name, size, identity] each
_MAX_BYTES = 256 << 20  # of a plan
_FILES_OF_A_TASK = 3  # that finding exact duplicates opens: what it reads, duplicates, their counts
_OTHER_FILES = 100
_PACKAGES = ("datatrove", "regex", "dill", "loguru")  # datatrove 0.10 imports regex and does not say so


def require_datatrove() -> None:
    """Raise ConfigError unless the packages of this command are installed. Loads none of them."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"cleaning needs the package {missing[0]}, which is not installed; run pip install '.[clean]' in the "
            "checkout."
        )


@dataclass(frozen=True, kw_only=True)
class CleaningConfig:
    """The options that decide the output, with `tasks`, which decides its files. Raises ConfigError."""

    recipe: RecipeFile
    inputs: Sequence[str]  # files, globs and URLs
    output: Path
    evaluation_inputs: Sequence[str] = ()
    held_out: Sequence[str] = ()
    reading: Reading
    tasks: int = 1
    restart: bool = False  # discard what a stopped command left

    def __post_init__(self) -> None:
        from data_utils.cleaning.stages import MAX_TASKS

        reading, recipe = self.reading, self.recipe.recipe
        problems = []
        try:
            check_options(reading.text_split, reading.on_bad_record, reading.max_bad_records)
        except ConfigError as error:
            problems.append(str(error).removesuffix("."))
        if not os.path.basename(os.path.abspath(self.output)):
            problems.append(f"--output is {self.output}; give a new directory")
        if not 1 <= self.tasks <= MAX_TASKS:
            problems.append(f"--tasks is {self.tasks}; it must be in [1, {MAX_TASKS}]")
        if self.held_out and recipe.near_duplicates is None:
            problems.append(
                f"--held-out is given, but {self.recipe.path} has no near_duplicates, by which copies of these texts "
                "are found; add near_duplicates: {} to the recipe"
            )
        if recipe.is_empty and not self.evaluation_inputs:
            problems.append(
                f"{self.recipe.path} removes nothing; give it keep, filters, exact_duplicates or near_duplicates, or "
                "give --decontaminate"
            )
        if problems:
            raise ConfigError(f"{'. '.join(problems)}.")


def clean_corpus(
    config: CleaningConfig,
    execution: Execution,
    page: Callable[[Mapping[str, Any]], str],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Clean a text; see the module docstring.

    Args: page: makes report.html of the report. say: called with a line on each stage.
    Returns: the report.
    Raises: ConfigError; DataError for bad input, output that exists or cannot be written, another run that was started
        and not finished, a task that failed.
    """
    _check_urls(config, execution)
    _allow_open_files(config)
    output = Path(os.path.abspath(config.output))
    work = output.with_name(f"{output.name}.cleaning")
    _require_utf8([config.recipe.path.name, output])  # before the lock makes folders
    with disk_errors(output), locked(output):
        inputs = _read_inputs(config, work, absolute=execution.executor == "ray")
        plan = _plan(config, inputs)
        require_new_directory(output)
        report = _run_stages(config, execution, inputs, plan, work, say)
        report_bytes = json.dumps(report, indent=1, ensure_ascii=False).encode() + b"\n"
        write_atomically(work / "output/report.json", report_bytes)
        write_atomically(work / "output/report.html", page(report).encode())
        put_in_place(work / "output", output)
        _remove(work)
    return report


def _check_urls(config: CleaningConfig, execution: Execution) -> None:
    """Raise ConfigError for a secret in a URL that would reach the tasks by a file.

    A job of SLURM reads its inputs from a pickle on a file system that nodes share, which stays there if the command is
    killed; Ray moves what its memory does not hold to disk.
    """
    if execution.executor == "local":
        return
    for option, urls in (("--input", config.inputs), ("--held-out", config.held_out)):
        for url in filter(is_url, urls):
            if without_secrets(url) != url:
                raise ConfigError(
                    f"{option} {without_secrets(url)} is given with a password or a query, which --executor "
                    f"{execution.executor} would write into files; use --executor local, or a store whose credentials "
                    "come from the environment."
                )


def _allow_open_files(config: CleaningConfig) -> None:
    """Raise this process's limit of open files, and its tasks', to what finding duplicates needs.

    Raises: ConfigError where the machine allows fewer: after hours of work the error of a stage would be too late.
    """
    near = config.recipe.recipe.near_duplicates
    if near is None and not config.recipe.recipe.exact_duplicates:
        return
    needed = max(_FILES_OF_A_TASK * config.tasks, near.num_buckets if near is not None else 0) + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"--tasks is {config.tasks:,}, and finding duplicates opens files of all tasks or buckets at once, "
            f"{needed:,} files, but this machine allows {hard:,}; use fewer tasks, or raise the limit (ulimit -n)."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _require_utf8(names: Iterable[object]) -> None:
    """Raise DataError for names that the report, the record or the work cannot hold."""
    problems = [shown(name) for name in map(str, names) if not _is_utf8(name)]
    if problems:
        raise DataError(
            f"these names are not UTF-8, as the report needs them: {', '.join(problems)}; rename them."
        )


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _remove(work: Path) -> None:
    """Remove the work, the plan last: with it, a command that discards work and is killed can be repeated.

    The logs go first: their marks of finished tasks would else stand for files that are gone.
    """
    for entry in sorted(work.iterdir(), key=lambda entry: entry.name != "logs"):
        if entry.is_dir():
            shutil.rmtree(entry)
    shutil.rmtree(work)


def _read_inputs(config: CleaningConfig, work: Path, absolute: bool) -> Inputs:
    """Args: absolute: make paths absolute, because workers have another working directory."""
    from data_utils.cleaning.stages import Inputs

    reading = config.reading
    paths, held_out, evaluation_paths = (
        [path for path in expand_inputs(patterns) if not _is_below(path, work)] if patterns else []
        for patterns in (config.inputs, config.held_out, config.evaluation_inputs)
    )
    _require_utf8([*paths, *held_out])
    check_text_key(reading.text_key, [*paths, *held_out, *evaluation_paths])
    among = set(map(_content_key, paths))
    for option, others in (("--held-out", held_out), ("--decontaminate", evaluation_paths)):
        for path in others:
            if _content_key(path) in among:
                raise DataError(
                    f"{option} {path} is also an --input, all of which it would remove; name it once."
                )
    evaluation, records = None, RecordCounts()
    if evaluation_paths:
        documents = read_document_files(evaluation_paths, **asdict(reading), counts=records)
        evaluation = EvaluationTexts(list(documents))
    if absolute:
        paths, held_out = (
            [path.absolute() if isinstance(path, Path) else path for path in files]
            for files in (paths, held_out)
        )
    return Inputs(paths, held_out, evaluation, dict(sorted(records.bad.items())), reading)


def _is_below(path: InputFile, work: Path) -> bool:
    """Whether a file is of the work itself, which a glob such as data/**/*.jsonl finds when the command is repeated."""
    return isinstance(path, Path) and work in Path(os.path.abspath(path)).parents


def _plan(config: CleaningConfig, inputs: Inputs) -> dict[str, Any]:
    """Everything that the files of the stages depend on."""
    plan = {
        "version": _PLAN_VERSION,
        "datatrove": importlib.metadata.version("datatrove"),
        "recipe": to_tree(config.recipe.recipe),
        # to_tree keeps the order, but mappings compare without it.
        "filters": list(config.recipe.recipe.filters.chosen),
        **asdict(config.reading),
        "tasks": config.tasks,
        "decontaminate": inputs.evaluation and inputs.evaluation.fingerprint,
        "held-out": [_identity(path) for path in inputs.held_out],
        "input": [_identity(path) for path in inputs.paths],
    }
    return json.loads(json.dumps(plan))


def _content_key(path: InputFile) -> tuple[Any, ...]:
    """Equal for two names of one file."""
    if isinstance(path, StoredObject):
        return path.label, path.size, path.identity
    state = path.stat()
    return state.st_dev, state.st_ino


def _identity(path: InputFile) -> list[Any]:
    """An input in the plan, without what may be secret in its URL."""
    if isinstance(path, StoredObject):
        return [path.label, path.size, path.identity]
    with read_errors(path):
        state = path.stat()
    return [str(path.absolute()), state.st_size, state.st_mtime_ns]


def _read_plan(work: Path) -> Any:
    """The plan of the work that was begun; None without any. Raises DataError for damage."""
    try:
        started = parse_json(read_bounded(work / _PLAN, _MAX_BYTES))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{work / _PLAN} {error}; discard the work with --restart.") from None
    return started


def _open_work(work: Path, plan: Mapping[str, Any], restart: bool) -> None:
    """Begin the work, or continue it. Raises DataError if work with another plan was begun."""
    content = json.dumps(plan, indent=1).encode()
    if len(content) > _MAX_BYTES:  # now: what cannot be read back could not be continued
        raise DataError(
            f"{len(plan['input']):,} input files need a plan of {len(content):,} bytes, more than the {_MAX_BYTES:,} "
            "that are read back; join files, or clean them in several runs."
        )
    if work.exists() and (not work.is_dir() or (any(work.iterdir()) and not (work / _PLAN).exists())):
        raise DataError(f"{work} is not the work of a cleaning run, but has its name; move it away.")
    if restart and work.exists():
        _remove(work)
    started = _read_plan(work)
    if started is not None and started != plan:
        raise DataError(
            f"{work} holds the unfinished work of a run with {_difference(started, plan)}; repeat the original "
            "command, or discard the work with --restart."
        )
    if started is None:
        # For its owner alone: jobs of SLURM load from there the pipeline that they run, as datatrove pickles it.
        work.mkdir(mode=0o700, exist_ok=True)
        write_atomically(work / _PLAN, content)
    (work / "output" / TEXT).mkdir(parents=True, exist_ok=True)


def _difference(started: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    old, new = dict(leaves(started)), dict(leaves(plan))
    key = next(key for key in {**old, **new} if old.get(key) != new.get(key))
    if key in _INPUTS:
        return input_change(old.get(key) or [], new.get(key) or [], f"--{key} files")
    if key == "decontaminate":
        return "other --decontaminate texts"
    if key.startswith("recipe.") or key == "filters":
        return f"another recipe ({key.removeprefix('recipe.')} differs)"
    return f"{key} {old.get(key)!r} instead of {new.get(key)!r}"


def _run_stages(
    config: CleaningConfig,
    execution: Execution,
    inputs: Inputs,
    plan: Mapping[str, Any],
    work: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run what is not complete, and write the record. Returns the report."""
    from data_utils.cleaning.executors import executor_ready, job_name_of, run_stage
    from data_utils.cleaning.stages import WorkFolders, make_stages

    folders = WorkFolders(work)
    stages = make_stages(config.recipe.recipe, inputs, folders, config.tasks)
    job_name = job_name_of(work)
    is_open = False
    try:
        with executor_ready(execution, work, job_name):  # no job of an earlier command works there now
            _open_work(work, plan, config.restart)
            is_open = True
            for number, stage in enumerate(stages, 1):
                say(f"stage {number} of {len(stages)}: {stage.name} ({stage.tasks} tasks)")
                run_stage(stage, folders, execution, job_name)
                if number == 1:
                    _check_unchanged(plan, "input", inputs.paths)
                    _check_read(config, folders)
                if stage.name == "held_out":
                    _check_unchanged(plan, "held-out", inputs.held_out)
                    _check_held_out(config, folders)
            report, files = _report(config, inputs, folders)
    except BaseException as error:  # the jobs that write there are cancelled by now
        has_finished_tasks = any((work / "logs").glob("*/completions/*"))
        if is_open and (isinstance(error, _UselessWork) or not has_finished_tasks):
            # A job that has not ended yet may still write there; what is then left can be continued.
            with contextlib.suppress(OSError):
                _remove(work)
        raise
    facts = {key: value for key, value in report.items() if key not in ("rules", "largest_groups")}
    facts["records"] = {key: value for key, value in report["records"].items() if key != "examples"}
    facts["rules"] = {
        name: {key: rule[key] for key in ("documents", "parts", "bytes", "removed")}
        for name, rule in report["rules"].items()
    }
    write_atomically(work / "output" / FILE, record_bytes(facts, files))
    return report


class _UselessWork(DataError):
    """The same command fails again, and no other can use the work."""


def _check_unchanged(plan: Mapping[str, Any], key: str, paths: Iterable[InputFile]) -> None:
    """Raise DataError for files that were changed while they were read: what was read is of neither version."""
    now = [_identity(path) for path in paths]
    if now != plan[key]:
        raise _UselessWork(
            f"while the text was read there came {input_change(plan[key], now, f'--{key} files')}; repeat the command "
            "when nothing writes to it."
        )


def _check_read(config: CleaningConfig, folders: WorkFolders) -> None:
    """Raise DataError for what only shows when all records are read: too many bad ones, a field that none has."""
    read, records = merged_records(folders.counts("read"))
    reading = config.reading
    records.enforce(reading.on_bad_record, reading.max_bad_records, reading.text_split)
    if not read["documents"]:
        raise _UselessWork(
            f"the input has no document ({records.empty_documents} empty documents, {records.blank_lines} blank lines, "
            f"{records.num_bad} bad records); check --input and --text-key."
        )
    for name in config.recipe.recipe.field_names:
        if name not in read["fields"]:
            raise _UselessWork(
                f"{config.recipe.path} names the field {name!r}, but none of the {read['documents']:,} documents has "
                "it; correct the name, or clean other text."
            )


def _check_held_out(config: CleaningConfig, folders: WorkFolders) -> None:
    """Raise DataError for too many bad records of all tasks, and without a document."""
    read, records = merged_records(folders.counts("held_out"))
    reading = config.reading
    records.enforce(reading.on_bad_record, reading.max_bad_records, reading.text_split)
    if not read["documents"]:
        raise _UselessWork("the files of --held-out have no document; give texts, or leave the option out.")


def _report(
    config: CleaningConfig, inputs: Inputs, folders: WorkFolders
) -> tuple[dict[str, Any], dict[str, int]]:
    """The report, and the files of text with their bytes. No times and no machine: equal runs give equal bytes."""
    from data_utils.cleaning.stages import removal_steps

    recipe = config.recipe.recipe
    read, records = merged_records(folders.counts("read"))
    written = list(folders.counts("written").read())
    groups = _groups(folders, read["lines"])
    rules: dict[str, dict[str, Any]] = {}
    left, after = {"documents": read["documents"], "bytes": read["bytes"]}, {}
    for step in removal_steps(recipe, inputs.evaluation is not None):
        removes = step != "contamination" or recipe.contaminated == "remove"
        # What c4 left without text is counted by a step of its own.
        for name in [step, "c4.empty"] if step == "c4" else [step]:
            for rule, counts in merged_rules(folders.counts(f"removed/{name}")).items():
                rules[rule] = {**_rule(counts, read["lines"], groups), "removed": removes}
                if removes:
                    left = {key: count - rules[rule][key] for key, count in left.items()}
        after[step] = left
    report = {
        "recipe": to_tree(recipe),
        "recipe_file": {"name": config.recipe.path.name, "sha256": config.recipe.sha256},
        "versions": {name: importlib.metadata.version(name) for name in ("datatrove", "numpy", "regex")},
        "in": {"documents": read["documents"], "bytes": read["bytes"]},
        "after": after,
        "out": {
            "documents": sum(counts["documents"] for counts in written),
            "bytes": sum(counts["bytes"] for counts in written),
        },
        "records": {
            "bad": dict(sorted(records.bad.items())),
            "empty_documents": records.empty_documents,
            "blank_lines": records.blank_lines,
            "examples": [
                {"at": _location(asdict(example), read["lines"]), "problem": example.problem}
                for example in records.examples
            ],
        },
        "rules": rules,
    }
    if recipe.near_duplicates is not None:
        report["largest_groups"] = [
            {"documents": size, "stayed": groups[group]} for group, size in _read_groups(folders)["largest"]
        ]
    if inputs.evaluation is not None:
        report["evaluation"] = {
            "texts": inputs.evaluation.num_texts,
            "texts_too_short": inputs.evaluation.num_too_short,
            "bad": inputs.bad_evaluation_texts,
            "words": NGRAM_WORDS,
            "fingerprint": inputs.evaluation.fingerprint,
        }
    if inputs.held_out:
        held_out, bad = merged_records(folders.counts("held_out"))
        report["held_out"] = {
            "documents": held_out["documents"], "bytes": held_out["bytes"], "bad": dict(sorted(bad.bad.items()))
        }  # fmt: skip
    files = {counts["file"]: counts["file_bytes"] for counts in written if counts["documents"]}
    _require_whole(report, folders, files)
    return report, files


def _rule(
    counts: Rule, lines: Sequence[Sequence[Any]], groups: Mapping[int, dict[str, str] | None]
) -> dict[str, Any]:
    """A rule in the report. Args: lines: [source, start, lines] of ranges of files. groups: see `_groups`."""
    examples = [
        {
            **_example(example, lines),
            **({"stayed": groups[example["group"]]} if "group" in example else {}),
        }
        for example in counts.examples
    ]
    return {
        "documents": counts.documents, "parts": counts.parts, "bytes": counts.bytes, "examples": examples
    }  # fmt: skip


def _groups(folders: WorkFolders, lines: Sequence[Sequence[Any]]) -> dict[int, dict[str, str] | None]:
    """The text that stayed of each group of near-duplicates that is shown; None: a held-out text."""
    stayed = {
        int(group): _example(example, lines)
        for counts in folders.counts("stayed").read()
        for group, example in counts.items()
    }
    return {**stayed, **dict.fromkeys(_read_groups(folders).get("held_out", ()))}


def _read_groups(folders: WorkFolders) -> dict[str, Any]:
    return next(folders.counts("groups").read(), {})


def _example(example: Mapping[str, Any], lines: Sequence[Sequence[Any]]) -> dict[str, str]:
    return {"at": _location(example, lines), "text": example["text"]}


def _location(example: Mapping[str, Any], lines: Sequence[Sequence[Any]]) -> str:
    source, start = example["source"], example["start"]
    before = sum(count for name, begin, count in lines if name == source and begin < start)
    return f"{source}:{example['line'] + before}"


def _require_whole(report: Mapping[str, Any], folders: WorkFolders, files: Mapping[str, int]) -> None:
    """Raise DataError unless each byte that was read is removed or written, and all that was written is there."""
    removed = report["in"]["documents"] - (left := list(report["after"].values())[-1])["documents"]
    if not report["out"]["documents"] and removed == report["in"]["documents"]:
        largest = max(report["rules"].items(), key=lambda item: item[1]["documents"])
        raise _UselessWork(
            f"no document is left of {removed:,}; the rule that removed most is {largest[0]} "
            f"({largest[1]['documents']:,}); set other thresholds."
        )
    text = folders.output / TEXT
    if left != report["out"] or any((text / name).stat().st_size != size for name, size in files.items()):
        raise DataError(
            f"the work in {folders.root} is damaged: the rules leave {left['documents']:,} documents of "
            f"{left['bytes']:,} bytes, and {report['out']['documents']:,} of {report['out']['bytes']:,} were written; "
            "discard it with --restart."
        )
