#!/usr/bin/env python3
"""Write what follows from the code: python docs/generate.py

These are docs/settings.md and docs/api.md, and tables in checkpoints.md, coming_from.md, huggingface.md,
huggingface_systems.md and requirements.md.

tests/test_documentation.py compares the pages with what this script would write.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import code_structure

from data_utils.common.settings_listed import describe
from megatron_lite.config.attention import with_choice
from megatron_lite.config.coming_from import sources
from megatron_lite.config.deepspeed_table import Policy, table
from megatron_lite.config.tree import Config, load_config, settings_schema
from megatron_lite.estimate.average_sequence import AverageSequence, average_sequence
from megatron_lite.estimate.gpus import gpu_named
from megatron_lite.estimate.step_estimate import estimate
from megatron_lite.hf.common.ignored_tensors import BUFFERS, OTHER_CLASS_TENSORS
from megatron_lite.hf.published.systems import PUBLISHED, SYSTEMS_BY_NAME
from megatron_lite.runtime.changes import resume_rule
from megatron_lite.runtime.run_state import MEANINGS
from megatron_lite.transformer.build import model_spec

ROOT = code_structure.ROOT
STATES = ("<!-- the table of states: written by docs/generate.py -->", "<!-- end of the table -->")
SYSTEMS = ("<!-- the table of systems: written by docs/generate.py -->", STATES[1])
ARGUMENTS = ("<!-- the tables of arguments: written by docs/generate.py -->", STATES[1])
LEFT_OUT = ("<!-- the table of what is left out: written by docs/generate.py -->", STATES[1])
NEEDS = ("<!-- the table of memory and time: written by docs/generate.py -->", STATES[1])
NOTICE = "Written by `python docs/generate.py`; change the code, not this page."
# What `describe` writes of a setting: its key, then type, range (if it has one) and default in parentheses.
SETTING = re.compile(
    r"  (?P<key>\S+) \((?P<type>.+?)(?:, (?P<range>(?:at |above |below |in |one of ).+))?"
    r", (?:default (?P<default>.*)|required)\)"
)

# docs/api.md: the sections with an introduction, the modules to import from, and their names.
API: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "Objectives": (
        "[An objective of your own](own_objective.md) uses these.",
        {
            "data_utils.objectives.registry": ("register",),
            "data_utils.objectives.base": ("RowObjective", "RowSizes"),
            "data_utils.objectives.interface": ("ObjectiveConfig", "Objective", "TextFormat"),
            "data_utils.objectives.compiled": (
                *("compiled", "inlined", "entry_point", "fill_chunks", "put", "predict", "predict_range"),
                *("set_range", "count_up", "copy_range", "mark_document", "maskable_length"),
                *("cumulative_table", "draw_length"),
            ),
            "data_utils.objectives.masking": (
                *("masked_target", "draw_spans", "draw_corruption", "corrupted_token", "is_special"),
                *("check_corruption", "corruption_thresholds"),
            ),
            "data_utils.common.random_streams": ("next_word", "below", "chance_threshold"),
            "data_utils.common.seeds": ("derive_seed",),
            "data_utils.common.batch_fields": ("Example",),
            "data_utils.common.losses": ("Loss",),
            "data_utils.common.settings": ("setting", "fraction", "check", "checked"),
        },
    ),
    "Tokenizers, datasets and samples": (
        "[Data](data.md) describes how they are built, [format and tools](data_format.md) the files.",
        {
            "data_utils.tokenizers.tokenizer_readers": ("TokenizerConfig",),
            "data_utils.tokenizers.tokenizer": ("load_tokenizer", "Tokenizer"),
            "data_utils.dataset.indexed_dataset": ("IndexedDataset",),
            "data_utils.dataset.writer": ("IndexedDatasetWriter",),
            "data_utils.loader.sampler": ("WindowIndex", "derive_key", "permute", "unpermute"),
            "data_utils.loader.mixture": (
                "Mixture",
                "Start",
                "quotas",
                "samples_of_corpora",
                "batch_indices",
            ),
            "data_utils.loader.loader": ("SampleLoader",),
        },
    ),
    "Trained models": (
        "[Generation](generation.md) and [lm_eval](lm_eval.md) describe the commands.",
        {
            "megatron_lite.inference.open_run": ("load_run", "open_run", "Run", "OpenRun"),
            "megatron_lite.config.generation": ("GenerationConfig",),
            "megatron_lite.inference.texts": (
                "fills_blanks",
                "make_text_generator",
                "complete",
                "Completion",
            ),
            "megatron_lite.inference.decoders": ("make_decoder", "Decoder"),
            "megatron_lite.inference.search": ("Hypothesis",),
            "megatron_lite.finetune.harness": ("Harness", "HarnessOptions"),
            "megatron_lite.finetune.lm_eval_model": ("CheckpointLM", "LocalTasks"),
        },
    ),
    "Hugging Face": (
        "[Import and export](huggingface.md) describes the commands, [exported GLMs](huggingface_glm.md) the classes.",
        {
            "megatron_lite.hf.export": ("export_run", "ExportOptions"),
            "megatron_lite.hf.importing": ("import_directory",),
            "megatron_lite.hf.common.verify": ("Comparison",),
        },
    ),
    "Errors": (
        "What the functions above raise for mistakes of a user.",
        {"data_utils.common.errors": ("UserError", "ConfigError", "DataError", "CheckpointError")},
    ),
}
DOCSTRING_SECTION = re.compile(r"(?:(?<=\s)|\A)(Args|Attributes|Returns|Raises):(?=\s)")


def settings() -> str:
    """A table for each section of the configuration."""
    described = [line for line in describe(Config) if line]
    sections: dict[str, list[str]] = {}
    for line, meaning in zip(described[::2], described[1::2], strict=True):
        match = SETTING.fullmatch(line)
        assert match is not None, line
        kind = "mapping" if match["type"].startswith("dict[") else match["type"]
        default = "required" if match["default"] is None else f"`{match['default']}`"
        rule = resume_rule(match["key"])
        cells = [f"`{match['key']}`", kind, match["range"] or "", default, rule, meaning.strip()]
        row = " | ".join(cell.replace("|", "\\|") for cell in cells)
        sections.setdefault(match["key"].rpartition(".")[0], []).append(f"| {row} |")
    sections["Keys without a section"] = sections.pop("")
    lines = [
        "# Settings",
        "",
        f"{NOTICE} [configuration.md](configuration.md) says how files and overrides combine.",
        "",
        "`on resume` says what may change a setting in a run that continues: `free` = any start, `phase` = a "
        "[phase](data_mixtures.md#phases), for later steps, `never` = none, so that [another run or a "
        "branch](checkpoints.md#continuing) is needed.",
    ]
    for section, rows in sections.items():
        lines += [
            "",
            f"## {section}",
            "",
            "| key | type | range | default | on resume | meaning |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    return "\n".join(lines) + "\n"


def checkpoints() -> str:
    """The page, with its table of a run's states as the code has them."""
    lines = ["| state | what is seen | the same command | `rewind` | report |", "|---|---|---|---|---|"]
    for condition, meaning in MEANINGS.items():
        rewind = "returns to a good one" if meaning.rewind else "is refused"
        note = "shows it" if meaning.note else ""
        lines.append(f"| {condition} | {meaning.sign} | {meaning.start} | {rewind} | {note} |")
    text = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    return _with_table(text, STATES, lines)


