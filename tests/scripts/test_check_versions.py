"""The tests at both ends of the versions: which packages, which tests, and what is printed of them."""

from __future__ import annotations

import itertools
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from support.commands import forked, python
from support.project import ROOT

from data_utils.common.errors import ConfigError
from scripts import check_versions as versions

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {
    "test_one.py": "def test_right(): pass\ndef test_wrong(): assert 1 + 1 == 3\n",
    "test_two.py": "import pytest\n\n@pytest.mark.skip\ndef test_left_out(): pass\n",
    "test_three.py": "import a_package_that_is_gone\n",
}


def test_the_oldest_are_the_lower_bounds():
    project = {
        "dependencies": ["a>=1.5,<3", "b==2.0.1", "c"],
        "optional-dependencies": {"d": ["E_f<2,>=1.0"], "lm-eval": ["lm_eval>=1"]},
    }
    assert versions.requirements("oldest", project) == ["a==1.5", "b==2.0.1", "c", "E_f==1.0"]
    assert versions.requirements("newest", project) == ["a>=1.5,<3", "b==2.0.1", "c", "E_f<2,>=1.0"]


@pytest.mark.parametrize("line", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["hf"]])
def test_each_requirement_of_a_run_has_a_lower_bound(line):
    (oldest,) = versions.requirements("oldest", {"dependencies": [line], "optional-dependencies": {}})
    (bound,) = Requirement(oldest).specifier
    assert bound.operator == "==" and Version(bound.version) in Requirement(line).specifier


@pytest.mark.parametrize(("end", "command"), [("oldest", "python3.11"), ("newest", "python3.13")])
def test_the_python_of_an_end(end, command):
    assert versions.default_python(end, ">=3.11,<3.14") == command


def test_a_python_that_is_missing_or_not_allowed_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r">=4; .*--python"):
        versions.check_python(sys.executable, ">=4")
    done = forked("scripts/check_versions.py", "newest", "--python", tmp_path / "absent")
    assert done.returncode == 2 and "absent" in done.stderr and "--python" in done.stderr


def test_the_core_is_of_tests_that_exist():
    """A file belongs to one list, since results are counted by file."""
    lists = {name: {test.partition("::")[0] for test in tests} for name, tests in versions.CORE.items()}
    files = [file for chosen in lists.values() for file in chosen]
    assert len(files) == len(set(files))
    for test in itertools.chain(*versions.CORE.values()):
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8") or not name, test


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with three files of tests, two of which are the core. Its environment is the running one."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    for name, text in MODULES.items():
        (tmp_path / "tests" / name).write_text(text)
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setattr(versions, "FOLDER", tmp_path / "build")
    monkeypatch.setattr(
        versions, "CORE", {"first": ("test_one.py", "test_three.py"), "last": ("test_two.py",)}
    )
    monkeypatch.setattr(versions, "make_environment", lambda *arguments: versions.Path(sys.executable))
    return tmp_path


def start(monkeypatch, capfd, *arguments):
    """Exit status, and the printed lines from the first list on."""
    monkeypatch.setattr(sys, "argv", ["check_versions.py", "oldest", "--python", sys.executable, *arguments])
    status = versions.main()
    before, _, lists = capfd.readouterr().out.rpartition("\noldest: ")
    assert before and lists.startswith("Python ")
    return status, lists.splitlines()[1:]


@pytest.mark.slow
def test_what_fails_is_counted_and_named_by_list(checkout, monkeypatch, capfd):
    status, lines = start(monkeypatch, capfd, "--", "--continue-on-collection-errors")
    assert status == 1
    assert lines[0] == "first: 1 passed, 2 failed, 0 skipped"
    assert any("test_wrong" in line for line in lines[1:3]) and any(
        "test_three" in line for line in lines[1:3]
    )
    assert lines[3:] == ["last: 0 passed, 0 failed, 1 skipped"]


def test_tests_that_are_named_run_instead_of_the_core(checkout, monkeypatch, capfd):
    status, lines = start(monkeypatch, capfd, "--", "tests/test_one.py::test_right")
    assert (status, lines) == (0, ["first: 1 passed, 0 failed, 0 skipped"])


def test_a_test_that_was_interrupted_counts_as_nothing(tmp_path):
    """pytest writes it without its name."""
    (tmp_path / "results.xml").write_text(
        '<testsuites><testsuite><testcase time="1.5"/></testsuite></testsuites>'
    )
    assert list(versions.summary(tmp_path / "results.xml")) == []


def test_an_environment_is_made_once_for_its_requirements(tmp_path, monkeypatch):
    """One that could not be made whole is made again."""
    commands = []

    def run(command):
        commands.append(command)
        if "venv" in command:
            (tmp_path / "oldest").mkdir()
        elif fails:
            raise ConfigError("no network")

    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setattr(versions, "_run", run)
    fails = True
    with pytest.raises(ConfigError):
        versions.make_environment("oldest", "python3.11", "3.11.0", ["a==1"])
    fails = False
    for wanted, count in ((["a==1"], 4), (["a==1"], 4), (["a==1", "b==2"], 6)):
        versions.make_environment("oldest", "python3.11", "3.11.0", wanted)
        assert len(commands) == count
    assert (tmp_path / "oldest/requirements.txt").read_text().splitlines()[1:] == ["a==1", "b==2"]


@pytest.mark.slow
@pytest.mark.index
@pytest.mark.parametrize("end", ["oldest", "newest"])
def test_the_core_passes_at(end):
    done = python("scripts/check_versions.py", end)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
