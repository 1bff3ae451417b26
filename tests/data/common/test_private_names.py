"""Names of torch and DeepSpeed without documentation: the list has all that are used, the installed versions too."""

from __future__ import annotations

import ast
import re

import pytest
import torch
import yaml
from support.code_structure import product_files
from support.commands import forked
from support.project import ROOT

from data_utils.common.errors import ConfigError
from data_utils.common.private_names import NAMES, TESTED, groups_of, has_name, lookup, require_names

LISTED = {name for names in NAMES.values() for name in names}


@pytest.mark.parametrize("group", NAMES)
def test_the_installed_versions_have_every_name(group):
    require_names(group)
    assert not has_name(f"{NAMES[group][0]}_of_another_version")


def test_the_versions_named_are_those_of_the_requirements():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = dict(line.partition(" ")[0].split("==") for line in lines if "==" in line)
    assert {library: pins[library] for library in TESTED} == TESTED


def attributes(path):
    """Dotted names of a file, such as self._deepspeed.overflow."""
    for node in ast.walk(ast.parse(path.read_text())):
        words = []
        while isinstance(node, ast.Attribute):
            words.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and words:
            yield ".".join([node.id, *reversed(words)])


def test_every_private_name_of_torch_is_listed():
    private = re.compile(r"torch(\.\w+)*\._[a-z]\w*$")
    used = {name for path in product_files() for name in attributes(path) if private.match(name)}
    assert used and {name for name in used if name not in LISTED} == set()


def test_every_attribute_of_deepspeeds_stage_3_is_listed():
    read = re.compile(r"self\._deepspeed\.(\w+)")
    names = attributes(ROOT / "megatron_lite/engine/zero3.py")
    used = {found[1] for name in names if (found := read.match(name))}
    assert used and used == used & {name.rpartition(".")[2] for name in NAMES["ZeRO 3"]}


def test_every_private_attribute_of_deepspeeds_pipeline_is_listed():
    """Those that the stages read and that no class of this program assigns."""
    path = ROOT / "megatron_lite/engine/pipeline.py"
    tree = ast.parse(path.read_text())
    stages = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "_Stages")
    read = {node.attr for node in ast.walk(stages) if isinstance(node, ast.Attribute)}
    ours = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    used = {name for name in read - ours if re.match(r"_[a-z]", name)}
    assert used and used == used & {name.rpartition(".")[2] for name in NAMES["pipeline stages"]}


def test_a_name_that_is_gone_is_named_with_the_tested_version(monkeypatch):
    monkeypatch.delattr(torch, "_foreach_norm")
    monkeypatch.delattr(torch.cuda.memory, "_dump_snapshot")
    with pytest.raises(ConfigError, match=r"torch\._foreach_norm, torch\.cuda.*; install torch==2\.13\.0"):
        require_names(*groups_of(pipeline_parallel_size=1, zero_stage=1))
    with pytest.raises(ConfigError, match=r"no torch\._foreach_norm, .*; install torch==2\.13\.0"):
        lookup("torch._foreach_norm")


def test_a_name_of_an_instance_that_is_gone(monkeypatch):
    from deepspeed.runtime.zero import stage3

    class Renamed:
        def __init__(self):
            self.gradient_norm = 0.0

    monkeypatch.setattr(stage3, "DeepSpeedZeroOptimizer_Stage3", Renamed)
    with pytest.raises(ConfigError, match=r"Stage3\._global_grad_norm, .*; install deepspeed==0\.19\.8"):
        require_names(*groups_of(pipeline_parallel_size=1, zero_stage=3))


def test_a_run_names_what_its_torch_lacks(settings, tmp_path, monkeypatch):
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.delattr(torch, "_foreach_norm")
    done = forked("pretrain_glm.py", "--config", tmp_path / "given.yaml")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "torch._foreach_norm" in done.stderr and "install torch==2.13.0" in done.stderr
    assert not list((tmp_path / "run").glob("step*"))