def huggingface() -> str:
    """The page, with its table of the classes that are read and written."""
    lines = ["| class of transformers | `model_type` | `model.system` |", "|---|---|---|"]
    for kind, system in PUBLISHED.items():
        names = [name for name, of_name in SYSTEMS_BY_NAME.items() if of_name is system]
        cells = [_listed(each) for each in (system.classes, [kind], names)]
        lines.append(f"| {' | '.join(cells)} |")
    return _with_table((ROOT / "docs/huggingface.md").read_text(encoding="utf-8"), SYSTEMS, lines)


def huggingface_systems() -> str:
    """The page, with its table of the tensors that an import leaves out."""
    lines = ["| tensors | what they are | `model_type` |", "|---|---|---|"]
    for each in (*BUFFERS, *OTHER_CLASS_TENSORS):
        names = each.names if each.types else [f"*.{name}" for name in each.names]  # below any module
        lines.append(f"| {_listed(names)} | {each.what} | {_listed(each.types) or 'any'} |")
    return _with_table((ROOT / "docs/huggingface_systems.md").read_text(encoding="utf-8"), LEFT_OUT, lines)


# Configurations by size, and numbers of GPUs.
ESTIMATED = (
    "small",
    "medium",
    "modernbert-base",
    "bert-large",
    "t5-base",
    "glm-large",
    "glm-2b",
    "glm-10b",
    "llama-3.2-1b",
)
GPUS = (1, 8, 64)


