"""Which implementation of attention `training.attention` chooses for a GPU, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import yaml
from support.commands import assert_refused, forked
from support.configs import tiny

from data_utils.common.errors import ConfigError
from data_utils.common.settings import merge
from megatron_lite.config.attention import (
    IMPLEMENTATIONS,
    LaunchType,
    choose,
    misfits,
    require_package,
    with_choice,
)
from megatron_lite.telemetry.reports import start_line
from megatron_lite.transformer import attention_choice
from megatron_lite.transformer.attention_choice import set_attention
from megatron_lite.transformer.kernels import varlen_kernels

FREE = "model.attention_dropout=0.0"
HEADS = ("model.hidden_size=256", "model.num_attention_heads=1")
WIDE = ("model.attention_dropout=0.1", *HEADS)
VOLTA, AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER = (7, 0), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Installs packages without modules, by the name of the setting."""

    def install(*names, version="4.0.0b18"):
        for name in names:
            package = IMPLEMENTATIONS[name].package.name
            folder = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
            folder.mkdir(exist_ok=True)
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


@pytest.mark.parametrize(
    ("capability", "settings", "packages", "chosen"),
    [
        (HOPPER, [FREE], ("fa3", "fa4"), "fa3"),
        (HOPPER, [FREE], ("fa4",), "fa2"),
        (HOPPER, [FREE], (), "fa2"),
        (HOPPER, ["model.attention_dropout=0.1"], ("fa3",), "fa2"),
        (HOPPER, [FREE, "training.precision=fp16"], ("fa3",), "fa3"),
        (HOPPER, [FREE, "training.precision=fp32"], ("fa3",), "torch"),
        (BLACKWELL, [FREE], ("fa3", "fa4"), "fa4"),
        (BLACKWELL, [FREE], ("fa3",), "fa2"),
        (CONSUMER, [FREE], ("fa3", "fa4"), "fa2"),
        (ADA, [FREE], ("fa3", "fa4"), "fa2"),
        (AMPERE, ["model.attention_dropout=0.1"], (), "fa2"),
        (VOLTA, ["training.precision=fp16"], ("fa3",), "torch"),
        (AMPERE, WIDE, (), "fa2"),
        (ADA, WIDE, (), "torch"),  # no backward pass of FlashAttention 2
        (CONSUMER, WIDE, (), "torch"),
        (ADA, [FREE, *HEADS], (), "fa2"),
    ],
)
def test_auto_chooses_by_gpu_dropout_and_packages(installed, capability, settings, packages, chosen):
    installed(*packages)
    config = tiny("training.precision=bf16", *settings)
    assert choose(config, capability).name == chosen
    assert with_choice(config, capability).training.attention == chosen


@pytest.mark.parametrize(
    ("capability", "settings", "packages", "said"),
    [
        (HOPPER, ["model.attention_dropout=0.1"], ("fa3",), "not fa3: model.attention_dropout is 0.1"),
        (HOPPER, [FREE], (), "not fa3: the package flash_attn_3 is not installed"),
        (BLACKWELL, [FREE], (), "not fa4: the package flash-attn-4 is not installed"),
        (AMPERE, [FREE], (), "compute capability 8.0"),
    ],
)
def test_the_reason_names_what_a_faster_one_lacks(installed, capability, settings, packages, said):
    installed(*packages)
    assert choose(tiny("training.precision=bf16", *settings), capability).why == said


@pytest.mark.parametrize(("version", "chosen"), [("4.0.0b4", "fa2"), ("4.0.0b5", "fa4"), ("4.0.0b19", "fa2")])
def test_a_version_that_torch_does_not_call_correctly_is_not_taken(installed, version, chosen):
    installed("fa4", version=version)
    assert choose(tiny("training.precision=bf16", FREE), BLACKWELL).name == chosen
    config = tiny("training.precision=bf16", FREE, "training.attention=fa4")
    if chosen == "fa4":
        require_package(config)
        return
    with pytest.raises(
        ConfigError, match=rf"flash-attn-4 has version {version}, .* to 4\.0\.0b18 correctly; pip install"
    ):
        require_package(config)


