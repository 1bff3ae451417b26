"""The commands of the pages: each runs as it stands, or `TABLE` has the reason why it does not.

Commands that take seconds run in the usual tests, on some of their pages, others in tests marked slow, page by page and
in their order, in a copy of the project with small inputs. `SMALLER` replaces numbers that need a long run, and a
launcher of many processes, and changes nothing else. README.md begins in an empty directory; its Python and that of the
whole paths run too. Each command is at least read by its parser.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
import zstandard
from pyarrow import parquet
from support.data.laptop_packages import write_packages
from support.data.tokenizer_files import byte_bpe_json
from support.distributed import run_ranks
from support.hf.published_files import write_released
from support.plants.plants import PLANTS
from support.project import PAGES, ROOT, copied_project, small_run
from support.selection import slow_but
from support.systems.embeddings import released_directory
from support.training.report_runs import fit_and_fill, interrupted
from transformers import AutoTokenizer

from data_utils.common.settings import merge
from data_utils.tokenizers.special_tokens import SPECIAL_NAMES
from megatron_lite.config.tree import load_config
from megatron_lite.runtime.heartbeats import Heartbeat, heartbeat_directory

COMMAND = re.compile(r"for .* do\n|(?:python|deepspeed|bash|make|pip|wandb|mpirun|srun|sbatch|diff|docker) ")
HERE, SLOW, WHOLE = "here", "slow", "the test of whole paths below"


@dataclass(frozen=True)
class Row:
    """Where the commands run that start with `start`: HERE, SLOW, WHOLE, or a test elsewhere and the reason."""

    start: str
    where: str
    page: str = ""  # for this page alone


TABLE = [
    Row("", WHOLE, "tutorial.md"),
    Row("", WHOLE, "classifier.md"),
    Row("bash scripts/laptop.sh", "tests/scripts/test_laptop.py: its stages, as slow, with --smoke"),
    Row("pip install", "requirements-dev.txt has these packages"),
    Row("", WHOLE, "embeddings.md"),
    Row("python scripts/embed.py", "tests/embedding/test_embed_command.py: needs a run of an encoder"),
    Row("python scripts/train_tokenizer.py", HERE),
    Row(
        "python scripts/preprocess_data.py --input 's3:", "tests/data/storage/test_buckets.py: needs a bucket"
    ),
    Row(
        "python scripts/preprocess_data.py --input 'hf:",
        "tests/data/storage/test_hub_datasets.py: needs the hub",
    ),
    Row(
        "python scripts/preprocess_data.py --input https:",
        "tests/data/storage/test_web.py: needs a web server",
    ),
    Row(
        "python scripts/preprocess_data.py --text-pairs",
        "tests/data/pairs/test_text_pair_builds.py: needs pairs of texts",
    ),
    Row("python scripts/mine_negatives.py", "tests/scripts/test_mine_negatives.py: needs vectors"),
    Row("python scripts/preprocess_data.py", HERE),
    Row("python scripts/split_sentences.py", HERE),
    Row("python scripts/dataset.py push", "tests/data/storage/test_datasets.py: needs a bucket"),
    Row("python scripts/dataset.py verify s3:", "tests/data/storage/test_datasets.py: needs a bucket"),
    Row("python scripts/clean_corpus.py --executor slurm", "tests/scripts/test_clean_corpus.py: needs SLURM"),
    Row("python scripts/clean_corpus.py", HERE),
    Row("python scripts/dataset.py", HERE),
    Row("python scripts/inspect_batch.py", HERE),
    Row("python scripts/checkpoints.py", HERE),
    Row("python scripts/report.py", HERE),
    Row("python pretrain_glm.py --config configs/glm-base.yaml --print-config", HERE),
    Row("diff", HERE),
    Row("python scripts/generate.py", SLOW),
    Row(
        "python scripts/finetune.py --checkpoint runs/ernie-thu-base",
        "tests/finetune/test_typing.py: needs a run with entities",
    ),
    Row(
        "python scripts/finetune.py --checkpoint runs/optimus",
        "tests/finetune/test_latent_encoder.py: needs a run of OPTIMUS",
    ),
    Row("python scripts/finetune.py", SLOW),
    Row("python scripts/evaluate.py", SLOW),
    Row("python scripts/analyze.py", SLOW),
    Row("python scripts/latent.py", SLOW),
    Row("python scripts/profile_step.py", SLOW),
    Row("python scripts/coordinate_check.py", SLOW),
    Row(
        "python scripts/convert_checkpoint.py export --checkpoint runs/bert --output bert-continued --push",
        "tests/hf/test_hub.py: needs an account of the hub",
    ),
    Row(
        "python scripts/convert_checkpoint.py export --checkpoint runs/optimus",
        "tests/hf/test_hf_optimus.py: needs a run of published stacks",
    ),
    Row(
        "python scripts/convert_checkpoint.py import --input optimus-hf",
        "tests/hf/test_hf_optimus.py: needs a run of published stacks",
    ),
    Row(
        "python scripts/convert_checkpoint.py import --input released-glm-large",
        "tests/hf/test_published_files.py: needs released weights",
    ),
    Row("python scripts/convert_checkpoint.py import-megatron", "tests/hf: needs released weights"),
    Row("python scripts/convert_checkpoint.py", SLOW),
    Row(
        "python pretrain_glm.py --config configs/laptop-experts.yaml",
        "tests/train/test_experts.py: needs the laptop's text",
    ),
    Row("python pretrain_glm.py", SLOW),
    Row("deepspeed --num_gpus 8 benchmarks", "tests/test_benchmarks.py: needs 8 GPUs"),
    Row(
        "deepspeed --num_gpus 8 pretrain_glm.py --config configs/glm-10b.yaml",
        "tests/train/test_launcher.py: 10 billion parameters, here its settings are read",
    ),
    Row(
        "deepspeed --num_gpus 8 pretrain_glm.py --config runs/continued",
        "tests/train/test_launcher.py: needs the corpus of an imported run",
    ),
    Row(
        "deepspeed --num_gpus 8 pretrain_glm.py --config configs/glm-base.yaml trackers",
        "tests/train/test_trackers.py: needs an account or a server",
    ),
    Row("deepspeed", SLOW),
    Row("python scripts/try.py", "tests/scripts/test_try.py: serves a page until Ctrl-C"),
    Row("python scripts/harness.py", "tests/finetune/test_lm_eval.py: needs lm_eval"),
    Row("python benchmarks/", "tests/test_benchmarks.py: minutes to hours, here its arguments are read"),
    Row("python tests/support/drawn_layouts.py", "tests/train/test_drawn_layouts.py: minutes"),
    Row("python tests/support/parity.py", "tests/train/test_parity.py: hours"),
    Row("python scripts/check_versions.py", "tests/scripts/test_check_versions.py: installs gigabytes"),
    Row("python -m pytest", "it is what runs this"),
    Row("python -m mkdocs", "tests/test_site.py"),
    Row("mpirun", "tests/data/build, with --mpi: needs an MPI"),
    Row("sbatch", "tests/train/test_slurm.py: needs SLURM"),
    Row("srun", "tests/data/build, with --mpi: needs SLURM"),
    Row("bash scripts/launch_node.sh", "tests/train/test_slurm.py: starts a whole node"),
    Row("bash scripts/quickstart.sh", ".ci/run, with --smoke"),
    Row("bash scripts/test.sh", ".ci/run"),
    Row("bash .ci/run", "it is what runs this"),
    Row("make", ".ci/run has its commands"),
    Row("docker", "tests/outside/test_installation.py reads the Dockerfile: needs Docker"),
    Row("pip download", "tests/test_laptop_benchmarks.py: makes files as in these packages"),
    Row("wandb login", "asks for an account"),
]
# What is written, and what runs instead of it.
SMALLER = {
    "--workers 16": "--workers 2",
    "rewind runs/base 50000": "rewind runs/base 3",
    "rewind RUN_DIRECTORY 1000": "rewind RUN_DIRECTORY 3",
    "merge runs/base 8000 9000 10000": "merge runs/base runs/other",
    "RUN_DIRECTORY": "runs/base",
    "seed_1234": "seed_7",
    "--checkpoint runs/small": "--checkpoint runs/base",
    "--dry-run 8": "--dry-run 2",
    "quickstart.sh": "quickstart.sh --smoke quickstart",
    "--config A ": "--config configs/glm-base.yaml ",
    "--config B ": "--config configs/glm-large.yaml ",
    # One process instead of a launcher: tests/train/test_launcher.py starts several.
    "deepspeed --num_gpus 8 pretrain_glm.py": "python pretrain_glm.py",
    "deepspeed pretrain_glm.py": "python pretrain_glm.py",
    "first_step: 20, last_step: 22, ranks: [0, 7], memory: true": "first_step: 2, last_step: 3, ranks: [0]",
    "step_00050000": "step_00000003",
    "training.steps=55000": "training.steps=7",
    "training.steps=2000": "training.steps=2",
    "{steps: 2000, kind": "{steps: 2, kind",
    "{steps: 48000, kind": "{steps: 1, kind",
    "{steps: 5000, kind": "{steps: 4, kind",
    "batch.micro_batch_size=32": "batch.micro_batch_size=4",
    "--labels-per-class 1 10 100": "--labels-per-class 1 4",
    "--count 20 ": "--count 2 ",
    "--points 11": "--points 3",
    "--dimensions 256": "--dimensions 32",
    "--vocab-size 32128": "--vocab-size 240",
    "--vocab-size 50368": "--vocab-size 434",
    "batch.global_batch_size=1024 batch.micro_batch_size=128": "batch.global_batch_size=8 batch.micro_batch_size=4",
}
DIFFERENT = {"diff": 1}  # exit status of a command that does what it should


def commands(page: Path) -> list[str]:
    """The commands in the blocks of a page, continued lines joined, comments and assignments before them left out."""
    found = []
    text = page.read_text(encoding="utf-8")
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.S | re.M):
        if language in ("bash", "sh", ""):
            lines = whole_lines(block)
            found += [re.sub(r"^(\w+=\S+\s+)+", "", line.partition("  #")[0].strip()) for line in lines]
    return [line for line in found if COMMAND.match(line)]


def whole_lines(block: str) -> list[str]:
    """The lines of a block; continued ones are one, and so is a loop."""
    return re.findall(r"^for (?s:.*?)^done$|^.+$", re.sub(r"\\\n\s*", " ", block), re.M)


def row_of(page: Path, line: str) -> Row:
    """The first row of the table that speaks of a command."""
    return next(row for row in TABLE if line.startswith(row.start) and row.page in ("", page.name))


def commands_within_text(page: Path) -> list[str]:
    """The commands in backticks within a page's sentences and tables, which say what to run without its whole line."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return re.findall(r"`(python (?:pretrain_glm|(?:scripts|benchmarks)/\w+)\.py(?: [^`]*)?)`", text)