def requirements() -> str:
    """The page, with what `--dry-run` estimates of some configurations."""
    titles = [f"{number} GPU{'s' * (number > 1)}" for number in GPUS]
    lines = [f"| configuration | parameters | {' | '.join(titles)} |", "|---|---|" + "---|" * len(GPUS)]
    for name in ESTIMATED:
        config = load_config([ROOT / f"configs/{name}.yaml"])
        if config.model.vocab_size is None:
            config = config.with_vocab_size(32000)  # of README.md's tokenizer
        config = with_choice(config, gpu_named("h100").capability)
        phases = [(phase, average_sequence(phase)) for phase in config.phase_plan.alone()]
        cells = [_needed(phases, number) for number in GPUS]
        parameters = model_spec(config).count(config) / 1e6
        lines.append(f"| `{name}.yaml` | {parameters:,.0f} M | {' | '.join(cells)} |")
    return _with_table((ROOT / "docs/requirements.md").read_text(encoding="utf-8"), NEEDS, lines)


def _needed(phases: Iterable[tuple[Config, AverageSequence]], processes: int) -> str:
    """Memory and time of a configuration's steps on so many H100."""
    gpu, hours, peak = gpu_named("h100"), 0.0, 0.0
    for phase, sequence in phases:
        micro = math.gcd(phase.batch.micro_batch_size, phase.batch.global_batch_size // processes)
        phase = replace(phase, batch=replace(phase.batch, micro_batch_size=micro))
        step = estimate(phase, processes, gpu, sequence)
        if not step.fits(gpu):
            return "no"
        hours += phase.training.steps * step.step_ms / 3600e3
        peak = max(peak, step.peak_gib)
    minutes = max(1, round(hours * 60))
    duration = (
        f"{minutes} min" if hours < 2 else f"{hours:.0f} hours" if hours < 72 else f"{hours / 24:.0f} days"
    )
    return f"{peak:.1f} GiB, {duration}"


def coming_from() -> str:
    """The page, with a table of the arguments of each program."""
    lines = []
    megatron, *_ = sources().values()
    shared = {(name, argument.setting) for argument in megatron for name in argument.names}
    for source, arguments in sources().items():
        lines += ["", f"## {source}", ""]
        if source == "THUDM/GLM":  # a fork of Megatron-LM
            arguments = tuple(
                a for a in arguments if not shared.issuperset((name, a.setting) for name in a.names)
            )
            lines += [
                "Options that are not in [Megatron-LM's table](#megatron-lm-and-megatron-deepspeed):",
                "",
            ]
        lines += ["| option | setting | note |", "|---|---|---|"]
        has_dashes = source.startswith(("Megatron", "THUDM"))
        for argument in arguments:
            names = [name.replace("_", "-") if has_dashes else name for name in argument.names]
            theirs = ", ".join(f"`--{name}`" for name in names)
            form = argument.setting.replace("{}", "VALUE")
            lines.append(f"| {theirs} | {f'`{form}`' if form else ''} | {argument.note} |")
    decided = [(key, row.reason) for key, row in table().options.items() if row.policy is Policy.SETTING]
    lines += ["", "## DeepSpeed's JSON", "", "| DeepSpeed key | setting |", "|---|---|"]
    lines += [f"| `{key}` | {reason} |" for key, reason in decided]
    text = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
    return _with_table(text, ARGUMENTS, lines)


def api() -> str:
    """Signatures and docstrings of what users import, read from the source without importing it."""
    lines = [
        "# Python API",
        "",
        f"{NOTICE} Headings name the module to import from, as in",
        "`from data_utils.objectives.registry import register`. What this page leaves out may change in any version.",
    ]
    for section, (introduction, modules) in API.items():
        lines += ["", f"## {section}", "", introduction]
        for module, names in modules.items():
            source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
            tree = ast.parse(source)
            defined = {name: node for node in tree.body for name in _names(node)}
            lines += ["", f"### {module}", "", *_docstring(tree)]
            for name in names:
                lines += ["", f"#### {name}", *_definition(defined[name], source.splitlines())]
    return "\n".join(lines) + "\n"


def _names(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _definition(node: ast.stmt, source: list[str]) -> Iterator[str]:
    """The lines of a function, a class with its public fields and documented methods, or a constant."""
    if isinstance(node, ast.FunctionDef):
        yield from ("", *_code([f"{_header(node, source)} ..."]), "", *_docstring(node, _parameters(node)))
    elif isinstance(node, ast.ClassDef):
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        init = next((each for each in methods if each.name == "__init__"), None)
        fields = [
            each for each in node.body if any(name[0] != "_" for name in _names(each)) and each not in methods
        ]
        body = [line for field in fields for line in _statement(field, source)]
        if init:
            body += [*([""] if body else []), f"{_header(init, source)} ..."]
        code = [_header(node, source), *body] if body else [f"{_header(node, source)} ..."]
        parameters = {*_parameters(init), *(name for field in fields for name in _names(field))}
        yield from ("", *_code(code), "", *_docstring(node, parameters))
        for method in methods:
            if method.name[0] != "_" and ast.get_docstring(method):
                yield from _definition(method, source)
    else:
        yield from ("", *_code(_statement(node, source)))


def _header(node: ast.FunctionDef | ast.ClassDef, source: list[str]) -> str:
    """Decorators and signature as the source has them, without a comment for linters at the end."""
    first = min(each.lineno for each in (node, *node.decorator_list))
    return "\n".join(source[first - 1 : node.body[0].lineno - 1]).partition("  # noqa")[0].rstrip()


def _statement(node: ast.stmt, source: list[str]) -> list[str]:
    """An assignment with its comments: at its end, and in the lines above."""
    first = node.lineno - 1
    while source[first - 1].lstrip().startswith("#"):
        first -= 1
    return source[first : node.end_lineno]


def _code(lines: list[str]) -> list[str]:
    return ["```python", *inspect.cleandoc("\n" + "\n".join(lines)).splitlines(), "```"]


def _parameters(node: ast.FunctionDef | None) -> set[str]:
    if node is None:
        return set()
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {each.arg for each in (*named, arguments.vararg, arguments.kwarg) if each}


def _docstring(
    node: ast.Module | ast.ClassDef | ast.FunctionDef, parameters: Collection[str] = ()
) -> list[str]:
    """A docstring in Markdown: its text, then Args, Attributes, Returns and Raises as a list."""
    prose, *sections = DOCSTRING_SECTION.split(ast.get_docstring(node) or "")
    texts, items = [prose.strip()], []
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        # Text that is not indented ends a section; where its first entry is in the line of the title, a paragraph does.
        end = r"\n+(?=\S)" if body.startswith("\n") else r"\n\n(?=\S)"
        body, *rest = re.split(end, body.rstrip(), maxsplit=1)
        texts += [text.strip() for text in rest]
        entries = _entries(title, body, parameters)
        items.append(f"- **{title}**" + ("" if entries else f": {_escaped(' '.join(body.split()))}"))
        items += [f"    - {_listed(names.split(', '))}: {_escaped(text)}" for names, text in entries]
    lines = _escaped("\n\n".join(text for text in texts if text)).splitlines()
    return [*lines, *([""] if lines and items else []), *items]


def _entries(title: str, body: str, parameters: Collection[str]) -> list[tuple[str, str]]:
    """Names and text of each entry of a section; [] if it is plain text. Names of Args are those of parameters."""
    found: list[re.Match[str]] = []
    if title == "Attributes":
        found = list(re.finditer(r"^ {4}(\w+(?:, \w+)*): ", body, re.M))
    elif title == "Args":
        entries = re.finditer(r"(?:^ *|(?<=[.;] ))(\w+(?:, \w+)*): ", body, re.M)
        found = [match for match in entries if set(match[1].split(", ")) <= set(parameters)]
    if not found or body[: found[0].start()].strip():
        return []
    ends = [*(match.start() for match in found[1:]), len(body)]
    return [
        (match[1], " ".join(body[match.end() : end].split())) for match, end in zip(found, ends, strict=True)
    ]


def _escaped(text: str) -> str:
    """Text of which Markdown makes no emphasis and no HTML. Code and indented lines are as they are."""
    parts = re.split(r"(`[^`]*`|^ {4}.*$)", text, flags=re.M)
    return "".join(
        part if number % 2 else re.sub(r"(?<! )\*|\*(?! )", r"\*", part).replace("<", "&lt;")
        for number, part in enumerate(parts)
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _with_table(text: str, marks: tuple[str, str], lines: list[str]) -> str:
    """A page with these lines between its marks."""
    before = text.index(marks[0]) + len(marks[0])
    return "\n".join([text[:before], *lines, text[text.index(marks[1], before) :]])


def schema() -> str:
    """What pretrain_glm.py --schema prints."""
    return f"{json.dumps(settings_schema(), indent=1)}\n"


PAGES = {
    "settings.md": settings,
    "api.md": api,
    "checkpoints.md": checkpoints,
    "huggingface.md": huggingface,
    "huggingface_systems.md": huggingface_systems,
    "requirements.md": requirements,
    "coming_from.md": coming_from,
    "../configs/settings.schema.json": schema,
}


def main() -> None:
    for name, page in PAGES.items():
        (ROOT / "docs" / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