@pytest.mark.parametrize(
    ("name", "settings", "unfit"),
    [
        ("fa3", HEADS, []),
        ("fa3", (*HEADS, "training.deterministic=true"), ["hidden_size over num_attention_heads is 256"]),
        ("fa4", HEADS, ["hidden_size over num_attention_heads is 256"]),
        ("fa2", HEADS, []),
        ("torch", ("training.precision=fp32",), []),
        ("fa2", ("training.precision=fp32",), ["training.precision is fp32"]),
    ],
)
def test_limits_of_implementations(name, settings, unfit):
    found = misfits(name, tiny("training.precision=bf16", FREE, *settings))
    assert len(found) == len(unfit) and all(said in one for said, one in zip(unfit, found, strict=True))


@pytest.mark.parametrize(
    ("name", "capability"), [("fa3", BLACKWELL), ("fa3", AMPERE), ("fa4", AMPERE), ("fa2", VOLTA)]
)
def test_a_gpu_that_does_not_run_it_is_refused(name, capability):
    config = tiny("training.precision=fp16", FREE, f"training.attention={name}")
    with pytest.raises(
        ConfigError, match=rf"attention is {name}, but .* capability {capability[0]}\.{capability[1]};"
    ):
        choose(config, capability)
    assert choose(tiny("training.precision=fp16", "training.attention=torch"), capability).name == "torch"