ALL = [(page, line) for page in PAGES for line in commands(page)]
READ = ALL + [(page, line) for page in PAGES for line in commands_within_text(page)]


def test_each_row_speaks_of_a_command_and_each_place_exists():
    assert {row_of(page, line).start for page, line in ALL} == {row.start for row in TABLE}
    for row in TABLE:
        for place in re.findall(r"(?:tests/[\w/.]*\w|\.ci/run|requirements-dev\.txt)", row.where):
            assert (ROOT / place).exists(), row


def test_what_runs_elsewhere_runs_there():
    """Each command of the table that continuous integration or make runs stands there."""
    ci = (ROOT / ".ci/run").read_text()
    assert "bash scripts/quickstart.sh --smoke" in ci and "bash scripts/test.sh" in ci
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    made = [line.split()[1] for _, line in ALL if line.startswith("make ")]
    assert made and set(made) <= set(targets)
    for package in (name for _, line in ALL if line.startswith("pip install") for name in line.split()[2:]):
        assert package in (ROOT / "requirements-dev.txt").read_text()


def test_the_proofs_of_the_readme_name_tests_and_bugs_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    proofs = re.findall(r"`bash scripts/test\.sh (\S+)(?: -k (\w+))?`", text)
    assert len(proofs) >= 3
    for file, name in proofs:
        assert re.search(rf"^def test_\w*{name}", (ROOT / file).read_text(encoding="utf-8"), re.M), file
    (bug,) = re.findall(r"planted\.py --only '([^']+)'", text)
    assert bug in {plant.name for plant in PLANTS}


