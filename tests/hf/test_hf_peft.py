"""LoRA adapters of PEFT on an exported model: only they and a task's head learn, and both come back."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.hf.hf_runs import tree, write_run, write_vocabulary

from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.glm.modeling_glm import GLMForBlankInfilling, GLMForSequenceClassification
from megatron_lite.hf.glm.tokenization_glm import GLMTokenizerFast


def logits(model, inputs):
    with torch.no_grad():
        return model.eval()(**inputs).logits


def test_lora_learns_generates_and_comes_back(tmp_path):
    write_run(tmp_path / "run", tree(write_vocabulary(tmp_path)))
    export_run(tmp_path / "run", tmp_path / "export", ExportOptions(verify=False))
    model = GLMForBlankInfilling.from_pretrained(tmp_path / "export")
    tokenizer = GLMTokenizerFast.from_pretrained(tmp_path / "export")
    encoded = tokenizer(["word1 [MASK] word2 ."], padding=True)
    inputs = tokenizer.build_inputs_for_training(encoded, [["word3 word4"]])
    config = LoraConfig(r=2, target_modules=["query_key_value", "dense"], task_type="SEQ_2_SEQ_LM")
    adapted = get_peft_model(model, config)
    before = logits(adapted, inputs)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    frozen = {n: p.detach().clone() for n, p in adapted.named_parameters() if not p.requires_grad}
    losses = []
    for _ in range(10):
        loss = adapted.eval()(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert frozen and all(torch.equal(dict(adapted.named_parameters())[n], p) for n, p in frozen.items())
    written = adapted.generate(**tokenizer.build_inputs_for_generation(encoded), max_new_tokens=4)
    assert written.shape[0] == 1
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(
        GLMForBlankInfilling.from_pretrained(tmp_path / "export"), tmp_path / "adapter"
    )
    after = logits(adapted, inputs)
    assert not torch.equal(after, before) and torch.equal(logits(again, inputs), after)


def test_lora_with_the_head_of_a_task(tmp_path):
    """`modules_to_save` trains the new head whole, and keeps it with the adapters; merged, they are plain weights."""
    write_run(tmp_path / "run", tree(write_vocabulary(tmp_path)))
    export_run(tmp_path / "run", tmp_path / "export", ExportOptions(verify=False))
    torch.manual_seed(0)
    model = GLMForSequenceClassification.from_pretrained(tmp_path / "export", num_labels=2).eval()
    tokenizer = GLMTokenizerFast.from_pretrained(tmp_path / "export")
    texts = [f"word{first} word{second} ." for first in (1, 2) for second in (3, 4)]
    inputs = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    labels = torch.tensor([0, 0, 1, 1])
    begin = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    targets = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
    config = LoraConfig(r=8, lora_alpha=8, target_modules=targets, modules_to_save=["score"])
    adapted = get_peft_model(model, config).eval()
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert all(".lora_" in name or ".score.modules_to_save." in name for name in trained)
    assert sum(".score." in name for name in trained) == 2
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=3e-2)
    for _ in range(60):
        adapted(**inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    answers = logits(adapted, inputs)
    assert torch.equal(answers.argmax(-1), labels)
    adapted.save_pretrained(tmp_path / "adapter")
    fresh = GLMForSequenceClassification.from_pretrained(tmp_path / "export", num_labels=2)
    assert torch.equal(logits(PeftModel.from_pretrained(fresh, tmp_path / "adapter"), inputs), answers)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged, inputs), answers, rtol=1e-4, atol=1e-4)
    assert merged.state_dict().keys() == begin.keys()
    changed = {name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, begin[name])}
    assert changed == {
        name
        for name in begin
        if name.startswith("score.") or name.endswith(tuple(f"{target}.weight" for target in targets))
    }
