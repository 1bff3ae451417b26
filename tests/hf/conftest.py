"""One small run and its exports for the tests of export and import, which change copies only."""

import shutil

import pytest
from support.hf.hf_runs import tree, write_run, write_vocabulary

from megatron_lite.hf.export import ExportOptions, export_run


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="session")
def run(vocabulary, tmp_path_factory):
    """A run directory."""
    directory = tmp_path_factory.mktemp("run")
    write_run(directory, tree(vocabulary))
    return directory


@pytest.fixture(scope="session")
def exports(run, tmp_path_factory):
    """The run in both layouts."""
    root = tmp_path_factory.mktemp("exports")
    for name in ("huggingface", "released"):
        export_run(run, root / name, ExportOptions(layout=name))
    return root


@pytest.fixture
def released_directory(exports, tmp_path):
    return shutil.copytree(exports / "released", tmp_path / "released")
