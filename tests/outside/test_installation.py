"""What an installation declares fits what the tests run with, and what it installs is complete."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from support.code_structure import product_files
from support.project import ROOT
from support.selection import slow_but

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins():
    """Package -> version, of the requirements that are pinned."""
    lines = [(ROOT / name).read_text(encoding="utf-8").splitlines()
             for name in ("requirements.txt", "requirements-dev.txt", "requirements-lm-eval.txt")]  # fmt: skip
    found = [line.partition("#")[0].strip() for part in lines for line in part]
    return dict(line.lower().split("==") for line in found if "==" in line)


INSTALLED_FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "pretrain_glm.py")
INSTALLED_FOLDERS = ("data_utils", "megatron_lite", "scripts", "configs")
DECLARED = [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())]


@pytest.mark.parametrize("requirement", DECLARED)
def test_a_declared_range_holds_the_pinned_version(requirement):
    declared = Requirement(requirement)
    version = pins().get(declared.name.lower())
    assert version is not None or not declared.specifier
    assert version is None or version in declared.specifier


def test_every_pinned_requirement_is_declared():
    pinned = [line.partition("==")[0].lower() for line in (ROOT / "requirements.txt").read_text().splitlines()
              if "==" in line]  # fmt: skip
    assert set(pinned) <= {Requirement(requirement).name.lower() for requirement in DECLARED}


@pytest.fixture(scope="module")
def installation(tmp_path_factory):
    """A fresh virtual environment that sees the packages of the running one, with the project installed from a copy."""
    directory = tmp_path_factory.mktemp("installation")
    source, root = directory / "source", directory / "environment"
    source.mkdir()
    for name in INSTALLED_FILES:
        shutil.copy(ROOT / name, source)
    for name in INSTALLED_FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    venv.create(root)
    (site,) = root.glob("lib/python*/site-packages")
    (site / "outer.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(root / "bin/python"), "install", "--quiet"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--no-compile"]
    done = subprocess.run([*pip, *offline, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return root


def run(installation, command, *arguments):
    """Away from the checkout."""
    return subprocess.run(
        [installation / "bin" / command, *arguments],
        cwd=installation,
        capture_output=True,
        text=True,
    )


def test_every_file_is_installed(installation):
    (site,) = installation.glob("lib/python*/site-packages")
    pages = [path for ending in ("html", "css") for path in (ROOT / "megatron_lite").rglob(f"*.{ending}")]
    files = [path.relative_to(ROOT) for path in (*product_files(), *pages)]
    files += [Path(f"{package}/py.typed") for package in ("data_utils", "megatron_lite")]
    installed = [
        path for path in files if path.parts[:2] not in (("scripts", "quickstart"), ("scripts", "laptop"))
    ]  # the demonstration's own
    missing = [
        path for path in installed if not (site / str(path).replace("scripts/", "glm_scripts/")).exists()
    ]
    assert len(installed) > 100 and missing == []
    configs = {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")}
    shipped = installation / "share/megatron-lite-glm/configs"
    assert {path.relative_to(shipped) for path in shipped.rglob("*.yaml")} == configs


@pytest.mark.parametrize("command", slow_but(["glm-pretrain", "glm-try", "glm-dataset"], PROJECT["scripts"]))
def test_commands_print_their_help(installation, command):
    done = run(installation, command, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {command} "), done.stderr


@pytest.mark.parametrize("given", ["share/megatron-lite-glm/configs/small.yaml", "small"])
def test_shipped_configurations_are_read(installation, given):
    """By path, or by name from any directory."""
    done = run(installation, "glm-pretrain", "--print-config", "--config", given)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["run"]["directory"] == "runs/small"


def test_a_wrong_name_lists_those_of_the_installation(installation):
    done = run(installation, "glm-pretrain", "--print-config", "--config", "smal")
    assert done.returncode == 2 and "such as small" in done.stderr


def test_a_mistake_is_one_line(installation):
    done = run(installation, "glm-dataset", "inspect", "absent")
    assert done.returncode == 2
    assert done.stderr.startswith("error: dataset absent:") and done.stderr.count("\n") == 1


UNKNOWN_USER = 54321


@pytest.fixture
def stranger(installation):
    """Runs an installed command as `docker run --user` does with a user whom the image does not know.

    The home directory is /, and neither it nor the installation can be written. Without root's rights it is another
    directory that cannot be written, of the present user. The last attribute is where temporary files go.
    """
    is_root = os.geteuid() == 0
    prefix, home = [], installation / "home"
    if is_root:
        # Reading is allowed everywhere, since Python itself may lie in root's home directory.
        reads = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
        prefix = ["setpriv", f"--reuid={UNKNOWN_USER}", f"--regid={UNKNOWN_USER}", "--clear-groups", *reads]
        home = Path("/")
    else:
        home.mkdir(exist_ok=True)
        for path in (installation, *installation.rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~0o222)
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder)
        temporary.chmod(0o777)

        def run(*command):
            environment = {
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "TMPDIR": folder,
                "OMP_NUM_THREADS": "1",
            }
            return subprocess.run(
                [*prefix, *command], cwd=folder, env=environment, capture_output=True, text=True
            )

        if is_root and run("true").returncode:
            pytest.skip("root may not become another user here")
        run.temporary = temporary
        yield run
    if not is_root:
        for path in (installation, *installation.rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o200)


@pytest.mark.slow
def test_a_user_without_a_home_runs_commands(installation, stranger):
    """numba ended in "cannot cache function ...: no locator available"."""
    done = stranger(
        installation / "bin/glm-inspect-batch", "--objective", "causal", "--text", "some text of words"
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "predicts" in done.stdout
    tiny = installation / "share/megatron-lite-glm/configs/tiny.yaml"
    done = stranger(installation / "bin/glm-pretrain", "--print-config", "--config", tiny)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert list(stranger.temporary.iterdir()) == [], "caches are removed at the end"


CACHES = ("XDG_CACHE_HOME", "TRITON_HOME", "MPLCONFIGDIR")
LOOK_AT_CACHES = f"""
import data_utils.common.entry
import os, stat, subprocess, sys
(place,) = {{os.environ[name] for name in {CACHES}}}
status = os.stat(place)
code = "import data_utils.common.entry, os; print(os.environ['XDG_CACHE_HOME'])"
child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
print(oct(stat.S_IMODE(status.st_mode)), status.st_uid == os.getuid(), child.stdout.strip() == place)
print(place)
"""


def test_caches_of_a_user_without_a_home_are_private(installation, stranger):
    """Owned by the user, and shared with processes that the first one starts."""
    done = stranger(installation / "bin/python", "-c", LOOK_AT_CACHES)
    assert done.returncode == 0, done.stderr
    *checks, place = done.stdout.split()
    assert checks == ["0o700", "True", "True"]
    assert Path(place).parent == stranger.temporary and not Path(place).exists()


def test_caches_of_a_user_with_a_home_stay_there(tmp_path):
    code = f"import data_utils.common.entry, os; print([name for name in {CACHES} if name in os.environ])"
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "") and list(tmp_path.iterdir()) == []


def test_every_script_has_a_command():
    targets = {
        target.partition(":")[0].removeprefix("glm_scripts.") for target in PROJECT["scripts"].values()
    }
    without = {"__init__", "entry", "gpu_day", "check_versions"}  # the last two run the tests of a checkout
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")} - without
    # No import statement takes the name `try`: the package starts that script.
    assert targets == scripts - {"try"} | {"pretrain_glm", "glm_scripts"}


# The image: what docker would do, as far as it can be known without docker.


def instructions():
    """(instruction, arguments) of the Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def test_the_image_has_a_python_that_the_project_takes():
    (base,) = [arguments for name, arguments in instructions() if name == "FROM"]
    version = re.fullmatch(r"python:(\d+\.\d+)-slim-\w+", base)[1]
    assert version in SpecifierSet(PROJECT["requires-python"])


