"""What an export holds for other versions of transformers than the installed one: see test_other_transformers.py."""

import ast
import json
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import torch
from safetensors.torch import load_file
from support.hf.hf_runs import tree, write_run
from support.hf.published import random_model
from support.hf.published_files import OBJECTIVE, TREE, edit, write_directory, write_tokenizer
from support.selection import slow_but
from transformers.modeling_outputs import BaseModelOutputWithPast

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import merge
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.glm.modeling_glm import GLMForBlankInfilling
from megatron_lite.hf.importing import import_directory
from megatron_lite.hf.published.source import open_published
from megatron_lite.hf.published.systems import PUBLISHED

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
DEFAULT = {"rope_type": "default"}
# System: the fields of version 4 of transformers, and the same in version 5.
ROTARY = {
    **{
        name: (
            {"rope_theta": 500.0, "rope_scaling": None},
            {"rope_parameters": {**DEFAULT, "rope_theta": 500.0}},
        )
        for name in ("llama", "mistral", "qwen2", "qwen3", "eurobert", "qwen3_moe", "olmoe")
    },
    **{
        f"{name}, scaled": (
            {"rope_theta": 500.0, "rope_scaling": LLAMA3},
            {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}},
        )
        for name in ("llama", "mistral", "qwen2", "qwen3", "eurobert")
    },
    **{
        name: (
            {"rope_theta": 500.0, "partial_rotary_factor": 0.25},
            {"rope_parameters": {**DEFAULT, "rope_theta": 500.0, "partial_rotary_factor": 0.25}},
        )
        for name in ("glm4", "glm4_0414", "glm4_moe")
    },
    **{
        name: (
            {"global_rope_theta": 500.0, "local_rope_theta": 77.0, "global_attn_every_n_layers": 2},
            {
                "rope_parameters": {
                    "full_attention": {**DEFAULT, "rope_theta": 500.0},
                    "sliding_attention": {**DEFAULT, "rope_theta": 77.0},
                },
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
        )
        for name in ("modernbert", "modernbert_decoder")
    },
}
# What the files of either version have in common.
SAME = {
    "mistral": {"sliding_window": None}, "glm4": {"head_dim": 16}, "glm4_0414": {"head_dim": 16},
    "glm4_moe": {"head_dim": 16},
}  # fmt: skip


def published_by(version, system, fields, directory):
    """A directory whose config.json is written by hand, with the fields of one version alone."""
    name = system.partition(",")[0]
    write_directory(name, directory)
    path = directory / "config.json"
    written = json.loads(path.read_text())
    for of_each in ROTARY[system]:
        for field in of_each:
            written.pop(field, None)
    written |= SAME.get(name, {}) | fields
    written["torch_dtype" if version == 4 else "dtype"] = written.pop("dtype")
    path.write_text(json.dumps(written))


@pytest.mark.parametrize("system", slow_but(["llama", "qwen2, scaled", *[*ROTARY][-2:]], ROTARY))
def test_both_spellings_are_read_and_written(system, tmp_path):
    """An import of either age is the same run, and its export has both, which agree."""
    name = system.partition(",")[0]
    settings = []
    for version, fields in zip((4, 5), ROTARY[system], strict=True):
        source = tmp_path / str(version)
        published_by(version, system, fields, source)
        settings.append(open_published(source).settings)
        import_directory(source, tmp_path / f"run{version}", merge(TREE, OBJECTIVE[name]), verify=False)
        export_run(tmp_path / f"run{version}", tmp_path / f"export{version}", ExportOptions(verify=False))
        written = json.loads((tmp_path / f"export{version}/config.json").read_text())
        for of_each in ROTARY[system]:
            assert {field: written[field] for field in of_each} == of_each
        assert written["dtype"] == written["torch_dtype"] == "float32"
        if "scaled" in system:  # the class checks its type
            assert type(written["rope_parameters"]["original_max_position_embeddings"]) is int
        assert open_published(tmp_path / f"export{version}").settings == settings[0]
    assert settings[0] == settings[1]


