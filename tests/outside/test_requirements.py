"""The pinned requirements fit what the package index gives a user, not only a wheel that lies on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support import package_index
from support.project import ROOT

PIP = "26.3"  # older ones download the wheels of a dry run, 3 GB; this one reads their metadata


@pytest.fixture(scope="module")
def pip(tmp_path_factory):
    """A command for pip as a user without settings has it: only the index decides."""
    directory = tmp_path_factory.mktemp("pip")
    environment = package_index.environment()
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(directory), f"pip=={PIP}"]
    done = subprocess.run(download, cwd=directory, env=environment, capture_output=True, text=True)
    if done.returncode:
        reachable = package_index.answers(done.stderr)
        assert not reachable, done.stderr
        pytest.skip(package_index.NO_ANSWER)
    (wheel,) = directory.glob("pip-*.whl")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(wheel / "pip"), *arguments]
        return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)

    return run


def resolved(pip, requirements: Path, report: Path):
    """Name -> metadata of all packages that an empty environment would get. No wheel is downloaded, none installed."""
    options = ["--dry-run", "--ignore-installed", "--no-cache-dir", "--use-feature=fast-deps"]
    done = pip("install", *options, "--report", str(report), "--requirement", str(requirements))
    reason = "".join(done.stdout.partition("The conflict is caused by")[1:])
    assert done.returncode == 0, f"{requirements.name} cannot be installed:\n{done.stderr}{reason}"
    found = json.loads(report.read_text(encoding="utf-8"))["install"]
    local = [
        entry["download_info"]["url"] for entry in found if entry["download_info"]["url"].startswith("file:")
    ]
    assert local == [], "a local wheel may require other packages than that of the index"
    return {entry["metadata"]["name"].lower(): entry["metadata"] for entry in found}


@pytest.mark.index
def test_the_requirements_fit_the_torch_of_the_index(pip, tmp_path):
    """requirements-dev.txt includes requirements.txt, so one solution holds for both."""
    dev = ROOT / "requirements-dev.txt"
    assert "-r requirements.txt" in dev.read_text(encoding="utf-8").splitlines()
    packages = resolved(pip, dev, tmp_path / "report.json")
    required = [Requirement(text) for text in packages["torch"]["requires_dist"]]
    required = [r for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    assert "triton" in {r.name for r in required}, "not the build for CUDA, which Linux users get"
    for requirement in required:  # where this environment has one of them, it is one that users have
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        assert version in requirement.specifier, (
            f"{requirement.name} {version} is installed here, but the torch of the index requires {requirement}"
        )


@pytest.mark.index
def test_a_version_that_torch_refuses_is_found(pip, tmp_path):
    """The mistake that once stood in requirements-dev.txt."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    (torch,) = [line for line in lines if line.startswith("torch==")]
    (tmp_path / "requirements.txt").write_text(f"{torch}\ntriton==3.9.0\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"(?s)cannot be installed.*torch \S+ depends on triton=="):
        resolved(pip, tmp_path / "requirements.txt", tmp_path / "report.json")
