"""What a user of an export computes, with the version of transformers that the process finds and nothing of ours.

    python answers_of_exports.py ROOT OUTPUT DIRECTORY...

Each DIRECTORY, below ROOT, is loaded by the class that its config.json names. OUTPUT.npz gets what it computes, and
OUTPUT.json all else: tokens, warnings, and the error of what failed.
"""

import importlib.util
import json
import logging
import shutil
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.utils import logging as transformers_logging

LENGTH, STEPS = 40, 6
TEXTS = [
    "The quick brown fox jumps over the lazy dog.", "  Two spaces,\ta tab\nand  a newline ", "naïve café CAFÉ Größe İ",
    "it's 1999, isn't it? They're here...", "今天天气很好。 Привет 🙂", "", "a", " lead", "x[MASK]y <mask> </s> [SEP]",
    "``quoted'' (brackets) #tag @x 1,234.5", "THE QUICK FOX", "e\u0301 \u00a0 \u3000 ﬁ ½",
]  # fmt: skip


class _Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def class_of(described):
    """The class that users take, by the auto map of a directory with code of its own, or by its name."""
    (name,) = described["architectures"]
    for auto, where in described.get("auto_map", {}).items():
        if where.endswith(f".{name}"):
            return getattr(transformers, auto), {"trust_remote_code": True}
    return getattr(transformers, name), {}


def inputs_of(model):
    """Random tokens in two rows, the second with padding at its end, and what else the class takes."""
    config = model.config
    generator = torch.Generator().manual_seed(1)
    longest = min(
        LENGTH,
        LENGTH,
        *(
            n
            for n in (getattr(config, "max_position_embeddings", 0), getattr(config, "n_positions", 0))
            if n > 0
        ),
    )
    pad, size = getattr(config, "pad_token_id", None), config.vocab_size
    if config.model_type in ("roberta", "xlm-roberta", "camembert", "bart"):
        longest = min(longest, LENGTH - 4)
    ids = torch.randint(5, size, (2, longest), generator=generator)
    ids[ids == (-1 if pad is None else pad)] = 4 if pad != 4 else 5
    mask = torch.ones_like(ids)
    mask[1, -7:] = 0
    ids[1, -7:] = 0 if pad is None else pad
    inputs = {"input_ids": ids, "attention_mask": mask}
    if getattr(config, "type_vocab_size", 0) > 1 or config.model_type == "xlnet":
        inputs["token_type_ids"] = (torch.arange(longest) > longest // 2).long().expand(2, -1).clone()
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :9].flip(1).clone()
    return inputs


def tensors_of(outputs, inputs, prefix):
    """Without the rows of padding, in which a class may put anything."""
    found, mask = {}, inputs["attention_mask"].bool()
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and "encoder_" not in name:
            rows = value[mask] if value.shape[:2] == mask.shape else value
            found[f"{prefix}/{name}"] = rows.float().numpy()
    return found


def _is_writer(model, described):
    """T5's own `generate` fails where the decoder has more layers than the encoder."""
    (name,) = described["architectures"]
    is_deeper = described.get("num_decoder_layers", 0) > described.get("num_layers", 0)
    return not is_deeper and name.endswith(
        ("CausalLM", "LMHeadModel", "ConditionalGeneration", "ForBlankInfilling")
    )


def computed(directory, described, prefix):
    """Logits, loss and generation. Returns: arrays, and what loading reports."""
    cls, options = class_of(described)
    model, loading = cls.from_pretrained(directory, output_loading_info=True, **options)
    model.eval()
    facts = {
        kind: sorted(map(str, loading[kind]))
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    facts["dtype"] = str(model.dtype)
    inputs, is_glm = inputs_of(model), described["model_type"].startswith("glm-blank")
    found = tensors_of(model(**inputs), inputs, f"{prefix}/logits")
    if _is_writer(model, described) and not is_glm:
        key = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
        given = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
        found[f"{prefix}/loss"] = model(**given, labels=inputs[key]).loss.float().numpy()
        # XLNet's `generate` adds a token of its own, without a segment.
        prompt = {name: value[:1, :11] for name, value in given.items() if name != "token_type_ids"}
        written = model.generate(**prompt, max_new_tokens=STEPS, do_sample=False, num_beams=1)
        found[f"{prefix}/generated"] = written.numpy()
        beams = model.generate(**prompt, max_new_tokens=STEPS, do_sample=False, num_beams=3)
        found[f"{prefix}/beams"] = beams.numpy()
    with tempfile.TemporaryDirectory() as again:
        model.save_pretrained(again)
        if is_glm:
            for file in directory.glob("*.py"):
                shutil.copyfile(file, Path(again) / file.name)
        more = cls.from_pretrained(again, **options).eval()
        answers = tensors_of(more(**inputs), inputs, f"{prefix}/logits")
        facts["comes back"] = all(np.array_equal(value, found[name]) for name, value in answers.items())
    return found, facts


def filled(directory, texts):
    """What GLM's own classes write into blanks."""
    options = {"trust_remote_code": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **options)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory, **options).eval()
    inputs = tokenizer.build_inputs_for_generation(tokenizer(texts, padding=True))
    written = model.generate(**inputs, max_new_tokens=STEPS)[:, inputs["input_ids"].shape[1] :].tolist()
    beams = model.generate(**inputs, max_new_tokens=STEPS, num_beams=3)[
        :, inputs["input_ids"].shape[1] :
    ].tolist()
    fill = transformers.pipeline("blank-infilling", model=str(directory), max_new_tokens=STEPS, **options)
    return {"written": written, "beams": beams, "pipeline": [fill(text) for text in texts]}


