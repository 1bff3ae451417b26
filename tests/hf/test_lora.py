"""LoRA is peft's on the class of transformers: gradients, steps, files in both directions, merged weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
import yaml
from peft import (
    AutoPeftModelForSequenceClassification,
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from support.commands import assert_refused, forked
from support.data.tokenizer_files import write_bert
from support.distributed import run_ranks
from support.hf.class_losses import class_loss, trained_losses
from support.hf.class_training import CASES, LR, TREE, batches_of, write_directory
from support.hf.hf_runs import WORDPIECE, write_run
from support.hf.hf_runs import tree as glm_tree
from support.hf.published import random_model
from support.tasks.tasks import WORDS, write_task
from support.training.whole_weights import load_weights
from transformers import BertForSequenceClassification, ElectraForSequenceClassification

from data_utils.common.batch_fields import WEIGHTS
from data_utils.common.errors import CheckpointError
from data_utils.common.setting_files import load_yaml
from data_utils.common.settings import build, merge, to_tree
from data_utils.objectives import LOSSES
from megatron_lite.checkpoint.manifest import checkpoint_name, list_checkpoints
from megatron_lite.checkpoint.read import load_checkpoint
from megatron_lite.checkpoint.trainer_state import TrainerState
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.checkpoint.write import save_checkpoint
from megatron_lite.config.lora import class_layers
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.systems import SYSTEMS
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.hf.adapters import import_adapter
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.glm.modeling_glm import GLMForBlankInfilling
from megatron_lite.hf.importing import import_directory
from megatron_lite.hf.published.systems import SYSTEMS_BY_NAME
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.flops import parameter_shapes

# Targets by peft's rules, in the class's names: single modules of our fused ones, and modules of several kinds.
TARGETS = {
    "glm": ["query_key_value", "dense_4h_to_h"],
    "bert": ["query", "value", "intermediate.dense", "output.dense"],
    "gpt2": ["c_attn", "mlp.c_proj"],
    "llama": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    "t5": ["q", "v", "wo"],
    "bart": ["k_proj", "out_proj", "fc1"],
    "modernbert": ["Wqkv", "Wi", "Wo"],
    "deberta_v3": ["query_proj", "key_proj", "attention.output.dense"],
    "xlnet": ["layer_1", "layer_2"],
    "qwen3": ["q_proj", "k_proj", "gate_proj"],
    "glm4": ["k_proj", "gate_up_proj"],
    "albert": ["query", "ffn", "attention.dense"],
    "xlm_roberta": ["key", "attention.output.dense"],
    "t5_1_1": ["k", "o", "wi_0", "wo"],
    "modernbert_decoder": ["q_proj", "v_proj", "Wi"],
}
TOLERANCE = 1e-5


def begin(case, directory):
    """A model's directory and its run, and an adapter of peft whose B is not zero, so that A has gradients at once."""
    original, base, adapter = (directory / name for name in ("original", "base", "adapter"))
    if case == "glm":
        write_bert(directory, [*WORDPIECE, *(f"another{i}" for i in range(330))])
        write_run(base, merge(glm_tree(directory / "vocab.txt"), of_glm()))
        export_run(base, original, ExportOptions(verify=False))
    else:
        write_directory(case, original)
        import_directory(original, base, TREE | CASES[case], verify=False)
    adapted = get_peft_model(class_model(case, original), lora_config(case))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    adapted.save_pretrained(adapter)
    return original, base, adapter


def of_glm():
    return {**TREE, "data": {"sequence_length": 40}, "objectives": {"blank_infilling": 1}}


def lora_config(case):
    return LoraConfig(r=3, lora_alpha=5, target_modules=TARGETS[case], use_rslora=case == "llama")


def class_model(case, directory):
    if case == "glm":
        return GLMForBlankInfilling.from_pretrained(directory).eval()
    described = json.loads((directory / "config.json").read_text())
    return getattr(transformers, described["architectures"][0]).from_pretrained(directory).eval()