UNFIT = {
    "head of no multiple": (AMPERE, ["model.hidden_size=80", "model.num_attention_heads=4"], "is 20"),
    "large head": (HOPPER, ["model.head_dim=264"], r"model\.head_dim is 264"),
    "window in fp32": (
        HOPPER,
        ["training.precision=fp32", "model.attention_window=4", "model.global_every=2"],
        "attention_window is 4|precision is fp32",
    ),
    "bf16 before Ampere": (VOLTA, [], "precision is bf16"),
    "head of ELECTRA's generator": (
        HOPPER,
        ["objectives={electra: 1}", "model.system=electra", "model.hidden_size=64", "data.sequence_length=64",
         "electra.generator_size=0.3125", "training.loss_normalization=per_objective"],
        r"electra\.generator_heads is 20",
    ),
    "head of cross-attention": (
        HOPPER,
        ["model.decoder_layers=2", "model.relative=buckets", "objectives={t5: 1}", "model.head_dim=20"],
        r"model\.head_dim is 20",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_auto_refuses_what_a_name_refuses(case):
    """Where no implementation takes the settings, `auto` is refused for the same reason as each by name."""
    capability, settings, reason = UNFIT[case]
    settings = ["training.precision=bf16", FREE, *settings]
    with pytest.raises(ConfigError, match=reason) as refused:
        choose(tiny(*settings), capability)
    assert "torch: " in str(refused.value)
    if "model.relative=buckets" not in settings:  # which no name takes
        for name in ("torch", "fa2"):
            with pytest.raises(ConfigError, match=reason):
                choose(tiny(*settings, f"training.attention={name}"), capability)


@pytest.mark.parametrize(("settings", "fits"), [([], False), (["training.kernels=torch"], True)])
def test_heads_of_the_kernels_for_relative_positions(settings, fits):
    config = tiny("training.precision=bf16", *HEADS, "model.relative=buckets", *settings)
    if fits:
        choose(config, HOPPER)
        return
    with pytest.raises(ConfigError, match=r"is 256 with model\.relative buckets, .* up to 128"):
        choose(config, HOPPER)


def test_all_conflicts_are_named_at_once():
    with pytest.raises(
        ConfigError, match=r"is fa3, but training\.precision is fp32, model\.attention_dropout is 0\.1;"
    ):
        tiny("training.attention=fa3", "training.precision=fp32", "model.attention_dropout=0.1")


def given(settings, tmp_path, **training):
    changed = {"training": {"precision": "bf16", **training}, "model": {"attention_dropout": 0.0}}
    path = tmp_path / "given.yaml"
    path.write_text(yaml.safe_dump(merge(settings, changed)))
    return str(path)


@pytest.mark.parametrize(("name", "package"), [("fa3", "flash_attn_3"), ("fa4", "flash-attn-4")])
def test_a_package_that_is_missing_is_named_before_torch_is_imported(settings, tmp_path, name, package):
    done = forked("pretrain_glm.py", "--config", given(settings, tmp_path, attention=name))
    assert_refused(done, f"whose package {package} is not installed")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["fa2", "torch"])
def test_a_cpu_has_no_implementation_to_choose(settings, tmp_path, name):
    done = forked("pretrain_glm.py", "--config", given(settings, tmp_path, attention=name))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"training.attention is {name}" in done.stderr and "set it to auto" in done.stderr


@pytest.mark.parametrize(
    ("gpu", "settings", "said"),
    [
        ("h100", ["model.attention_dropout=0.1"], "fa2 (not fa3: model.attention_dropout is 0.1)"),
        ("h100", [FREE], "fa2 (not fa3: the package flash_attn_3 is not installed)"),
        ("h100", [FREE, "training.attention=fa3"], "fa3 (as training.attention says)"),
        ("a100", ["model.relative=buckets"], "by kernels of this program (model.relative is buckets)"),
        (
            "a100",
            [
                "model.relative=buckets",
                "model.positions=none",
                "model.block_positions=added",
                "model.decoder_layers=2",
                "objectives={t5: 1}",
            ],
            "by kernels of this program (model.relative is buckets), the rest by fa2 (compute capability 8.0)",
        ),
    ],
)
def test_a_dry_run_names_the_implementation(gpu, settings, said):
    done = forked("pretrain_glm.py", "--config", "configs/tiny.yaml", "--dry-run", "1", "--gpu", gpu,
                  "model.vocab_size=128", "training.precision=bf16", *settings)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"attention         {said}" in done.stdout


def test_a_dry_run_refuses_what_the_gpu_does_not_run():
    done = forked("pretrain_glm.py", "--config", "configs/tiny.yaml", "--dry-run", "1", "--gpu", "a100",
                  "model.vocab_size=128", "training.precision=bf16", FREE, "training.attention=fa3")  # fmt: skip
    assert_refused(done, "this GPU has compute capability 8.0")


@pytest.fixture
def on_hopper(monkeypatch):
    """The context of a process on such a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    one = SimpleNamespace(size=1)
    return SimpleNamespace(device=torch.device("cuda"), pp=one, dp=one, tp=one)


def test_the_line_of_a_start_names_the_implementation(on_hopper, installed):
    config = tiny("training.precision=bf16", FREE, "model.vocab_size=128")
    assert "cuda, attention fa2 (not fa3: the package flash_attn_3 is" in start_line(config, on_hopper, 0)
    installed("fa3")
    assert "cuda, attention fa3 (compute capability 9.0) |" in start_line(config, on_hopper, 0)
    on_hopper.device = torch.device("cpu")
    assert "attention" not in start_line(config, on_hopper, 0)


@pytest.mark.parametrize("name", ["auto", "fa3", "fa4"])
def test_a_start_activates_the_implementation_by_torchs_switch(on_hopper, installed, monkeypatch, name):
    installed("fa3", "fa4")
    activated = []
    monkeypatch.setattr(varlen_kernels, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(varlen_kernels, "_implementation", "fa2")
    monkeypatch.setattr(attention_choice, "try_attention", lambda *given: activated.append(given[1:]))
    set_attention(tiny("training.precision=bf16", FREE, f"training.attention={name}"), on_hopper.device)
    assert activated == ["FA4" if name == "fa4" else "FA3", (torch.bfloat16, [LaunchType(16, 0, 0.0)])]
    assert varlen_kernels.attention_in_use() == activated[0].lower()


ELECTRA, T5 = UNFIT["head of ELECTRA's generator"][1][:-2], ["model.decoder_layers=2", "objectives={t5: 1}"]


@pytest.mark.parametrize(
    ("settings", "precision", "launched"),
    [
        (["model.attention_dropout=0.1"], "bf16", [(16, 0, 0.1)]),
        ([FREE], "fp32", [(16, 0, 0.0)]),
        ([FREE, "model.attention_window=4", "model.global_every=2"], "fp16", [(16, 0, 0.0), (16, 4, 0.0)]),
        (
            [FREE, *ELECTRA, "electra.generator_size=0.5", "training.loss_normalization=per_objective"],
            "bf16",
            [(16, 0, 0.0), (32, 0, 0.0)],
        ),
        ([FREE, *T5, "model.relative=buckets"], "bf16", [(16, 0, 0.0)]),
        ([FREE, "model.relative=buckets"], "bf16", []),
    ],
)
def test_a_start_tries_what_the_run_will_launch(on_hopper, monkeypatch, settings, precision, launched):
    tried = []
    monkeypatch.setattr(attention_choice, "use_attention", lambda name: None)
    monkeypatch.setattr(attention_choice, "try_attention", lambda *given: tried.append(given[1:]))
    set_attention(tiny(f"training.precision={precision}", *settings), on_hopper.device)
    types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    assert tried == [(types[precision], [LaunchType(*each) for each in launched])]
