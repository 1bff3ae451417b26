"""Configurations by size, and the project's by their names, from any directory."""

from __future__ import annotations

import dataclasses
import re

import pytest
import yaml
from support.commands import forked
from support.configs import TINY
from support.project import ROOT

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import load_yaml
from megatron_lite.config.tree import load_config
from megatron_lite.estimate.average_sequence import average_sequence
from megatron_lite.estimate.gpus import GPUS
from megatron_lite.estimate.step_estimate import RESERVED_GIB, estimate
from megatron_lite.transformer.flops import parameter_count

# Layers, hidden size, heads, tokens of the vocabulary that the file's comment assumes, parameters.
PRESETS = {
    "tiny": (2, 128, 2, 2048, 658_944),
    "mini": (6, 256, 4, 8192, 6_836_224),
    "laptop": (8, 256, 4, 8192, 8_524_032),
    "small": (8, 512, 8, 32_000, 41_604_096),
    "medium": (12, 768, 12, 32_000, 109_632_000),
}


def preset(name):
    return load_config([name], [f"model.vocab_size={PRESETS[name][3]}"])


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_its_size_and_the_recipe_of_small_models(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = preset(name)
    later = config.phases[-1].objective_settings.get("blank_infilling", {}) if config.phases else {}
    model, spans = config.model, dataclasses.replace(config.objective_sections["blank_infilling"], **later)
    sizes = model.num_layers, model.hidden_size, model.num_attention_heads
    assert (*sizes, model.vocab_size, parameter_count(model)) == PRESETS[name]
    assert (model.positions, model.block_positions) == ("rotary", "halves")
    assert spans.whole_words and spans.single_span_prob > 0 and spans.token_prob + spans.sentence_prob < 1
    assert model.max_position >= config.data.sequence_length and config.data.validation
    # 4e-3 at width 128, in proportion to 1 / width; the laptop's was measured (docs/learning.md).
    width = 128 if name == "laptop" else model.hidden_size
    assert config.optimizer.lr == pytest.approx(4e-3 * 128 / width, rel=0.01)


@pytest.mark.parametrize("name", ["mini", "small", "medium"])
def test_a_preset_needs_what_it_says(name):
    """FLOPs, tokens of text, and of a GPU memory and minutes."""
    text = (ROOT / f"configs/{name}.yaml").read_text(encoding="utf-8")
    words = " ".join(text.replace("# ", "").split())
    config = preset(name)
    found, steps = estimate(config, 1, GPUS["h100"], average_sequence(config)), config.training.steps
    flops = float(re.search(r"The run is ([\d.e]+) FLOPs", words)[1])
    assert steps * found.flops == pytest.approx(flops, rel=0.06)
    number, scale, each = re.search(
        r"# ([\d.]+) (million|billion) tokens of text, (\d+) for each", text
    ).groups()
    tokens = steps * config.batch.global_batch_size * config.data.sequence_length
    assert float(number) * {"million": 1e6, "billion": 1e9}[scale] == pytest.approx(tokens, rel=0.06)
    assert tokens / parameter_count(config.model) == pytest.approx(float(each), rel=0.06)
    if name != "mini":
        said = re.search(r"([\d.]+) GiB at the peak, for a GPU of (\d+) GiB; (\d+) minutes of an H100", words)
        gib, room, minutes = map(float, said.groups())
        assert found.peak_gib == pytest.approx(gib, rel=0.03) and gib + RESERVED_GIB < room
        assert steps * found.step_ms / 60e3 == pytest.approx(minutes, rel=0.06)


def test_a_dry_run_takes_a_name_from_any_directory(tmp_path):
    vocabulary = f"model.vocab_size={PRESETS['small'][3]}"
    done = forked("pretrain_glm.py", "--config", "small", vocabulary, "--dry-run", 1, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and f"{PRESETS['small'][4]:,}" in done.stdout


def test_what_is_at_the_path_comes_before_a_name(tmp_path, monkeypatch):
    """A directory is no configuration, so it hides none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    assert load_yaml("small")["run"]["directory"] == "runs/small"
    (tmp_path / "medium").write_text("run: {directory: mine}\n")
    assert load_yaml("medium") == {"run": {"directory": "mine"}}
    with pytest.raises(ConfigError, match="Is a directory; check the path"):
        load_yaml(tmp_path)


def test_a_task_has_a_name_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_yaml("rte", "tasks")["task"]["name"] == "rte"


@pytest.mark.parametrize(
    ("folder", "wrong", "near"),
    [
        ("", "smal", "small"),
        ("", "configs/smal.yaml", "small"),
        ("tasks", "rtee", "rte"),
        ("", "x" * 5000, ""),
    ],
)
def test_a_wrong_name_shows_the_nearest(folder, wrong, near, tmp_path, monkeypatch):
    """Not all of the many names, in which nobody finds the right one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match="No such file or directory; check the path, or give the name of"
    ) as caught:
        load_yaml(wrong, folder)
    assert f"configs/{folder}" in str(caught.value) and len(str(caught.value)) < 400
    assert not near or f"such as {near}" in str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_first_steps_of_every_recipe_are_tried_by_one_setting(path):
    """training.steps=30 where the rate has a warmup; a plan in phases or parts says which setting it is instead."""
    notes: list[str] = []
    try:
        config = load_config([path], ["training.steps=30"], say=notes.append)
    except ConfigError as error:
        (setting,) = re.findall(r"training\.stop_after_step=30", str(error))
        assert load_config([path], [setting]).training.stop_after_step == 30
        return
    written = load_config([path])
    warmup, decay = written.schedule.warmup_steps, written.schedule.decay_steps
    is_scaled = decay is None and warmup >= 30
    assert config.schedule.warmup_steps == (warmup * 30 // written.training.steps if is_scaled else warmup)
    assert len(notes) == is_scaled and all(f"{warmup:,}" in note for note in notes)


def test_a_warm_up_that_is_given_stays():
    roberta = ROOT / "configs/roberta-large.yaml"
    own = load_config([roberta], ["training.steps=30", "schedule.warmup_steps=7"])
    assert own.schedule.warmup_steps == 7
    with pytest.raises(ConfigError, match="warmup_steps \\(31\\)"):
        load_config([roberta], ["training.steps=30", "schedule.warmup_steps=31"])


# A system that is given alone -> its paper's objective, a setting of its section, and how the losses are divided.
OBJECTIVES = {
    "glm": ("blank_infilling", {}, "global_tokens"),
    "modernbert": ("masked_lm", {"masked_ratio": 0.3, "next_sentence": False}, "global_tokens"),
    "bert": ("masked_lm", {"masked_ratio": 0.15, "next_sentence": True}, "per_objective"),
    "albert": ("albert", {"sentence_order": True}, "per_objective"),
    "spanbert": ("spanbert", {}, "global_tokens"),
    "xlnet": ("xlnet", {}, "global_tokens"),
    "llama": ("causal", {}, "global_tokens"),
    "glm4": ("causal", {}, "global_tokens"),
    "t5_1_1": ("t5", {}, "global_tokens"),
    "bart": ("bart", {"predict_cls": True}, "global_tokens"),
}


def read(directory, *overrides):
    """The smallest complete file, with overrides, as the commands read it."""
    path = directory / "base.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return load_config([path], ["data.sequence_length=64", *overrides])


@pytest.mark.parametrize("system", OBJECTIVES)
def test_a_system_alone_is_trained_on_its_own_objective(system, tmp_path):
    name, section, normalization = OBJECTIVES[system]
    decoder = ["model.decoder_layers=2"] if name in ("t5", "bart") else []
    config = read(tmp_path, f"model.system={system}", *decoder)
    assert [choice.name for choice in config.objective_choices] == [name]
    assert {key: getattr(config.objective_sections[name], key) for key in section} == section
    assert config.training.loss_normalization == normalization


@pytest.mark.parametrize(
    ("system", "others", "form"),
    [
        (None, [], "glm"),
        (None, ["objectives.masked_lm=0"], "bert"),
        (None, ["objectives.causal=1"], "causal"),
        ("modernbert", [], "bert"),
        ("t5_1_1", [], "t5"),
        ("xlnet", [], "xlnet"),
        ("llama", [], "causal"),
        ("llama", ["objectives.causal=1", "causal.begin=cls"], "causal_cls"),
        ("qwen2", ["objectives.causal=1", "causal.begin=none"], "causal_none"),
        ("glm4", ["objectives.blank_infilling=0"], "glm"),
    ],
)
def test_text_pairs_are_written_as_the_model_reads_a_text(system, others, form, tmp_path):
    chosen = ["objectives={contrastive: 1}", *others, *([f"model.system={system}"] if system else [])]
    chosen += ["model.decoder_layers=2"] if form == "t5" else []
    if "objectives.causal=1" in others:
        chosen.append("data.train=[{prefix: pairs, objective: contrastive}, {prefix: text}]")
    assert read(tmp_path, *chosen).objective_sections["contrastive"].form == form
    assert (
        read(tmp_path, *chosen, "contrastive.form=prefix").objective_sections["contrastive"].form == "prefix"
    )


def test_an_objective_that_is_given_has_precedence_unless_the_class_cannot_mean_it(tmp_path):
    config = read(tmp_path, "model.system=llama", "objectives={masked_diffusion: 1}")
    assert config.objectives == {"masked_diffusion": 1}
    for system, objective in (("modernbert", "blank_infilling"), ("bert", "t5"), ("llama", "xlnet")):
        with pytest.raises(ConfigError, match=f"objectives has {objective}, but .* {system} "):
            read(tmp_path, f"model.system={system}", f"objectives.{objective}=1")