def train(context, run, batches, steps):
    """Losses, and the gradients of the first step by name; the state after the last one is the run's checkpoint."""
    parallel = {"tensor_parallel_size": context.tp.size}
    config = build(Config, load_yaml(run / "config.yaml") | {"parallel": parallel})
    engine = make_engine(config, context, len(LOSSES))
    load_checkpoint(read_checkpoint(run / "checkpoints" / checkpoint_name(0)), engine, context)
    losses, gradients = [], {}

    def observe(fragment, gradient):
        assert gradient.numel() == torch.Size(fragment.shape).numel()
        gradients[fragment.name] = gradient.view(fragment.shape).clone()

    for step, fields in enumerate(batches[:steps]):
        factor = 1.0 / np.count_nonzero(fields[:, WEIGHTS])
        prepared = [engine.prepared(Batch(fields), step, factor)]
        if step == 0:
            with engine.observed_gradients(observe):
                result = engine.train_step(prepared, LR)
        else:
            result = engine.train_step(prepared, LR)
        losses.append(float(result.objective_sums[:, 0].sum()) * factor)
    state = TrainerState.at_step_0(to_tree(config)).to_json()
    save_checkpoint(run / "checkpoints", steps, engine, state | {"step": steps}, context)
    return losses, gradients


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        *(("glm", 1), ("llama", 2)),
        *(
            pytest.param(case, ranks, marks=pytest.mark.slow)
            for case, ranks in (
                *(("bert", 1), ("gpt2", 1), ("t5", 1)),
                *(("bart", 2), ("modernbert", 1), ("deberta_v3", 2), ("xlnet", 1), ("qwen3", 1), ("glm4", 2)),
                *(("xlm_roberta", 1), ("albert", 1), ("t5_1_1", 1), ("modernbert_decoder", 2)),
            )
        ),
    ],
)
def test_training_and_files_are_pefts(case, ranks, tmp_path):
    original, base, adapter = begin(case, tmp_path)
    run = tmp_path / "run"
    # So much decay that weights without it are beyond the tolerance of the files: A shrinks by 2 %.
    optimizer = TREE["optimizer"] | {"weight_decay": 1.0}
    import_adapter(adapter, base, run, {"optimizer": optimizer})
    batches = batches_of(base)[:12]
    layout = ParallelConfig(tensor_parallel_size=ranks)
    losses, gradients = run_ranks(train, ranks, run, batches, len(batches), parallel=layout)[0]

    adapted = PeftModel.from_pretrained(class_model(case, original), adapter, is_trainable=True)
    model = adapted.get_base_model()
    class_loss(model, batches[0]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), TREE["optimizer"]["clip_grad_norm"])
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(expected) and all(".lora." in name for name in gradients)
    if ranks == 1:
        ours = sorted(float(gradient.norm()) for gradient in gradients.values())
        np.testing.assert_allclose(
            ours, sorted(float(g.norm()) for g in expected.values()), rtol=TOLERANCE, atol=1e-7
        )
    model.zero_grad()
    np.testing.assert_allclose(losses, trained_losses(model, batches, LR, **optimizer), rtol=TOLERANCE)

    export_run(run, tmp_path / "trained", ExportOptions(adapter=True))
    written, theirs = (
        load_file(tmp_path / "trained/adapter_model.safetensors"),
        get_peft_model_state_dict(adapted),
    )
    assert written.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(written[name], tensor, rtol=1e-3, atol=1e-4, msg=name)

    # peft reads what is written here, and merges it to the same bits.
    export_run(run, tmp_path / "merged", ExportOptions())
    again = PeftModel.from_pretrained(class_model(case, original), tmp_path / "trained")
    assert get_peft_model_state_dict(again).keys() == written.keys()
    merged = again.merge_and_unload().state_dict()
    exported = class_model(case, tmp_path / "merged").state_dict()
    assert exported.keys() == merged.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in merged.items())
    export_run(run, tmp_path / "rounded", ExportOptions(dtype="bf16"))
    rounded = class_model(case, tmp_path / "rounded").float().state_dict()
    assert all(torch.equal(rounded[name], tensor.bfloat16().float()) for name, tensor in merged.items())
    begun = class_model(case, original).state_dict()
    assert not all(torch.equal(exported[name], begun[name]) for name in begun)


def test_the_model_under_an_adapter_is_named_only_as_it_was_published(tmp_path):
    """Not once the base was trained: its first weights are others than those that the adapter is for."""
    _, base, adapter = begin("bert", tmp_path)
    (base / "source.json").write_text(json.dumps({"repository": "org/model", "commit": "c" * 40}))
    trained = shutil.copytree(base, tmp_path / "trained")
    config = load_yaml(trained / "config.yaml") | {"checkpoint": {"initialize_from": str(base)}}
    (trained / "config.yaml").write_text(yaml.safe_dump(config))
    run_ranks(train, 1, trained, batches_of(base), 1)
    for directory, name in ((base, "org/model"), (trained, None)):
        import_adapter(adapter, directory, tmp_path / f"{directory.name}-run", {})
        export_run(
            tmp_path / f"{directory.name}-run",
            tmp_path / f"{directory.name}-out",
            ExportOptions(adapter=True),
        )
        described = json.loads((tmp_path / f"{directory.name}-out/adapter_config.json").read_text())
        assert described["base_model_name_or_path"] == name