def trained(directory):
    """Steps on GLM's class: plain, with checkpoints of activations, and by adapters that are merged again."""
    options = {"trust_remote_code": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **options)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory, **options).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    inputs = tokenizer.build_inputs_for_training(
        tokenizer(["word1 [MASK] word2 ."], padding=True), [["word3 word4"]]
    )
    norms = []
    with torch.enable_grad():
        for _ in range(2):
            model.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
            norms.append(
                sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None).sqrt().item()
            )
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.gradient_checkpointing_disable()
    found = {"loss": round(loss.item(), 4), "norms": [round(norm, 3) for norm in norms]}
    if importlib.util.find_spec("peft") is not None:
        from peft import LoraConfig, get_peft_model

        before = model.eval()(**inputs).logits
        config = LoraConfig(r=2, target_modules=["query_key_value", "dense"], task_type="SEQ_2_SEQ_LM")
        adapted = get_peft_model(model, config).eval()
        found["adapted"] = torch.equal(adapted(**inputs).logits, before)
        written = adapted.generate(
            **tokenizer.build_inputs_for_generation(tokenizer(["word1 [MASK] ."])), max_new_tokens=3
        )
        found["written"] = written.tolist()
    return found


def tokens_of(directory, described):
    options = {"trust_remote_code": True} if "auto_map" in described else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **options)
    found = {"tokenizer_class": type(tokenizer).__name__, "length": len(tokenizer)}
    found["encoded"] = [dict(tokenizer(text)) for text in TEXTS]
    found["bare"] = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    found["plain"] = [
        tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) for text in TEXTS
    ]
    found["pair"] = dict(tokenizer("the quick fox", "jumps over"))
    found["decoded"] = [tokenizer.decode(ids) for ids in found["bare"]]
    found["skipped"] = [
        tokenizer.decode(each["input_ids"], skip_special_tokens=True) for each in found["encoded"]
    ]
    found["special"] = {
        role: getattr(tokenizer, f"{role}_token_id")
        for role in ("pad", "eos", "bos", "cls", "sep", "mask", "unk")
    }
    found["padded"] = dict(tokenizer(TEXTS[:2], padding=True)) if tokenizer.pad_token_id is not None else None
    found["longest"] = min(tokenizer.model_max_length, 10**9)
    found["sides"] = [tokenizer.padding_side, tokenizer.truncation_side]
    with tempfile.TemporaryDirectory() as again:
        tokenizer.save_pretrained(again)
        for name in ("config.json", *(file.name for file in directory.glob("*.py"))):
            shutil.copyfile(directory / name, Path(again) / name)
        more = transformers.AutoTokenizer.from_pretrained(again, **options)
        found["again"] = [more(text)["input_ids"] for text in TEXTS]
    return found


@torch.no_grad()
def main(root, output, names):
    arrays, facts = {}, {}
    heard = _Warnings()
    transformers_logging.disable_progress_bar()
    transformers_logging.add_handler(heard)
    for name in names:
        directory, record = root / name, facts.setdefault(name, {})
        described = json.loads((directory / "config.json").read_text())
        for what in ("model", "tokens", "filled"):
            heard.messages.clear()
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    if what == "model":
                        found, record["loading"] = computed(directory, described, name)
                        arrays |= found
                    elif what == "tokens":
                        record["tokens"] = tokens_of(directory, described)
                    elif described["architectures"] == ["GLMForBlankInfilling"]:
                        texts = ["word1 word2 [MASK] word3 . [sMASK] word4", "word9 word8 [MASK] ."]
                        record["filled"] = filled(directory, texts)
                        record["trained"] = trained(directory)
                own = [str(each.message) for each in caught]
                record[f"{what} warnings"] = sorted({*heard.messages, *own})
            except Exception as error:
                record[f"{what} error"] = f"{type(error).__name__}: {str(error)[:500]}"
                if "-v" in sys.argv:
                    traceback.print_exc()
    np.savez(f"{output}.npz", **arrays)
    Path(f"{output}.json").write_text(
        json.dumps({"version": transformers.__version__, "facts": facts}, default=str)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [each for each in sys.argv[3:] if each != "-v"])