@pytest.mark.parametrize(
    ("system", "changes", "parts"),
    [
        ("llama", {"rope_theta": 400.0}, ("rope_theta is 400.0", "500.0")),
        ("llama", {"rope_scaling": {**LLAMA3, "factor": 4.0}, "rope_parameters": None}, ()),
        (
            "llama, scaled",
            {"rope_parameters": {**DEFAULT, "rope_theta": 500.0}},
            ("rope_type is 'default'", "llama3"),
        ),
        ("glm4", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor is 0.5", "0.25")),
        ("modernbert", {"local_rope_theta": 9.0}, ("local_rope_theta is 9.0", "77.0")),
        ("modernbert", {"global_attn_every_n_layers": 3}, ("global_attn_every_n_layers is 3", "2")),
    ],
)
def test_spellings_that_contradict_each_other_are_refused(system, changes, parts, tmp_path):
    of_4, of_5 = ROTARY[system]
    published_by(5, system, {**of_4, **of_5, **changes}, tmp_path / "source")
    if not parts:
        assert open_published(tmp_path / "source").settings["rotary_scaling"][0] == 4.0
        return
    with pytest.raises(CheckpointError) as error:
        open_published(tmp_path / "source")
    assert all(part in str(error.value) for part in parts), error.value


def test_every_rotary_system_is_among_these():
    rotary = {
        name.partition(",")[0] for name, system in PUBLISHED.items()
        if any(entry.ours == "rotary_base" for entry in system.fields)
    }  # fmt: skip
    named = {"glm4": "glm", "glm4_0414": "glm4", "modernbert_decoder": "modernbert-decoder"}
    assert rotary == {named.get(name, name) for name in ROTARY if "," not in name}


# Fields by which version 4 of transformers decides of T5 and mT5 whether the head is tied, and scales what it takes.
@pytest.mark.parametrize(
    ("case", "says", "has_head"),
    [
        ("t5", True, False), ("t5_1_1", False, True), ("t5_1_1, scaled", True, False), ("mt5", False, True),
        ("mt5, tied", False, True),
    ],
)  # fmt: skip
def test_heads_of_t5_are_tied_and_scaled_in_both_versions(case, says, has_head, tmp_path):
    (tmp_path / "source").mkdir()
    changes = {"vocab_size": write_tokenizer("t5", tmp_path / "source"), "num_decoder_layers": 1}
    model = random_model(case, **changes)
    model.save_pretrained(tmp_path / "source")
    tree = merge(TREE, {"objectives": {"t5": 1}})
    import_directory(tmp_path / "source", tmp_path / "run", tree, verify=False)
    assert export_run(tmp_path / "run", tmp_path / "export", ExportOptions()).agreement == 1.0
    written = json.loads((tmp_path / "export/config.json").read_text())
    weights = load_file(tmp_path / "export/model.safetensors")
    assert written["tie_word_embeddings"] is says and ("lm_head.weight" in weights) == has_head
    if "tied" in case:
        assert torch.equal(weights["lm_head.weight"], weights["shared.weight"])
    again = open_published(tmp_path / "export").settings
    assert again == open_published(tmp_path / "source").settings


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        (case, "lm_head.bias", "lm_head.decoder.bias") for case in ("roberta", "xlm_roberta", "camembert")
    ] + [("albert", "predictions.bias", "predictions.decoder.bias")],
)  # fmt: skip
def test_a_bias_with_two_names_has_both(case, first, second, tmp_path):
    """Versions to 4.49 take zeros where the second lacks."""
    write_directory(case, tmp_path / "source")
    import_directory(tmp_path / "source", tmp_path / "run", merge(TREE, OBJECTIVE[case]), verify=False)
    export_run(tmp_path / "run", tmp_path / "export", ExportOptions())
    weights = load_file(tmp_path / "export/model.safetensors")
    assert weights[first].any() and torch.equal(weights[first], weights[second])


@pytest.mark.parametrize(
    ("case", "changes", "version"),
    [
        ("bert", {}, "4.46"), ("deberta_v3", {}, "5.20"), ("deberta_v3, odd", {}, "4.46"), ("qwen3", {}, "4.51"),
        ("modernbert", {}, "4.48"), ("modernbert_decoder", {}, "5.0"),
        ("modernbert_decoder", {"local_rope_theta": 160000.0, "global_rope_theta": 160000.0}, "4.55"),
    ],
)  # fmt: skip
def test_the_card_names_the_first_version_that_computes_it(case, changes, version, tmp_path):
    write_directory(case, tmp_path / "source")
    if changes:
        edit(tmp_path / "source", **changes, rope_parameters=None)
    objective = OBJECTIVE.get(case.partition(",")[0], {})
    import_directory(tmp_path / "source", tmp_path / "run", merge(TREE, objective), verify=False)
    export_run(tmp_path / "run", tmp_path / "export", ExportOptions(verify=False))
    assert f"Use transformers {version} or newer." in (tmp_path / "export/README.md").read_text()