def both_names(tensors):
    """As of a class with a head and of its body."""
    return tensors | {
        name.replace("model.model.model.", "model.model."): x + 1 for name, x in tensors.items()
    }


HOSTILE = {
    "base_model.model.\x1b[31mred\n": torch.zeros(1),
    "base_model.model.model.embed_tokens.weight": torch.zeros(1),
}
LAYER = "base_model.model.model.layers.0."


def without_first(tensors):
    return {name: x for name, x in tensors.items() if not name.startswith(LAYER)}


def with_update_of_head(tensors):
    """As peft's all-linear on a class whose head has layers."""
    return tensors | {f"base_model.model.dense.lora_{end}.weight": torch.zeros(2, 2) for end in "AB"}


REFUSED = [
    ({"exclude_modules": "model.layers.0.*"}, without_first,
     r"updates of some layers only, none of layers\.0\..*merge_and_unload"),
    ({}, with_update_of_head, r"has dense\.lora_A\.weight.*peft's all-linear.*merge_and_unload"),
    ({"peft_type": "PROMPT_TUNING"}, {}, "no change of weights, so that it can be neither imported nor merged"),
    ({"layers_to_transform": [0], "use_dora": True}, {}, "layers_to_transform is .*use_dora is True;"),
    ({"r": 2.5}, {}, r"adapter_config\.json: model\.lora\.rank"),
    ({"use_rslora": 2}, {}, r"adapter_config\.json: model\.lora\.rank_stabilized"),
    ({"lora_alpha": 0}, {}, r"adapter_config\.json: model\.lora\.alpha"),
    (
        {},
        lambda tensors: tensors | HOSTILE,
        r"x1b\[31mred, model\.embed_tokens\.weight, but.*embeddings, norms",
    ),
    ({}, both_names, "under two names"),
    ({}, lambda tensors: {name: x.flatten() for name, x in tensors.items()}, "has shape"),
    ({}, lambda tensors: {name: x * torch.nan for name, x in tensors.items()}, "not finite"),
]  # fmt: skip


def test_adapters_that_peft_or_a_stranger_may_write(tmp_path):
    """What is plain LoRA is taken whatever its options; all else is one line that names it, and leaves nothing."""
    original, base, _ = begin("llama", tmp_path)
    options = {"target_modules": "all-linear", "init_lora_weights": "gaussian", "fan_in_fan_out": True}
    with pytest.warns(UserWarning, match="fan_in_fan_out"):
        adapted = get_peft_model(class_model("llama", original), LoraConfig(r=2, **options))
    adapted.save_pretrained(tmp_path / "plain")
    written = load_file(tmp_path / "plain/adapter_model.safetensors")
    save_file(
        {name: x.bfloat16() for name, x in written.items()}, tmp_path / "plain/adapter_model.safetensors"
    )
    import_adapter(tmp_path / "plain", base, tmp_path / "run", {})
    export_run(tmp_path / "run", tmp_path / "again", ExportOptions(adapter=True))
    again = load_file(tmp_path / "again/adapter_model.safetensors")
    assert again.keys() == written.keys()
    assert all(torch.equal(again[name], x.bfloat16().float()) for name, x in written.items())

    described = json.loads((tmp_path / "plain/adapter_config.json").read_text())
    for number, (fields, change, message) in enumerate(REFUSED):
        changed = tmp_path / f"changed{number}"
        changed.mkdir()
        (changed / "adapter_config.json").write_text(json.dumps(described | fields))
        save_file(change(written) if change else written, changed / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=message) as error:
            import_adapter(changed, base, tmp_path / "refused", {})
        assert str(error.value).isprintable()
    assert not (tmp_path / "refused").exists()


CONVERT, TUNE = "scripts/convert_checkpoint.py", "scripts/finetune.py"


