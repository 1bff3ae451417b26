"""LoRA adapters of PEFT on an exported model: only they learn, generation works with them, they can be kept."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.hf_runs import tree, write_run, write_vocabulary

from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.modeling_glm import GLMForBlankInfilling
from megatron_lite.hf.tokenization_glm import GLMTokenizerFast


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
