"""GLM's ablations, configs/objectives/ablations: each changes what is trained, and learns."""

import math

import pytest
from support.distributed import run_ranks
from support.project import ROOT, small_run
from support.training.training import fit, open_data, records

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import load_yaml
from data_utils.common.settings import merge, to_tree
from megatron_lite.config.tree import load_config

FILES = sorted((ROOT / "configs/objectives/ablations").glob("*.yaml"))
STEPS = 8


def test_each_file_changes_one_thing_of_a_published_model():
    base = to_tree(load_config([ROOT / "configs/glm-base.yaml"]))
    seen = []
    for path in FILES:
        changed = to_tree(load_config([ROOT / "configs/glm-base.yaml", path]))
        ((section, keys),) = load_yaml(path).items()
        found = {key for key in changed[section] if changed[section][key] != base[section].get(key)}
        assert found and found <= set(keys) and len(keys) <= 2
        assert {name for name in changed if changed[name] != base.get(name)} == {section}
        seen.append(found)
    assert len(seen) == 7 and len(set(map(frozenset, seen))) == 7


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """Losses of the first and the last step, by name of the file; "" is GLM itself."""
    trees = {}
    for path in (None, *FILES):
        directory = tmp_path_factory.mktemp("run")
        tree = merge(small_run(corpus, directory), {"training": {"steps": STEPS, "eval_interval": 0}})
        tree = merge(
            tree, {"blank_infilling": {"token_prob": 1.0, "sentence_prob": 0.0, "masked_ratio": 0.3}}
        )
        tree = merge(tree, {"optimizer": {"lr": 4e-3}, "schedule": {"warmup_steps": 0}})
        tree = merge(tree, load_yaml(path) if path else {})
        if "sentinel_count" in tree["blank_infilling"]:
            tree["blank_infilling"] |= {"sentinel_first": 6, "sentinel_count": 20}  # the vocabulary is small
        trees[path.stem if path else ""] = tree
    run_ranks(fit_all, 1, list(trees.values()))
    found = {name: records(tree["run"]["directory"]) for name, tree in trees.items()}
    return {name: (steps[1]["loss"], steps[STEPS]["loss"]) for name, steps in found.items()}


def test_special_tokens_are_no_sentinels(corpus, tmp_path):
    tree = merge(small_run(corpus, tmp_path), {"blank_infilling": {"sentinel_first": 1, "sentinel_count": 2}})
    with pytest.raises(ConfigError, match=r"sentinel_first .1. overlaps the special tokens below 5"):
        open_data(tree)


def fit_all(context, trees):
    for tree in trees:
        fit(context, tree)


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_each_trains_and_is_not_glm_itself(trained, name):
    first, last = trained[name]
    assert math.isfinite(last) and last < first - (0.003 if name == "masked-lm" else 0.05)
    assert last != trained[""][1] and trained[""][1] < trained[""][0] - 0.05
