"""The guide is true where that can be checked: files, links, settings, options and commands that it names exist."""

import ast
import io
import re
import subprocess
import sys
import textwrap
import tokenize
import tomllib
from pathlib import PurePath

import pytest
import yaml
from support import code_structure
from support.project import PAGES, ROOT

from data_utils.common.settings import setting_names
from docs.generate import PAGES as GENERATED
from megatron_lite.config.tree import Config

SETTINGS = set(setting_names(Config))
SECTIONS = {name.partition(".")[0] for name in SETTINGS}
ENDINGS = ("py", "yaml", "json", "md", "model", "safetensors")  # of files
# A command of the guide: the script, and the rest of its line or inline code, continued lines included.
COMMANDS = re.compile(r"(?:python|deepspeed(?: --\S+ \d+)?) ((?:\w+/)*\w+\.py)((?:\\\n|[^\n`])*)")
ENVIRONMENT_READERS = {
    "data_utils/common/entry.py",  # names of caches, for libraries that are imported later
    "data_utils/storage/azure.py",  # accounts
    "data_utils/storage/buckets.py",  # endpoints and regions
    "megatron_lite/parallel/launch.py",
    "megatron_lite/parallel/context.py",
    "scripts/check_versions.py",  # for the tests that it starts
}


def sources():
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in code_structure.product_files()
    }


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_up_to_date(name):
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == GENERATED[name](), "run: python docs/generate.py"


def test_where_to_look_names_what_exists():
    """Each answer names functions, classes or constants with their files."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = page[page.index("## Where to look") : page.index("## Rules")].splitlines()
    answers = [re.findall(r"`(\w+)` in `([\w/]+\.py)`", row) for row in rows]
    assert sum(map(bool, answers)) >= 10
    for places in answers:
        for name, file in places:
            assert name in names_defined((ROOT / file).read_text(encoding="utf-8")), (name, file)


def names_defined(source):
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def test_the_newest_version_is_in_the_changelog():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert first is not None and first[1] == version


def test_the_citation_names_the_newest_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])


def test_the_project_has_one_name():
    name = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
    assert (ROOT / "README.md").read_text(encoding="utf-8").startswith(f"# {name}\n")
    assert f"\nsite_name: {name}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["title"].startswith(f"{name}: ")


@pytest.mark.parametrize("name", [".github/workflows/ci.yml", ".gitlab-ci.yml"])
def test_hosts_run_the_one_script(name):
    described = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    jobs = described.get("jobs", described)
    steps = jobs["ci"].get("script") or [step.get("run") for step in jobs["ci"]["steps"]]
    assert [step for step in steps if step] == ["bash .ci/run"] and (ROOT / ".ci/run").exists()


def headings(page):
    """Anchors of a page, as GitHub makes them."""
    lines = re.findall(r"^#+ (.+)", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page):
    text = page.read_text(encoding="utf-8")
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?", text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not heading or heading in headings(linked), f"{target}#{heading}"
    for path in re.findall(
        r"`((?:scripts|configs|tests|benchmarks|docs|data_utils|megatron_lite)/[\w./-]+)`", text
    ):
        assert (ROOT / path).exists(), path


def pages_named_in(text):
    """Pages that a message, a help text or a comment names, each with the heading in quotes behind it or nothing."""
    return re.findall(r"(docs/[\w/]+\.md)(?:, \"([^\"\n{]+)\")?", text)


def test_pages_that_messages_and_comments_name_exist():
    folders = ("data_utils", "megatron_lite", "scripts", "configs", "benchmarks", "tests/support")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    files = [path for path in files if path.suffix in (".py", ".sh", ".yaml", ".c")]
    files += [
        ROOT / name
        for name in ("pretrain_glm.py", "Dockerfile", "Makefile", "requirements.txt", "mkdocs.yml")
    ]
    found = {}
    for file in files:
        for page, heading in pages_named_in(file.read_text(encoding="utf-8")):
            found.setdefault((page, heading), file)
    assert ("docs/learning.md", "") in found
    for (page, heading), file in found.items():
        assert (ROOT / page).is_file(), f"{file} names {page}"
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not heading or re.search(rf"^#+ {re.escape(heading)}$", text, re.M), (
            f"{file}: {page}, {heading}"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_exist(page):
    """Words such as optimizer.lr: a section's name, then one of its keys or (as a prefix) a file or attribute."""
    text = re.sub(r"```diff\n.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)  # not applied here
    for section, key in re.findall(r"(?<![\w/.])(\w+)\.(\w+)(?=[=:`\s,;)])", text):
        if section in SECTIONS and key not in (*ENDINGS, "version", "weight"):  # weight: a tensor's name
            names = {name for name in SETTINGS if name.startswith(f"{section}.{key}")}
            assert names, f"{section}.{key}"


def blocks(page, language):
    """Those of a list too, which are indented."""
    text = page.read_text(encoding="utf-8")
    return [
        textwrap.dedent(block) for block in re.findall(rf"^ *```{language}\n(.*?)^ *```", text, re.S | re.M)
    ]


def names_in(tree, prefix=""):
    """The settings of a tree by their full names; what is within a list or has no settings of its own counts as one."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        deeper = isinstance(value, dict) and any(known.startswith(f"{name}.") for known in SETTINGS)
        yield from names_in(value, f"{name}.") if deeper else [name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_of_yaml_blocks_exist(page):
    for block in blocks(page, "yaml"):
        tree = yaml.safe_load(block)
        if not isinstance(tree.get("task", {}), dict):
            continue  # a task of lm_eval
        unknown = [
            name for name in names_in(tree) if name not in SETTINGS and name.partition(".")[0] != "every_nth"
        ]
        assert unknown == [], block


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_can_be_parsed(page):
    for block in blocks(page, "python"):
        ast.parse(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_python_blocks_import_exists(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module is None or module.partition(".")[0] not in ("data_utils", "megatron_lite"):
                continue
            path = ROOT / module.replace(".", "/")
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            source = file.read_text(encoding="utf-8")
            tree = ast.parse(source)
            known = names_defined(source) | {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
            known |= {
                a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names
            }
            for alias in node.names:
                is_module = (path / f"{alias.name}.py").exists()
                assert is_module or alias.name in known, f"{module}.{alias.name}"


def commands():
    found = {}
    for page in PAGES:
        for script, rest in COMMANDS.findall(page.read_text(encoding="utf-8")):
            options = re.findall(r"(?<!\S)--[a-z][\w-]*", re.sub(r"#.*", "", rest))
            found.setdefault(script, set()).update(options)
    return found


def test_options_of_documented_commands_exist():
    """Their names occur in the script, in quotes: cheaper than asking each for its --help."""
    found = commands()
    assert "scripts/preprocess_data.py" in found
    for script, options in found.items():
        shared = (
            "megatron_lite/config/generation.py",
            "data_utils/corpus/documents.py",
        )  # options of several scripts
        text = "".join((ROOT / path).read_text(encoding="utf-8") for path in (script, *shared))
        for option in options - {"--help"}:
            assert f'"{option}"' in text or re.search(rf"\b{option[2:].replace('-', '_')}:", text), (
                script,
                option,
            )


def test_scripts_print_their_help():
    """In one process each that loads no torch, which is most of the time of a start."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    sys.argv = [name, '--help']\n"
        "    try:\n        importlib.import_module(name).main()\n"
        "    except SystemExit as exit:\n        print(name, exit.code, 'torch' in sys.modules)\n"
    )
    scripts = sorted((ROOT / "scripts").rglob("*.py"))
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in scripts
        if "__main__" in path.read_text(encoding="utf-8")
    ]
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True)
    for name in names:
        assert f"\n{name} 0 False\n" in done.stdout, done.stderr


