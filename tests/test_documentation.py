"""The guide is true where that can be checked: files, links, settings, options and commands that it names exist."""

import re
import subprocess
import sys

import pytest
from support.project import ROOT

from data_utils.base.settings import setting_names
from megatron_lite.config.tree import Config

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks/README.md"]
SETTINGS = set(setting_names(Config))
SECTIONS = {name.partition(".")[0] for name in SETTINGS}
# Modules whose every file the map must name; objectives are listed in docs/objectives.md.
ROOMS = ("megatron_lite", "megatron_lite/hf", "data_utils")
# A command of the guide: the script, and the rest of its line, continued lines included.
COMMANDS = re.compile(
    r"(?:python|deepspeed(?: --\S+ \d+)?) ((?:scripts/|benchmarks/|tests/)?\w+\.py)((?:\\\n|.)*)"
)
ENVIRONMENT_READERS = {"megatron_lite/parallel/launch.py", "megatron_lite/parallel/context.py"}


def sources():
    places = [*ROOT.glob("*.py"), *(path for room in (*ROOMS, "data_utils/objectives", "scripts")
                                    for path in (ROOT / room).glob("*.py"))]  # fmt: skip
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in places}


@pytest.mark.parametrize("room", ROOMS)
def test_the_map_names_every_module(room):
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    missing = [path.name for path in (ROOT / room).glob("*.py") if path.name not in text]
    assert set(missing) <= {"__init__.py"}


def test_the_map_names_what_exists():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rooms = (".", *ROOMS, "data_utils/objectives", "tests")
    files = {path.name: path for room in rooms for path in (ROOT / room).glob("*.py")}
    assert set(re.findall(r"(?<!/)\b(\w+\.py)", text)) <= set(files)
    places = re.findall(r"`(\w+)` (?:and its sections )?in `(\w+\.py)`", text)
    assert len(places) > 15
    for name, file in places:
        assert re.search(
            rf"^\s*(?:(?:def|class) )?{name}\b", files[file].read_text(encoding="utf-8"), re.M
        ), name


def test_every_objective_script_and_benchmark_is_named_somewhere():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for folder in ("data_utils/objectives", "scripts", "benchmarks"):
        missing = {path.name for path in (ROOT / folder).glob("*.[ps][yh]")} - set(
            re.findall(r"\w+\.(?:py|sh)", text)
        )
        assert missing <= {"__init__.py", "entry.py", "setup_environment.sh"}, folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(
        r"`((?:scripts|configs|tests|benchmarks|docs|data_utils|megatron_lite)/[\w./-]+)`", text
    ):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_exist(page):
    """Words such as optimizer.lr: a section's name, then one of its keys or (as a prefix) a file or attribute."""
    for section, key in re.findall(
        r"(?<![\w/.])(\w+)\.(\w+)(?=[=:`\s,;)])", page.read_text(encoding="utf-8")
    ):
        if section in SECTIONS and key not in ("py", "yaml", "json", "md", "model", "safetensors"):
            names = {name for name in SETTINGS if name.startswith(f"{section}.{key}")}
            assert names, f"{section}.{key}"


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
    assert len(found) > 15 and "scripts/preprocess_data.py" in found
    for script, options in found.items():
        text = (ROOT / script).read_text(encoding="utf-8")
        if script == "scripts/generate.py":
            text += (ROOT / "megatron_lite/generate/config.py").read_text(encoding="utf-8")
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
    done = subprocess.run(
        [sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    for name in names:
        assert f"\n{name} 0 False\n" in done.stdout, done.stderr


def test_the_environment_is_read_in_two_places():
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