def done(script, *arguments):
    result = forked(script, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def opens_by_itself(adapter, merged):
    """By the class of peft alone, which finds the base model."""
    opened = AutoPeftModelForSequenceClassification.from_pretrained(adapter).eval()
    whole = BertForSequenceClassification.from_pretrained(merged).eval()
    ids = torch.arange(12)[None]
    assert torch.allclose(opened(ids).logits, whole(ids).logits, atol=1e-6)


def test_a_tuned_classifier_goes_to_peft_and_comes_back(tmp_path):
    original = tmp_path / "bert"
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    write_bert(original, names)
    random_model("bert", std=0.05, vocab_size=len(names)).save_pretrained(original)
    _, task = write_task(tmp_path / "task", train=32)
    updates = ["finetune.trained=lora", "model.lora={rank: 4, targets: [query, value, mlp.dense_4h_to_h]}"]
    settings = ["objectives={masked_lm: 1}", "data.sequence_length=64", "training.precision=fp32"]
    begin = ["--checkpoint", original, "--task", task, "--output", tmp_path / "out", "finetune.epochs=1"]
    said = done(TUNE, *begin, *settings, *updates)
    assert "trained: " in said and all(len(line) < 600 for line in said.splitlines())
    assert "20 new parameters, with initial weights: heads.task.classifier.bias, " in said
    tuned = tmp_path / "out/seed_1234"
    (tmp_path / "out/imported/source.json").write_text(json.dumps({"repository": str(original)}))
    done(CONVERT, "export", "--checkpoint", tuned, "--output", tmp_path / "merged")
    alone = done(CONVERT, "export", "--checkpoint", tuned, "--output", tmp_path / "adapter", "--adapter")
    assert "not verified: updates of LoRA compute nothing alone; " in alone

    described = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert described["modules_to_save"] == ["classifier"] and described["r"] == 4
    model = BertForSequenceClassification.from_pretrained(original, num_labels=2)
    adapted = PeftModel.from_pretrained(model, tmp_path / "adapter")
    written = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert get_peft_model_state_dict(adapted).keys() == written.keys()
    assert sum(".lora_" in name for name in written) == 3 * 3 * 2
    exported = BertForSequenceClassification.from_pretrained(tmp_path / "merged").state_dict()
    merged = adapted.merge_and_unload().state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in merged.items())
    opens_by_itself(tmp_path / "adapter", tmp_path / "merged")

    done(CONVERT, "import", "--input", tmp_path / "merged", "--output", tmp_path / "whole", *settings[:2])
    again = ["import", "--input", tmp_path / "adapter", "--output", tmp_path / "again", "--base"]
    done(CONVERT, *again, tmp_path / "whole")
    found, expected = (
        load_weights(read_checkpoint(list_checkpoints(directory)[-1]))
        for directory in (tmp_path / "again/checkpoints", tuned / "checkpoints")
    )
    same = [name for name in expected if ".lora." in name or name.startswith("heads.task.")]
    assert len(same) == 3 * 3 * 2 + 2 and all(torch.equal(found[name], expected[name]) for name in same)

    shutil.rmtree(tmp_path / "again")
    assert_refused(forked(CONVERT, *again[:-1]), "pass --base RUN")
    assert_refused(forked(CONVERT, *again, tuned), "has updates of LoRA itself")
    assert_refused(forked(CONVERT, *again, tmp_path / "out/imported"), "classifier")  # no head
    for name, value in (("use_dora", True), ("rank_pattern", {"query": 2}), ("peft_type", "LOHA")):
        changed = shutil.copytree(tmp_path / "adapter", tmp_path / name)
        (changed / "adapter_config.json").write_text(json.dumps(described | {name: value}))
        here = ["import", "--input", changed, "--output", tmp_path / "again", "--base", tmp_path / "whole"]
        assert_refused(forked(CONVERT, *here), f"{name} is")
    fewer = {name: tensor for name, tensor in written.items() if "layer.1." not in name}
    save_file(fewer, tmp_path / "use_dora/adapter_model.safetensors")
    (tmp_path / "use_dora/adapter_config.json").write_text(json.dumps(described))
    here = ["import", "--input", tmp_path / "use_dora", "--output", tmp_path / "again", "--base"]
    assert_refused(
        forked(CONVERT, *here, tmp_path / "whole"), "updates of some layers only, none of layers.1."
    )
    assert not (tmp_path / "again").exists()
    tune = ["--checkpoint", tuned, "--task", task, "--output", tmp_path / "more", "model.lora=null"]
    assert_refused(forked(TUNE, *tune), "has updates of LoRA, but model.lora is null")
    assert_refused(forked(TUNE, *tune[:-1]), "finetune.trained is all with model.lora")
    done(TUNE, *tune[:-1], "finetune.trained=lora", "finetune.epochs=1")  # the same updates, trained further
    # As older versions of peft wrote it, and of the class without a head, whose names have no prefix.
    of_body = {name.replace("model.bert.", "model."): tensor for name, tensor in written.items()}
    torch.save(of_body, changed / "adapter_model.bin")
    (changed / "adapter_model.safetensors").unlink()
    (changed / "adapter_config.json").write_text(json.dumps(described))
    done(
        CONVERT, "import", "--input", changed, "--output", tmp_path / "pickled", "--base", tmp_path / "whole"
    )
    pickled = load_weights(read_checkpoint(list_checkpoints(tmp_path / "pickled/checkpoints")[-1]))
    assert all(torch.equal(pickled[name], expected[name]) for name in same)
    plain = ["export", "--checkpoint", tmp_path / "whole", "--output", tmp_path / "again", "--adapter"]
    assert_refused(forked(CONVERT, *plain), "has no updates of LoRA")