def prose(source):
    """The comments and docstrings of a file."""
    found = [
        t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT
    ]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return "\n".join([*found, *(ast.get_docstring(node) or "" for node in nodes)])


def missing_files(source, known):
    """The Python files that comments and docstrings name and that are not known."""
    named = set(re.findall(r"(?<![\w/.{}*-])(?:[\w-]+/)*[\w-]+\.py\b", prose(source)))
    return sorted(named - known)


def test_files_that_comments_name_exist():
    folders = ("data_utils", "megatron_lite", "scripts", "tests", "benchmarks", "docs")
    files = [PurePath("pretrain_glm.py")]
    files += [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    known = {"/".join(file.parts[i:]) for file in files for i in range(len(file.parts))}  # from any folder on
    found = {name: missing_files(text, known) for name, text in sources().items()}
    assert {name: missing for name, missing in found.items() if missing} == {}
    source = '"""See gone.py and train/step.py."""\n# as in old/step.py, not {name}.py\nx = "other.py"\n'
    assert missing_files(source, known) == ["gone.py", "old/step.py"]


def test_the_environment_is_read_in_few_files():
    pattern = re.compile(r"environ\[[^]]*\](?! =)|environ\.get|getenv|in os\.environ|= os\.environ")
    assert {name for name, text in sources().items() if pattern.search(text)} <= ENVIRONMENT_READERS


def test_the_default_group_of_all_processes_is_used_in_one_place():
    calls = re.compile(
        r"dist\.(?:all_|reduce|broadcast|barrier|gather|send|recv)\w*\((?:[^()]|\([^()]*\))*\)"
    )
    found = {name: calls.findall(text) for name, text in sources().items()}
    assert sum(map(len, found.values())) > 5
    default = {name for name, made in found.items() if any("group=" not in call for call in made)}
    assert default == {"megatron_lite/parallel/context.py"}


def test_nothing_is_evaluated():
    pattern = re.compile(
        r"(?<![\w.])eval\(|(?<![\w.])exec\(|shell=True|^import pickle|yaml\.(unsafe_|full_)?load\((?!\w+, _Loader)",
        re.M,
    )
    assert [name for name, text in sources().items() if pattern.search(text)] == []
