"""Runs of BART, T5 and GPT-2 write what `generate` of transformers writes on their exports, token for token."""

import pytest
import torch
import transformers
from support.data.tokenizer_files import bert_vocab, write_bert
from support.hf.published import CASES, random_model

from megatron_lite.config.generation import GenerationConfig
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.inference.decoders import make_decoder
from megatron_lite.inference.open_run import load_run

TREE = {"training": {"steps": 6, "precision": "fp32", "seed": 7}, "data": {"sequence_length": 60}}
OBJECTIVES = {
    "bart": {"objectives": {"bart": 1}},
    "bart, CLS": {"objectives": {"bart": 1}, "bart": {"predict_cls": True}},
    "t5": {"objectives": {"t5": 1}},
    "gpt2": {"objectives": {"causal": 1}},
}


@pytest.fixture(scope="module", params=OBJECTIVES)
def both(request, tmp_path_factory):
    """The run, and the model of transformers that its export holds."""
    root, case = tmp_path_factory.mktemp("published"), request.param.partition(",")[0]
    lines = bert_vocab()
    model = random_model(case, vocab_size=len(lines))
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # so that texts and tokens before make a difference
            if "encoder_attn" in name or "EncDecAttention" in name:
                parameter.mul_(6.0)
            elif case == "bart" and name.endswith("bias"):
                parameter.zero_()
    model.save_pretrained(root / "original")
    write_bert(root / "original", lines)
    import_directory(root / "original", root / "run", TREE | OBJECTIVES[request.param], verify=False)
    export_run(root / "run", root / "export", ExportOptions(verify=False))
    theirs = getattr(transformers, CASES[case][0]).from_pretrained(root / "export").eval()
    return load_run(root / "run"), theirs


TEXTS = ["the quick brown fox", "jumps", "over the lazy dog and the brown fox jumps"]


class Banned:
    """A processor: `suppress_tokens` would forbid the CLS that BART's answers begin with."""

    def __init__(self, tokens, start):
        self.tokens, self.start = tokens, start

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.start:
            scores[:, self.tokens] = float("-inf")
        return scores


def theirs_of(decoder, model, contexts, config):
    """The answers of transformers to a batch, padded on the side that each kind of model wants."""
    layout, longest = decoder.template, max(map(len, contexts))
    pads = [[0] * (longest - len(context)) for context in contexts]
    is_encoder_decoder = model.config.is_encoder_decoder

    def sided(lists):
        pairs = zip(lists, pads, strict=True)
        return torch.tensor([[*x, *pad] if is_encoder_decoder else [*pad, *x] for x, pad in pairs])

    start = 1 + len(layout.forced) if is_encoder_decoder else longest
    ends = sorted(token for token in layout.ends if token >= 0)
    options = {
        "eos_token_id": ends, "pad_token_id": 0, "forced_eos_token_id": None,
        "max_new_tokens": config.max_length + len(layout.forced),
        "logits_processor": [Banned(decoder.search.banned, start)],
    }  # fmt: skip
    if is_encoder_decoder:
        options["decoder_start_token_id"] = layout.start[0]
        options["forced_bos_token_id"] = layout.forced[0] if layout.forced else None
    if config.strategy == "beam":
        options |= {"num_beams": config.num_beams, "length_penalty": config.length_penalty}
    if config.min_length:
        options["min_new_tokens"] = config.min_length + len(layout.forced)
    mask = sided([[1] * len(context) for context in contexts])
    written = model.generate(input_ids=sided(contexts), attention_mask=mask, **options)[:, start:]
    return [[t for i, t in enumerate(row) if not set(row[: i + 1]) & set(ends)] for row in written.tolist()]


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"min_length": 5},
        {"strategy": "beam", "num_beams": 4, "length_penalty": 0.0},
        {"strategy": "beam", "num_beams": 3, "length_penalty": 1.5, "min_length": 3},
    ],
    ids=str,
)
def test_answers_agree_token_for_token(both, options):
    run, model = both
    config = GenerationConfig(max_length=8, **options)
    decoder = make_decoder(run, config)
    contexts = [decoder.context(run.tokenizer.encode(text)) for text in TEXTS]
    found = decoder.generate(contexts)
    assert theirs_of(decoder, model, contexts, config) == found
    assert len({str(answer) for answer in found}) > 1