@pytest.mark.slow
def test_a_head_of_two_layers_is_saved_whole(tmp_path):
    """ELECTRA's, as RoBERTa's: both modules are of peft's `modules_to_save`."""
    original = tmp_path / "electra"
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    write_bert(original, names)
    random_model("electra_generator", std=0.05, vocab_size=len(names)).save_pretrained(original)
    _, task = write_task(tmp_path / "task", train=32)
    begin = ["--checkpoint", original, "--task", task, "--output", tmp_path / "out", "finetune.epochs=1"]
    settings = ["objectives={masked_lm: 1}", "data.sequence_length=64", "training.precision=fp32"]
    updates = ["finetune.trained=lora", "model.lora.rank=4", "model.task_head.pooler=true"]
    done(TUNE, *begin, *settings, *updates)
    for name, options in (("merged", []), ("adapter", ["--adapter"])):
        tuned = ["--checkpoint", tmp_path / "out", "--output", tmp_path / name]
        done(CONVERT, "export", *tuned, *options)
    described = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert described["modules_to_save"] == ["classifier"]
    model = ElectraForSequenceClassification.from_pretrained(original, num_labels=2)
    adapted = PeftModel.from_pretrained(model, tmp_path / "adapter")
    exported = ElectraForSequenceClassification.from_pretrained(tmp_path / "merged").state_dict()
    merged = adapted.merge_and_unload().state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in merged.items())


@pytest.mark.parametrize("name", [name for name, preset in SYSTEMS.items() if "experts" not in preset])
def test_names_of_targets_are_those_of_the_tables(name):
    """config/lora.py repeats them; and every linear layer of a block is in it, but for attention of XLNet."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 100}
    decoder = {"decoder_layers": 1} if name in ("bart", "mass", "t5", "t5_1_1", "mt5") else {}
    heads = {"num_key_value_heads": 2} if name == "mistral" else {}
    positions = {"position_projections": True} if name == "deberta_v3" else {}
    tree = {"system": name, **sizes, **decoder, **heads, **positions, "lora": {"rank": 2}}
    model = build(ModelConfig, tree, "model.")
    layers, shapes = class_layers(model), parameter_shapes(model)
    named = {ours.rpartition(".lora.")[0] for ours in shapes if ".lora." in ours}
    blocks = {f"{prefix}.{ours}" for ours in layers for prefix in ("layers.0", "layers.2")}
    assert {path for path in blocks if f"{path}.weight" in shapes} == {
        path for path in named if path.startswith(("layers.0.", "layers.2."))
    }
    matrices = {
        module
        for ours, shape in parameter_shapes(replace(model, lora=None)).items()
        if ours.startswith("layers.") and len(shape) == 2
        for module in [ours.split(".", 2)[2].removesuffix(".weight")]
    }
    absent = {"attention.query_key_value", "attention.dense"} if name == "xlnet" else set()
    assert layers.keys() == {m for m in matrices if "relative" not in m} - absent
    for ours, theirs in layers.items() if name in SYSTEMS_BY_NAME else ():
        rules = [rule for rule in SYSTEMS_BY_NAME[name].rules if rule.ours.endswith(f"}}.{ours}")]
        rules = [rule for rule in rules if rule.ffn in (None, model.ffn)]
        assert rules
        for rule in rules:
            assert len(rule.theirs) == len(theirs)
            assert all(full.endswith(f".{end}") for full, end in zip(rule.theirs, theirs, strict=True))