def scripts_of_launchers() -> list[str]:
    found = {word for _, line in ALL for word in line.split() if re.fullmatch(r"scripts/\w+\.sh", word)}
    return sorted(found)


@pytest.mark.parametrize("script", scripts_of_launchers())
def test_documented_shell_scripts_parse(script):
    done = subprocess.run(["bash", "-n", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# What starts a training: the program itself or a script that hands its arguments on.
TRAINING = re.compile(r"(?:pretrain_glm\.py|scripts/slurm_train\.sh|scripts/launch_node\.sh \w+)(.*)")
CONFIG = re.compile(r"--config (\S+)")
SCRIPT = re.compile(r"((?:scripts|benchmarks)/\w+\.py)(.*)")


def training_commands():
    return [
        pytest.param(line, id=f"{page.stem}-{i}")
        for i, (page, line) in enumerate(READ)
        if TRAINING.search(line)
        and all(file.startswith("configs/") for file in CONFIG.findall(line) or [""])
        and "every_nth" not in line
        and line.split()[0] not in ("diff", "docker")
    ]


@pytest.mark.parametrize("line", training_commands())
def test_settings_of_a_documented_start_are_accepted(line):
    words = shlex.split(TRAINING.search(line)[1])
    files = [words[i + 1] for i, word in enumerate(words) if word == "--config"]
    overrides = [word for word in words if re.match(r"[a-z][\w.]*=", word) and "..." not in word]
    assert load_config([ROOT / file for file in files], overrides).training.steps > 0


# A command with a shell's variable stands in a loop, which runs as part of its page.
SCRIPTS = dict.fromkeys(line for _, line in READ if SCRIPT.search(line) and "$" not in line)


@pytest.mark.parametrize("line", SCRIPTS)
def test_arguments_of_a_documented_script_are_accepted(line, monkeypatch, capsys):
    """Its own parser reads them, up to --help at their end, also where this file runs the command nowhere."""
    script, rest = SCRIPT.search(line).groups()
    words = [word for word in shlex.split(rest) if word != "..."]
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    monkeypatch.setattr(sys, "argv", [script, *words, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    described = capsys.readouterr().out
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert ended.value.code == 0 and all(option in described for option in options)


# Running them


@pytest.fixture(scope="module")
def stock(corpus, tmp_path_factory):
    """What the documents name and do not make: texts, datasets, a vocabulary, and a run that was stopped once."""
    stock = tmp_path_factory.mktemp("stock")
    pages = {page.stem: page.read_text(encoding="utf-8") for page in PAGES if page.parent.name == "docs"}
    lines = (corpus / "text.jsonl").read_bytes()
    for folder in ("raw", "corpus"):
        (stock / folder).mkdir()
        (stock / folder / "words.jsonl").write_bytes(lines)
    pair = {"query": "word1", "title": "word2 word3", "label": 0, "text": "word1 . However, word2 ."}
    for folder in ("clicks", "prose"):
        (stock / folder).mkdir()
        (stock / folder / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    (stock / "raw/words.jsonl.zst").write_bytes(zstandard.compress(lines))
    parquet.write_table(pa.table({"text": list(pages.values())}), stock / "raw/books.parquet")
    for name, text in pages.items():  # enough files for a split of 5 % to get some
        for number, section in enumerate(text.split("\n## ")):
            (stock / f"raw/{name}-{number}.txt").write_text(section, encoding="utf-8")
    shutil.copy(corpus / "vocab.txt", stock)
    (stock / "data").mkdir()
    (stock / "megatron").mkdir()
    for suffix in (".bin", ".idx", ".json"):
        for name in ("corpus_train", "corpus_validation", "books", "news", "old_train"):
            source = "corpus_validation" if name == "corpus_validation" else "corpus_train"
            shutil.copy(corpus / f"{source}{suffix}", stock / f"data/{name}{suffix}")
        if suffix != ".json":
            shutil.copy(corpus / f"corpus_train{suffix}", stock / f"megatron/books_text_document{suffix}")
    manifest = json.loads((stock / "data/old_train.json").read_text())
    del manifest["checksum"]
    (stock / "data/old_train.json").write_text(json.dumps({**manifest, "format_version": 2}))
    for tree in interrupted(small_run(corpus, stock / "runs/base")):
        run_ranks(fit_and_fill, 1, tree)
    beat = Heartbeat(0, "host", 1, "step", "forward", 6, 40, 0.1, time.time())
    beat.write(heartbeat_directory(stock / "runs/base"))
    for name in ("runs/other", "runs/glm", "quickstart/run"):
        shutil.copytree(stock / "runs/base", stock / name)
    (stock / "quickstart/corpus.jsonl").write_bytes(lines)
    (stock / "quickstart/tokenizer").mkdir()
    tokenizer = json.dumps(byte_bpe_json(list(SPECIAL_NAMES.values())))
    (stock / "quickstart/tokenizer/tokenizer.json").write_text(tokenizer)
    return stock


# A run of seconds.
SMALL = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2},
    "batch": {"micro_batch_size": 2, "global_batch_size": 4},
    "training": {"steps": 12, "precision": "fp32", "eval_interval": 6, "eval_samples": 8},
    "schedule": {"warmup_steps": 2},
    "checkpoint": {"save_interval": 0},
    "run": {"log_interval": 4},
}


@pytest.fixture
def scratch(stock, tmp_path):
    """A copy of the project with the stock. Its small and tiny configurations train in seconds."""
    shutil.copytree(stock, tmp_path, dirs_exist_ok=True)
    copied_project(tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copytree(
        ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("*.png", "*.json")
    )
    for name in ("small", "optimus-tiny"):
        change(tmp_path / f"configs/{name}.yaml", SMALL)
    data = {name: [{"prefix": f"data/corpus_{name}"}] for name in ("train", "validation")}
    tokenizer = {"kind": "bert_wordpiece", "path": "vocab.txt"}
    change(tmp_path / "configs/tiny.yaml", {"data": data, "tokenizer": tokenizer})
    pairs = [  # as BLiMP's files, one for each paradigm
        {
            "sentence_good": "The cats sleep.",
            "sentence_bad": "The cats sleeps.",
            "UID": uid,
            "linguistics_term": "agreement",
        }
        for uid in ("first", "second")
    ]
    (tmp_path / "blimp/data").mkdir(parents=True)
    for pair in pairs:
        (tmp_path / f"blimp/data/{pair['UID']}.jsonl").write_text(f"{json.dumps(pair)}\n" * 2)
    return tmp_path


def change(file: Path, tree: dict) -> None:
    file.write_text(yaml.safe_dump(merge(yaml.safe_load(file.read_text()), tree)))


def run(command: list[str], scratch: Path, status: int = 0, **variables: str) -> str:
    own = scratch / ".venv/bin"
    bin = own if own.exists() else os.path.dirname(sys.executable)
    environment = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HOME": str(scratch / "cache"), **variables}
    done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
    assert done.returncode == status, (command, done.stdout[-2000:], done.stderr[-3000:])
    return done.stdout


def run_page(page: Path, where: set[str], scratch: Path) -> None:
    """Run the commands of a page that run at these places, in their order."""
    for preparations in (PREPARATIONS, SLOW_PREPARATIONS if SLOW in where else {}):
        if page.name in preparations:
            preparations[page.name](scratch)
    lines = [line for line in commands(page) if row_of(page, line).where in where]
    assert lines
    # Compiling takes longer than a few samples; slow commands train.
    variables = {} if SLOW in where else {"NUMBA_DISABLE_JIT": "1"}
    for line in dict.fromkeys(lines):  # some stand twice on a page, for two purposes
        run_line(line, scratch, DIFFERENT.get(line.split()[0], 0), **variables)


def run_line(line: str, place: Path, status: int = 0, **variables: str) -> None:
    for written, smaller in SMALLER.items():
        line = line.replace(written, smaller)
    printed = run(["bash", "-e", "-c", line], place, status, **variables)
    # An import prints the command that builds a corpus with the model's tokenizer; the next ones train on it.
    build = re.search(r"python scripts/preprocess_data\.py --input FILE .*", printed)
    if build and not (place / "data/corpus.bin").exists():
        run(["bash", "-e", "-c", build[0].replace("FILE", "raw/words.jsonl")], place, **variables)


def without_corpus(scratch: Path) -> None:
    """For pages that make it themselves."""
    for file in (scratch / "data").glob("corpus_*"):
        file.unlink()


def with_own_objective(scratch: Path) -> None:
    page = (ROOT / "docs/own_objective.md").read_text(encoding="utf-8")
    source, config = (re.search(rf"```{kind}\n(.*?)```", page, re.S)[1] for kind in ("python", "yaml"))
    (scratch / "data_utils/objectives/every_nth.py").write_text(source)
    (scratch / "every_nth.yaml").write_text(config)
    change(scratch / "configs/small.yaml", {"tokenizer": {"kind": "bert_wordpiece", "path": "vocab.txt"}})


SENTENCES = [" ".join(f"word{(i * k) % 60}" for k in range(1, 8)) + " ." for i in range(1, 41)]


def with_texts(scratch: Path) -> None:
    """Files of sentences and of labels, as users have them."""
    for name in ("test", "texts", "reviews"):
        (scratch / f"{name}.txt").write_text("\n".join(SENTENCES) + "\n")
    (scratch / "labels.txt").write_text("good\nbad\n" * (len(SENTENCES) // 2))


def with_released_models(scratch: Path) -> None:
    """Narrow models where the pages name a model of the hub: a directory of that name goes before the hub."""
    for case, name in (
        ("bert", "google-bert/bert-base-uncased"),
        ("bert", "google-bert/bert-base-cased"),
        ("gpt2", "openai-community/gpt2"),
    ):
        (scratch / name).mkdir(parents=True)
        write_released(case, scratch / name)


def with_texts_and_released_models(scratch: Path) -> None:
    with_texts(scratch)
    with_released_models(scratch)


def with_fine_tuned_run(scratch: Path) -> None:
    with_texts(scratch)
    change(scratch / "configs/tasks/noisy_votes.yaml", {"finetune": {"epochs": 1}})
    task = ["--task", "configs/tasks/noisy_votes.yaml", "--output", "runs/votes"]
    run([sys.executable, "scripts/finetune.py", "--checkpoint", "runs/base", *task], scratch)


def with_deepspeed_file(scratch: Path) -> None:
    file = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    (scratch / "ds.json").write_text(json.dumps(file))


def with_dense_run(scratch: Path) -> None:
    """A run whose FFNs can become experts."""
    model = {"biases": "none", "ffn": "gated", "ffn_size": 704}
    tree = merge(
        small_run(scratch / "data", scratch / "runs/dense"), {"model": model, "training": {"steps": 3}}
    )
    tree["tokenizer"]["path"] = "vocab.txt"
    (scratch / "dense.yaml").write_text(yaml.safe_dump(tree))
    run([sys.executable, "pretrain_glm.py", "--config", "dense.yaml"], scratch)


def with_long_run(scratch: Path) -> None:
    """A run with a constant learning rate, without a warmup."""
    (scratch / "runs/base").rename(scratch / "runs/long")
    change(scratch / "runs/long/config.yaml", {"schedule": {"warmup_steps": 0}})


def with_own_datasets(scratch: Path) -> None:
    (scratch / "data/bert-base-uncased").mkdir()
    shutil.copy(scratch / "vocab.txt", scratch / "data/bert-base-uncased")
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(scratch / f"data/corpus_train{suffix}", scratch / f"data/wiki{suffix}")


def with_labelled_texts(scratch: Path) -> None:
    """Labelled lines, and tasks that take an epoch and ask by words of the vocabulary."""
    (scratch / "data/own").mkdir()
    for name in ("train", "validation"):
        lines = [{"text": f"word{i}", "label": ("negative", "positive")[i % 2]} for i in range(16)]
        (scratch / f"data/own/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = {"verbalizers": {"negative": "word1", "positive": "word2"}}
    change(scratch / "configs/tasks/own-small.yaml", {"task": words, "finetune": {"epochs": 1}})
    change(scratch / "configs/tasks/noisy_votes.yaml", {"finetune": {"epochs": 1}})


PREPARATIONS = {
    "data.md": without_corpus, "own_objective.md": with_own_objective,
    "tasks.md": with_labelled_texts, "fine_tuning.md": with_labelled_texts,
}  # fmt: skip
SLOW_PREPARATIONS = {
    "huggingface.md": with_released_models,
    "latent.md": with_texts_and_released_models, "analysis.md": with_fine_tuned_run,
    "lora.md": with_labelled_texts, "experts.md": with_dense_run,
    "coming_from.md": with_deepspeed_file, "configuration.md": with_own_datasets, "data_mixtures.md": with_long_run,
}  # fmt: skip


def pages_with(where: str) -> list[Path]:
    """README.md has its own test."""
    pages = [page for page in PAGES if page != ROOT / "README.md"]
    return [page for page in pages if any(row_of(page, line).where == where for line in commands(page))]


# Other pages have these commands with other options, or commands that have tests of their own.
QUICK = ("checkpoints", "cleaning", "data_format", "objectives", "own_objective", "watching")


@pytest.mark.parametrize(
    "page",
    slow_but([page for page in pages_with(HERE) if page.stem in QUICK], pages_with(HERE)),
    ids=lambda page: page.stem,
)
def test_quick_commands_run_as_they_are_written(page, scratch):
    run_page(page, {HERE}, scratch)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with(SLOW), ids=lambda page: page.stem)
def test_slow_commands_run_as_they_are_written(page, scratch, corpus):
    """configs/glm-base.yaml is the model of runs/base here, which pages continue with it."""
    small = small_run(corpus, scratch / "runs/glm-base")
    (scratch / "configs/glm-base.yaml").write_text(yaml.safe_dump(small))
    run_page(page, {HERE, SLOW}, scratch)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of what a reader runs."""
    return re.findall(r"^```(bash|python)\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


def with_labelled_reviews(scratch: Path) -> None:
    """What a reader of classifier.md writes and has."""
    with_released_models(scratch)
    with_labelled_texts(scratch)
    shutil.copy(scratch / "data/own/train.jsonl", scratch / "data/own/new.jsonl")
    page = (ROOT / "docs/classifier.md").read_text(encoding="utf-8")
    (scratch / "reviews.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.S)[1])


def write_lines(file: Path, records: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def with_laptop(scratch: Path) -> None:
    """What scripts/laptop.sh leaves, from packages of made texts, and what readers of embeddings.md have besides."""
    with_texts(scratch)
    write_packages(scratch / "laptop/packages")
    shutil.copytree(scratch / "quickstart/tokenizer", scratch / "laptop/tokenizer")
    tokenizer = ["--tokenizer-kind", "hf_json", "--tokenizer-path", "laptop/tokenizer/tokenizer.json"]
    text = ["--input", "raw/words.jsonl", "--output"]
    run(
        [sys.executable, "scripts/preprocess_data.py", *text, "laptop/data/corpus_train", *tokenizer], scratch
    )
    parts = [{"kind": "linear", "steps": 2, "start": 0, "end": 1}, {"kind": "linear", "steps": 1, "end": 0}]
    batch = {"micro_batch_size": 2, "global_batch_size": 4}
    short = {"batch": batch, "training": {"steps": 3, "precision": "fp32"}, "schedule": {"parts": parts}}
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "ffn_size": 64}
    data = {"validation": [], "sequence_length": 64}
    change(scratch / "configs/laptop.yaml", merge(short, {"model": model, "data": data, "phases": []}))
    change(scratch / "configs/phases/laptop-vectors.yaml", short)
    run([sys.executable, "pretrain_glm.py", "--config", "configs/laptop.yaml"], scratch)
    released_directory(scratch / "all-MiniLM-L6-v2")
    for case, name in (("t5", "t5-base"), ("modernbert", "ModernBERT-base")):
        write_released(case, scratch / name)
    AutoTokenizer.from_pretrained(scratch / "t5-base").save_pretrained(scratch / "t5-base")
    size = json.loads((scratch / "ModernBERT-base/config.json").read_text())["vocab_size"]
    tokenizer = ["--tokenizer-kind", "hf_json", "--tokenizer-path", "ModernBERT-base/tokenizer.json"]
    tokenizer += ["--added-tokens", "none", "--vocab-size", str(size)]
    run([sys.executable, "scripts/preprocess_data.py", *text, "data/web", *tokenizer], scratch)
    longer = {"data": {"sequence_length": 64}, "phases": [{"steps": 2}, {"steps": 1}]}
    change(scratch / "configs/phases/long-context.yaml", merge(short, longer))
    with_measures(scratch)


def with_measures(scratch: Path) -> None:
    """Files of benchmarks and of texts."""
    scored = "".join(f"{text}\t{SENTENCES[i // 2]}\t{i % 5}\n" for i, text in enumerate(SENTENCES))
    (scratch / "sts2013-a.tsv").write_text(scored)
    (scratch / "stsb-test.csv").write_text(scored.replace("\t", ","))
    texts = [{"_id": f"d{i}", "text": text} for i, text in enumerate(SENTENCES)]
    write_lines(scratch / "scifact/corpus.jsonl", texts)
    write_lines(scratch / "scifact/queries.jsonl", [{"_id": "q", "text": SENTENCES[0]}])
    (scratch / "scifact/qrels").mkdir()
    (scratch / "scifact/qrels/test.tsv").write_text("q\td0\t1\n")
    ranked = {"query": SENTENCES[0], "positive": SENTENCES[:1], "negative": SENTENCES[1:3]}
    write_lines(scratch / "askubuntu.jsonl", [ranked])
    pairs = [{"query": text, "positive": SENTENCES[i - 1]} for i, text in enumerate(SENTENCES)]
    write_lines(scratch / "pairs.jsonl", pairs)
    for name in ("texts", "queries"):
        write_lines(scratch / f"{name}.jsonl", [{"text": text} for text in SENTENCES])


def with_raw_text_alone(scratch: Path) -> None:
    for name in ("data", "runs"):
        shutil.rmtree(scratch / name)
    change(scratch / "configs/medium.yaml", SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page, prepare, results",
    [
        (
            "tutorial",
            with_raw_text_alone,
            ["runs/medium/loss.png", "medium-hf/model.safetensors", "runs/continued"],
        ),
        (
            "classifier",
            with_labelled_reviews,
            ["runs/reviews/results.json", "reviews-hf/model.safetensors", "out"],
        ),
        (
            "embeddings",
            with_laptop,
            ["vectors.png", "laptop/taught/checkpoints", "t5-vectors/modules.json", "minilm-hf/modules.json"],
        ),
    ],
)
def test_whole_paths_run_as_they_are_written(page, prepare, results, scratch):
    prepare(scratch)
    path = ROOT / f"docs/{page}.md"
    for language, text in blocks(path):
        if language == "bash":
            for line in whole_lines(text):
                if row_of(path, line).where == WHOLE:
                    run_line(line, scratch)
        elif "import mteb" not in text:  # no requirement of the project
            run(["python", "-c", text], scratch)
    assert [result for result in results if not (scratch / result).exists()] == []


def with_packages(place: Path) -> None:
    """What scripts/quickstart.sh would download: an environment that sees the packages of the running one."""
    venv.create(place / ".venv")
    (site,) = (place / ".venv").glob("lib/python*/site-packages")
    (site / "outer.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    launcher = place / ".venv/bin/deepspeed"
    launcher.write_text(f"#!{place}/.venv/bin/python\nfrom deepspeed.launcher.runner import main\nmain()\n")
    launcher.chmod(0o755)
    stamp = "requirements_key python3 requirements.txt >.venv/requirements.txt.stamp"
    run(["bash", "-c", f"source scripts/setup_environment.sh; {stamp}"], place)


@pytest.mark.slow
def test_the_readme_runs_in_an_empty_directory(stock, tmp_path):
    """From its clone on. The reader brings text and, instead of the hub, a directory of its model's name."""
    page, project, place = ROOT / "README.md", tmp_path / "project", tmp_path / "empty"
    project.mkdir()
    place.mkdir()
    copied_project(project)
    for name in ("scripts", "configs"):
        shutil.copytree(ROOT / name, project / name)
    for file in ROOT.glob("requirements*.txt"):
        shutil.copy(file, project)
    change(project / "configs/medium.yaml", SMALL)
    for git in ("init -q", "add --all", "-c user.name=a -c user.email=a@example.org commit -q -m project"):
        run(["git", *git.split()], project)
    for language, text in blocks(page):
        if language == "python":
            run(["python", "-c", text], place)
            continue
        for line in whole_lines(text):
            if line.startswith("git clone"):
                run_line(line.replace("REPOSITORY ", f"{project} ", 1), place)
            elif line.startswith("cd "):
                place = place / line.split()[1]
                with_packages(place)
                with_released_models(place)
                shutil.copytree(stock / "corpus", place / "raw")
                shutil.rmtree(place / "data", ignore_errors=True)
            elif COMMAND.match(line) and (
                row_of(page, line).where in (HERE, SLOW) or "quickstart.sh" in line
            ):
                run_line(line, place)
    made = [
        "quickstart/report.html",
        "runs/medium/report.html",
        "bert-continued/model.safetensors",
        "runs/votes/results.json",
    ]
    assert [result for result in made if not (place / result).exists()] == []