def test_the_image_copies_what_an_installation_needs():
    """The files of `installation` above, which runs the same `pip install --no-deps`, and nothing that is ignored."""
    copied = {word for name, arguments in instructions() if name == "COPY" for word in arguments.split()[:-1]}
    assert copied == {"requirements.txt", *INSTALLED_FILES, *INSTALLED_FOLDERS}
    assert all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert ignored[0] == "**" and {line[1:] for line in ignored if line.startswith("!")} == copied


def test_the_image_installs_the_pinned_requirements_and_the_project():
    installs = re.findall(r"pip install (.*)", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert installs == ["--no-cache-dir -r requirements.txt", "--no-cache-dir --no-deps ."]
    packages = next(arguments for name, arguments in instructions() if "apt-get install" in arguments)
    assert {"gcc", "g++", "libc6-dev"} <= set(packages.split())


def test_the_image_runs_an_installed_command_and_not_as_root():
    last = dict(instructions())
    assert json.loads(last["CMD"])[0] in PROJECT["scripts"] and last["USER"] != "root"
    page = (ROOT / "docs/launchers.md").read_text(encoding="utf-8")
    documented = re.findall(r"^docker run .*?glm ((?:.|\\\n)*?)$", page, re.M)
    assert documented
    for command in documented:
        for path in re.findall(r"/opt/glm/(\S+)", command):
            assert (ROOT / path).exists(), path
        assert command.split()[0] in {*PROJECT["scripts"], "deepspeed"}