# GLM's own files

# What version 4.46 of transformers has, of what they import.
IN_VERSION_4 = {
    "transformers": {
        "BatchEncoding", "GenerationMixin", "Pipeline", "PretrainedConfig", "PreTrainedModel", "PreTrainedTokenizer",
        "PreTrainedTokenizerFast",
    },
    "transformers.cache_utils": {"Cache", "DynamicCache"},
    "transformers.modeling_outputs": {
        "BaseModelOutputWithPast", "CausalLMOutputWithPast", "MultipleChoiceModelOutput", "SequenceClassifierOutput",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def exported(vocabulary, tmp_path_factory):
    root = tmp_path_factory.mktemp("versions")
    write_run(root / "run", tree(vocabulary))
    export_run(root / "run", root / "export", ExportOptions(verify=False))
    return root / "export"


def test_the_code_of_an_export_imports_what_version_4_has(exported):
    """At its top level; what stands in `try` has a way without it."""
    files = list(exported.glob("*_glm.py"))
    assert len(files) == 5
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
                names = {alias.name for alias in node.names}
                assert names <= IN_VERSION_4.get(node.module, set()), (file.name, node.module, names)


def test_without_the_initial_weights_of_version_5(exported, monkeypatch):
    """Weights begin as they do with them."""
    monkeypatch.setitem(sys.modules, "transformers.initialization", None)
    monkeypatch.delattr("transformers.initialization", raising=False)
    spec = spec_from_file_location(
        "old_glm", exported / "modeling_glm.py", submodule_search_locations=[str(exported)]
    )
    module = module_from_spec(spec)
    for name in ("old_glm", "old_glm.configuration_glm", "old_glm.positions_glm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "old_glm", module)
    spec.loader.exec_module(module)
    assert module.init is torch.nn.init
    models = []
    for cls in (module.GLMForBlankInfilling, GLMForBlankInfilling):
        config = cls.config_class.from_pretrained(exported)
        torch.manual_seed(0)
        models.append(cls(config).state_dict())
    assert all(torch.equal(models[0][name], weight) for name, weight in models[1].items())
    std = models[0]["glm.layers.0.attention.query_key_value.weight"].std()
    assert models[0]["glm.layers.0.attention.dense.weight"].std() < 0.6 * std


@torch.no_grad()
def test_a_cache_has_the_name_of_each_version(exported, monkeypatch):
    """`past_key_values` and, since 5.24, `cache`: the second half of a text with the keys of the first."""
    model = GLMForBlankInfilling.from_pretrained(exported).eval()
    ids = torch.arange(5, 17)[None]
    blocks = torch.zeros_like(ids)
    whole = model(input_ids=ids, position_ids=blocks + torch.arange(12), block_position_ids=blocks + 1).logits
    for name in ("cache", "past_key_values"):
        half = {"position_ids": torch.arange(12)[None], "block_position_ids": blocks + 1}
        first = model(
            input_ids=ids[:, :6], **{key: value[:, :6] for key, value in half.items()}, use_cache=True
        )
        held = first.past_key_values
        more = {key: value[:, 6:] for key, value in half.items()}
        one = model(
            input_ids=ids[:, 6:7], **{key: value[:, :1] for key, value in more.items()}, **{name: held}
        )
        torch.testing.assert_close(one.logits[:, -1], whole[:, 6], rtol=0, atol=1e-5)
    assert "past_key_values" in BaseModelOutputWithPast.__dataclass_fields__ or "cache" in first


def test_outputs_are_named_or_a_tuple(exported):
    model = GLMForBlankInfilling.from_pretrained(exported).eval()
    named = model(input_ids=torch.arange(5, 9)[None], use_cache=False)
    (logits,) = model(input_ids=torch.arange(5, 9)[None], use_cache=False, return_dict=False)
    assert torch.equal(named.logits, logits)
    model.config.return_dict = False
    assert isinstance(model(input_ids=torch.arange(5, 9)[None], use_cache=False), tuple)
