"""Outputs are compared: one model in memory, a limit that follows from the reference's own rounding, and its report."""

import gc
import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hf.published import random_model
from support.systems.optimus_runs import write_run as write_optimus
from transformers import GenerationConfig, PreTrainedModel

from data_utils.common.errors import CheckpointError
from megatron_lite.hf.common import verify
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.glm import own_format
from megatron_lite.hf.glm.modeling_glm import GLMModel
from megatron_lite.hf.importing import import_directory
from megatron_lite.hf.published.verify import class_checks
from megatron_lite.inference.open_run import load_model, open_run
from megatron_lite.models.optimus import huggingface as optimus

TREE = {"training": {"steps": 6, "precision": "fp32"}, "data": {"sequence_length": 60}}
CAUSAL = {**TREE, "objectives": {"causal": 1}}
T5 = {**TREE, "objectives": {"t5": 1}}


def write_tokenizer(directory, size=97):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(size - 5))]
    (directory / "vocab.txt").write_text("\n".join(words) + "\n")
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))


def write_directory(case, directory, **options):
    random_model(case, **options).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


# Memory


def live_bytes():
    """Of all parameters, each once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.nn.Parameter) and found.device.type == "cpu":
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.fixture
def peak(monkeypatch):
    """The most bytes of parameters that were alive after a model was loaded, beyond those before."""
    before, seen = live_bytes(), []

    def counted(load):
        def loaded(*args, **options):
            model = load(*args, **options)
            seen.append(live_bytes() - before)
            return model

        return loaded

    monkeypatch.setattr(verify, "load_model", counted(verify.load_model))
    monkeypatch.setattr(optimus, "latent_run", counted(optimus.latent_run))
    load = PreTrainedModel.from_pretrained.__func__
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(counted(load)))
    return seen


def size_of(directory):
    return sum(tensor.nbytes for tensor in load_file(directory / "model.safetensors").values())


@pytest.mark.slow
@pytest.mark.parametrize(("case", "settings"), [("bert", {"objectives": {"masked_lm": 1}}), ("gpt2", CAUSAL)])
def test_one_published_model_is_in_memory(case, settings, tmp_path, peak):
    original = write_directory(case, tmp_path / "original")
    size = size_of(original)
    peak.clear()
    import_directory(original, tmp_path / "run", {**TREE, **settings})
    export_run(tmp_path / "run", tmp_path / "export", ExportOptions())
    assert len(peak) >= 4 and size * 0.9 < max(peak) < size * 1.5


@pytest.mark.slow
def test_one_glm_is_in_memory(exports, run, tmp_path, peak):
    size = size_of(exports / "huggingface")
    import_directory(exports / "huggingface", tmp_path / "run", {})
    export_run(run, tmp_path / "export", ExportOptions())
    assert (
        len(peak) >= 4 and size * 0.9 < max(peak) < size * 1.7
    )  # our model pads its vocabulary: 72 rows to 128


@pytest.mark.slow
def test_optimus_is_in_memory_once(tmp_path, peak):
    directory, weights = write_optimus(tmp_path)
    size = sum(weight.nbytes for weight in weights.values())
    export_run(directory, tmp_path / "export", ExportOptions())
    assert len(peak) == 3 and max(peak) < size * 1.5


# The limit


@pytest.fixture(scope="module")
def steep(tmp_path_factory):
    """A T5 whose scores are so steep that rounding in fp32 shows, and its import without a comparison."""
    root = tmp_path_factory.mktemp("steep")
    directory = write_directory("t5", root / "t5", std=0.3)
    import_directory(directory, root / "run", T5, verify=False)
    return directory, open_run(root / "run")


def test_what_rounding_explains_passes(steep, tmp_path):
    found = import_directory(steep[0], tmp_path / "run", T5)
    plain = 1e-5 * max(1.0, found.largest_logit)
    assert plain < found.largest_difference < 2 * found.rounding == found.limit(1e-5)


def missed(steep, step):
    """Which of every `step` tensors no output shows changed by 1 %."""
    directory, run = steep
    model = load_model(run.checkpoint, run.config.model)

    checks = partial(class_checks, directory, "T5ForConditionalGeneration", run.config.model)
    names = []
    for name, parameter in list(model.named_parameters())[::step]:
        changed = load_model(run.checkpoint, run.config.model)
        with torch.no_grad():
            changed.get_parameter(name).copy_(parameter * 1.01)
        try:
            verify.compare_outputs(checks, lambda changed=changed: changed, 1e-5, "it", run.checkpoint.shapes)
        except CheckpointError:
            continue
        names.append(name)
    return names


def test_a_tensor_that_is_1_percent_off_is_found_within_that_limit(steep):
    assert missed(steep, 8) == []


@pytest.mark.slow
def test_every_tensor_that_is_1_percent_off_is_found(steep):
    assert missed(steep, 1) == []


def test_nan_does_not_pass():
    nan = torch.full((2, 3), float("nan"))
    assert not verify.compare(torch.zeros(2, 3), nan, 1e-5, float("nan")).holds(1e-5)
    assert not verify.compare(nan, torch.zeros(2, 3), 1e-5, 1.0).holds(1e-5)


# What is compared


def test_default_positions_that_are_off_by_one_are_found(run, tmp_path, monkeypatch):
    def shifted(self, *arguments):
        return (original(self, *arguments) - 1).clamp(min=0)

    original = GLMModel._default_positions
    monkeypatch.setattr(GLMModel, "_default_positions", shifted)
    with pytest.raises(CheckpointError, match=r"\(default inputs\) does not compute"):
        export_run(run, tmp_path / "export", ExportOptions())


def test_a_generation_config_that_writes_other_spans_is_found(run, tmp_path, monkeypatch):
    ours = GenerationConfig(eos_token_id=[0], suppress_tokens=list(range(0, 70, 2)), max_new_tokens=4)
    monkeypatch.setattr(own_format, "generation_config", lambda special: ours)
    with pytest.raises(CheckpointError, match=r"\(pipeline\) does not compute"):
        export_run(run, tmp_path / "export", ExportOptions())
    assert not (tmp_path / "export").exists()


def test_a_tokenizer_with_another_word_is_found(exports, tmp_path):
    copy = shutil.copytree(exports / "huggingface", tmp_path / "copy")
    text = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(text.replace('"[UNK]"', '"word1"'))
    with pytest.raises(CheckpointError, match="tokenizer"):
        import_directory(copy, tmp_path / "run", {})


# The report


def test_the_report_says_what_was_compared(exports):
    found = json.loads((exports / "huggingface/proof.json").read_text())
    assert found["proven"] and found["format"] == "megatron-lite-proof"
    assert found["comparisons"].keys() == {"logits", "default inputs", "generation", "pipeline"}
    for result in found["comparisons"].values():
        assert result["rows"] > 0 and result["largest_difference"] <= result["limit"] and result["inputs"]
    assert (
        found["tokenizers"]["tokenizer"]["texts"] > 300 and found["tokenizers"]["tokenizer"]["differing"] == 0
    )
    assert found["torch"] == torch.__version__ and {"version", "commit"} <= found["program"].keys()
    card = (exports / "huggingface/README.md").read_text()
    assert "## Proof" in card and "| default inputs: random tokens and a mask alone" in card
    assert card.index("## Evaluation") < card.index("## Proof") < card.index("## License")
    assert set(json.loads((exports / "released/proof.json").read_text())["comparisons"]) == {"logits"}
    for name in ("huggingface", "released"):
        assert str(exports) not in (exports / name / "proof.json").read_text()


def test_an_export_without_a_comparison_says_so(run, tmp_path):
    assert export_run(run, tmp_path / "export", ExportOptions(verify=False)) is None
    found = json.loads((tmp_path / "export/proof.json").read_text())
    assert found["proven"] is False and found["reason"] == "--no-verify" and "comparisons" not in found
    assert "Nothing was proven" in (tmp_path / "export/README.md").read_text()


def test_an_import_trusts_no_report(exports, tmp_path):
    """The directory has the report of a comparison that held, and a weight that is damaged since."""
    copy = shutil.copytree(exports / "huggingface", tmp_path / "copy")
    state = load_file(copy / "model.safetensors")
    state["glm.layers.1.attention.dense.weight"][0, 0] = float("nan")
    save_file(state, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.attention\.dense\.weight .*not finite"):
        import_directory(copy, tmp_path / "run", {})
    assert not (tmp_path / "run").exists()


def test_a_published_export_has_a_report(tmp_path):
    original = write_directory("gpt2", tmp_path / "original")
    import_directory(original, tmp_path / "run", CAUSAL)
    export_run(tmp_path / "run", tmp_path / "export", ExportOptions())
    found = json.loads((tmp_path / "export/proof.json").read_text())
    assert {"logits", "default inputs", "labels", "generation"} == found["comparisons"].keys()
    assert found["tokenizers"]["tokenizer"]["differing"] == 0
