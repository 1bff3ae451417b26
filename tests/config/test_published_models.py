"""The configurations of published models and systems against tables of what was published."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import yaml
from support.project import ROOT
from support.selection import slow_but

from data_utils.common.settings import build, to_tree
from data_utils.tokenizers.sentencepiece_tokenizer import sentencepiece_special_tokens
from data_utils.tokenizers.special_tokens import assign_special_tokens
from megatron_lite.config.model import padded_vocab_size
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config, load_config
from megatron_lite.estimate.dry_run import dry_run
from megatron_lite.models.optimus.config import latent_of
from megatron_lite.transformer.flops import parameter_count

MODELS = ROOT / "configs"

# The published models: layers, hidden size, heads, largest position, padded vocabulary, million parameters.
PUBLISHED = {
    "glm-base": (12, 768, 12, 512, 30592, "109.3"),
    "glm-large": (24, 1024, 16, 512, 30592, "334.7"),
    "glm-410m": (30, 1024, 16, 512, 30592, "410.3"),
    "glm-515m": (30, 1152, 18, 512, 30592, "514.6"),
    "glm-roberta": (24, 1024, 16, 512, 50304, "354.9"),
    "glm-large-chinese": (24, 1024, 16, 1024, 50048, "355.7"),
    "glm-2b": (36, 2048, 32, 1024, 50304, "1920."),
    "glm-10b": (48, 4096, 64, 1024, 50304, "9881."),
    "glm-10b-1024": (48, 4096, 64, 1024, 50304, "9881."),
    "glm-10b-chinese": (48, 4096, 64, 1024, 50048, "9880."),
}

# GLM's successors and GLM on a modern body: parameters. GLM-4-9B's number is that of its released files.
SUCCESSORS = {"glm-4-9b": 9_399_951_360, "glm-130b": 128_697_794_560}
SUCCESSORS |= {"glm-modern-base": 108_398_592, "glm-modern-large": 334_872_576}
# Glm4MoeForCausalLM's, with its buffers of biases, and the layer that it leaves out; 28,000 tensors are slow to count.
SUCCESSORS |= {"glm-4.5": 352_797_829_024 + 3_988_069_792, "glm-4.5-air": 106_852_251_264 + 2_375_059_584}

# Their recipes: lr, beta2, eps, weight decay, steps, decay, end of decay, warmup, floor, token, sentence.
RECIPES = {
    "glm-base": (4e-4, 0.98, 1e-6, 0.1, 150_000, "cosine", 120_000, 6_000, 0.05, 1.0, 0.0),
    "glm-large": (2e-4, 0.98, 1e-6, 0.1, 200_000, "cosine", 160_000, 8_000, 0.05, 1.0, 0.0),
    "glm-roberta": (4e-4, 0.98, 1e-6, 0.01, 500_000, "linear", 500_000, 30_000, 0.025, 1.0, 0.0),
    "glm-large-chinese": (4e-4, 0.98, 1e-6, 0.01, 250_000, "cosine", 200_000, 8_000, 0.1, 0.4, 0.3),
    "glm-2b": (1e-4, 0.95, 1e-8, 0.1, 250_000, "cosine", 175_000, 7_000, 0.1, 0.4, 0.3),
    "glm-10b": (1e-4, 0.95, 1e-8, 0.1, 250_000, "cosine", 175_000, 7_000, 0.1, 0.5, 0.3),
    "glm-10b-1024": (3e-5, 0.95, 1e-8, 0.1, 250_000, "linear", 50_000, 250, 0.1, 0.4, 0.3),
    "glm-10b-chinese": (1e-4, 0.95, 1e-8, 0.1, 150_000, "cosine", 120_000, 4_800, 0.1, 0.5, 0.3),
}

BERT = {"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103}
ROBERTA = {"cls": 0, "pad": 2, "sep": 2, "eos": 2, "unk": 3, "mask": 50264}


def published(name: str, overrides: Sequence[str] = ()) -> Config:
    """Args: name: of a file of configs/; one of configs/sizes/ follows the file that its first line names."""
    path = MODELS / f"{name}.yaml"
    over = re.match(r".*: as a second --config after configs/(\S+\.yaml), ", path.read_text())
    return load_config([*([MODELS / over[1]] if over else []), path], overrides)


# The published models


def test_every_published_model_has_a_file():
    assert {path.stem for path in MODELS.glob("glm-*.yaml")} == {*PUBLISHED, *SUCCESSORS}


@pytest.mark.parametrize("name", slow_but((name for name in SUCCESSORS if "4.5" not in name), SUCCESSORS))
def test_a_successor_has_the_published_size(name):
    assert parameter_count(published(name).model, padded=False) == SUCCESSORS[name]


def test_glm_130b_fits_the_gpus_it_was_trained_on():
    """A100s of 40 GB: 16 bytes of weights and Adam's state per parameter of the fullest stage, the moments shared."""
    from megatron_lite.estimate.parameters import stages

    config = published("glm-130b")
    fullest = max(stage.numbers for stage in stages(config))
    assert 4 * fullest + 12 * fullest / 24 < 20 * 2**30


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_the_published_size(name):
    model = published(name).model
    layers, hidden, heads, max_position, vocab, millions = PUBLISHED[name]
    shape = (model.num_layers, model.hidden_size, model.num_attention_heads, model.max_position)
    assert shape == (layers, hidden, heads, max_position)
    assert padded_vocab_size(model.vocab_size) == vocab
    digits = 4 - len(millions.partition(".")[0])
    assert f"{parameter_count(model) / 1e6:.{digits}f}" == millions.rstrip(".")


SINGLE_STACK = sorted(
    path for path in MODELS.glob("*.yaml") if not path.stem.startswith(("optimus", "electra", "ernie-thu"))
)


@pytest.mark.parametrize(
    "path",
    slow_but((path for path in SINGLE_STACK if "4.5" not in path.stem), SINGLE_STACK),
    ids=lambda path: path.stem,
)
def test_the_parameter_count_matches_the_real_module(path):
    """And what --dry-run says that one rank holds."""
    import torch

    from megatron_lite.estimate.parameters import stages
    from megatron_lite.transformer.transformer import Transformer

    config = load_config([path])
    if config.model.vocab_size is None:
        config = config.with_vocab_size(1000)
    with torch.device("meta"):
        parameters = dict(Transformer(config.model).named_parameters())
    assert sum(parameter.numel() for parameter in parameters.values()) == parameter_count(config.model)
    (stage,) = stages(replace(config, parallel=ParallelConfig()))
    assert stage.numbers == parameter_count(config.model)
    rows_that_pad = len(parameters["embedding.word_embeddings.weight"]) - config.model.vocab_size
    width = config.model.embedding_size or config.model.hidden_size
    biases = config.model.head_bias * (2 if config.model.span_boundary_places else 1)
    tables = 1 if config.model.tie_word_embeddings else 2
    padding = rows_that_pad * (tables * width + biases)
    assert parameter_count(config.model) - parameter_count(config.model, padded=False) == padding


@pytest.mark.parametrize("name", RECIPES)
def test_a_published_recipe_matches_the_reference(name):
    config = published(name)
    optimizer, schedule, objective = (
        config.optimizer,
        config.schedule,
        config.objective_sections["blank_infilling"],
    )
    assert (
        *(optimizer.lr, optimizer.beta2, optimizer.eps, optimizer.weight_decay),
        *(config.training.steps, schedule.kind, schedule.decay_steps, schedule.warmup_steps),
        schedule.min_lr_ratio,
        *(objective.token_prob, objective.sentence_prob),
    ) == RECIPES[name]  # fmt: skip
    assert (optimizer.beta1, optimizer.clip_grad_norm) == (0.9, 1.0)
    if objective.sentence_prob > 0:
        assert (objective.document_min_ratio, objective.block_mask_prob) == (0.25, 0.1)


def test_the_papers_mix_may_be_laid_over_a_model():
    """Short spans and long ones, half each; everything else stays the model's."""
    config = load_config([MODELS / "glm-10b.yaml", MODELS / "objectives/paper.yaml"])
    mix = config.objective_sections["blank_infilling"]
    assert (mix.token_prob, mix.sentence_prob, mix.masked_ratio, mix.mean_span_length) == (
        0.5,
        0.0,
        0.15,
        3.0,
    )
    assert (mix.document_min_ratio, mix.document_max_ratio, mix.document_min_context) == (0.5, 1.0, 1)
    assert dataclasses.replace(
        config, objective_sections=published("glm-10b").objective_sections
    ) == published("glm-10b")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_vocabulary_is_the_size_of_the_models_tokenizer(name):
    config = published(name)
    sizes = {
        "bert_wordpiece": assign_special_tokens(BERT, 30522)[1],
        "gpt2_bpe": assign_special_tokens({"eos": 50256}, 50257)[1],
        "hf_json": assign_special_tokens(ROBERTA, 50265)[1],
        "sentencepiece": sentencepiece_special_tokens(50000, config.tokenizer.fixed_command_tokens)[1],
    }
    assert config.model.vocab_size == sizes[config.tokenizer.kind]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_batch_fits_8_and_64_ranks(name):
    batch = published(name).batch
    for ranks in (8, 64):
        steps = batch.accumulation_steps(ranks)
        assert steps * ranks * batch.micro_batch_size == batch.global_batch_size


def test_no_two_published_models_share_a_run_directory():
    directories = [published(name).run.directory for name in PUBLISHED]
    assert len(set(directories)) == len(directories)


# The other systems: layers, hidden size, heads, objective, row length, lr, sequences per step, steps.
SYSTEMS = {
    "bert-base": (12, 768, 12, "masked_lm", 512, 1e-4, 256, 1_000_000),
    "bert-large": (24, 1024, 16, "masked_lm", 512, 1e-4, 256, 1_000_000),
    "roberta-large": (24, 1024, 16, "masked_lm", 512, 4e-4, 8192, 500_000),
    "spanbert-large": (24, 1024, 16, "spanbert", 512, 1e-4, 256, 2_400_000),
    "albert-base": (12, 768, 12, "albert", 512, 1.76e-3, 4096, 125_000),
    "ernie-base": (12, 768, 12, "ernie", 512, 1e-4, 256, 1_000_000),
    "gpt": (12, 768, 12, "causal", 512, 2.5e-4, 64, 1_000_000),
    "gpt2-xl": (48, 1600, 25, "causal", 1024, 1.5e-4, 512, 600_000),
    "unilm-large": (24, 1024, 16, "unilm", 512, 3e-5, 330, 770_000),
    "unilmv2-base": (12, 768, 12, "unilmv2", 664, 6e-4, 7680, 500_000),
    "xlnet-large": (24, 1024, 16, "xlnet", 600, 4e-4, 8192, 500_000),
    "mass-base": (6, 768, 12, "mass", 768, 5e-4, 4096, 125_000),
    "t5-base": (12, 768, 12, "t5", 632, 0.01, 2048, 1_000_000),
    "bart-large": (12, 1024, 16, "bart", 928, 4e-4, 8000, 500_000),
    "ul2-20b": (32, 4096, 16, "ul2", 688, 0.01, 1024, 2_650_000),
    "llada-8b": (32, 4096, 32, "masked_diffusion", 4096, 4e-4, 1280, 438_690),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_has_its_headline_recipe(name):
    config = published(name)
    model, (choice,) = config.model, config.objective_choices
    assert (
        *(model.num_layers, model.hidden_size, model.num_attention_heads, choice.name),
        choice.section.row_length_for(config.data.sequence_length),
        *(config.optimizer.lr, config.batch.global_batch_size, config.training.steps),
    ) == SYSTEMS[name]


ALBERT_XXLARGE = ["model.hidden_size=4096", "model.num_attention_heads=64"]
BERT_CASED = ["model.vocab_size=28996", "tokenizer.lowercase=false"]
GPT2 = [(12, 768, 12), (24, 1024, 16), (36, 1280, 20), (48, 1600, 25)]


def size(layers: int, hidden: int, heads: int) -> list[str]:
    return [f"model.num_layers={layers}", f"model.hidden_size={hidden}", f"model.num_attention_heads={heads}"]


# Parameters of the released model (of its transformers class for pretraining), without rows that pad the vocabulary.
PARAMETERS = [
    ("bert-base", [], 110_106_428),
    ("bert-base", BERT_CASED, 108_932_934),
    ("bert-large", [], 336_226_108),
    ("bert-large", BERT_CASED, 334_661_958),
    # Two rows of the released table of positions are never used, and left out here.
    ("roberta-large", [], 355_412_057 - 2 * 1024),
    ("roberta-large", size(12, 768, 12), 124_697_433 - 2 * 768),
    ("spanbert-large", [], 333_610_308 + 3_389_668),  # BertForMaskedLM, and the head for spans
    ("spanbert-large", size(12, 768, 12), 108_340_804 + 1_960_676),
    ("albert-base", [], 11_813_810),
    ("albert-base", size(24, 1024, 16), 17_847_474),
    ("albert-base", size(24, 2048, 16), 59_021_490),
    ("albert-base", ALBERT_XXLARGE, 223_158_450),
    ("ernie-base", [], 100_477_778),
    ("ernie2-base", [], 110_131_018),
    ("ernie2-base", size(24, 1024, 16), 336_258_890),
    ("gpt", [], 116_534_784),
    ("gpt2-xl", size(*GPT2[0]), 124_439_808),
    ("gpt2-xl", size(*GPT2[1]), 354_823_168),
    ("gpt2-xl", size(*GPT2[2]), 774_030_080),
    ("gpt2-xl", size(*GPT2[3]), 1_557_611_200),
    ("unilm-large", [], 334_666_054),
    ("unilm-large", size(12, 768, 12), 108_936_006),
    ("bart-large", [], 406_291_456 - 2 * 2 * 1024),  # as RoBERTa's, of encoder and decoder
    ("bart-large", [*size(6, 768, 12), "model.decoder_layers=6"], 139_420_416 - 2 * 2 * 768),
    ("t5-base", [], 222_903_552),
    ("t5-base", [*size(6, 512, 8), "model.decoder_layers=6"], 60_506_624),
    ("t5-base", [*size(24, 1024, 16), "model.decoder_layers=24"], 737_668_096),
    ("ul2-20b", [], 19_591_209_984),
    ("llada-8b", [], 8_015_581_184),
    ("xlnet-large", [], 360_300_800),
    ("unilmv2-base", [], 109_514_298 + 32 * 12),  # published as 109.5 million
    # Published as 123.5 and 208.7 million; one more row in each table of positions.
    ("mass-base", [], 123_469_824 - 2 * 768),
    ("mass-base", size(6, 1024, 16), 208_666_624 - 2 * 1024),
]


@pytest.mark.parametrize(("name", "overrides", "parameters"), PARAMETERS)
def test_a_system_has_the_published_number_of_parameters(name, overrides, parameters):
    config = load_config([MODELS / f"{name}.yaml"], overrides)
    assert parameter_count(config.model, padded=False) == parameters


ETTIN_DECODER = ["model.system=modernbert_decoder", "objectives.masked_lm=0", "objectives.causal=1"]
# Parameters of systems whose configurations continue the published weights. EuroBERT's with its untied head, which
# published numbers leave out.
CONTINUED = [
    ("llama-3.2-1b", [], 1_235_814_400),
    ("sizes/llama-2-7b", [], 6_738_415_616),
    ("mistral-7b", [], 7_241_732_096),
    ("qwen2.5-0.5b", [], 494_032_768),
    ("qwen3-0.6b", [], 596_049_920),
    ("eurobert-210m", [], 211_766_016 + 128_256 * 768),
    ("sizes/eurobert-610m", [], 607_874_688 + 128_256 * 1152),
    ("sizes/eurobert-2.1b", [], 2_107_590_912 + 128_256 * 2304),
    ("neobert", [], 245_136_954),
    ("modernbert-base", [], 149_655_232),
    ("sizes/modernbert-large", [], 395_881_664),
    ("sizes/ettin-17m", ETTIN_DECODER, 16_913_600),  # decoders have as many
    ("sizes/ettin-17m", [], 16_913_600),
    ("sizes/ettin-32m", [], 32_081_344),
    ("sizes/ettin-68m", [], 68_457_664),
    ("sizes/ettin-400m", [], 395_881_664),
    ("sizes/ettin-1b", [], 1_031_314_112),
    ("t5-1.1-base", [], 247_577_856),
    ("sizes/t5-1.1-small", [], 76_961_152),
    ("sizes/t5-1.1-large", [], 783_150_080),
    ("ul2r-base", [], 247_577_856),
    ("mt5-base", [], 582_401_280),
    ("sizes/mt5-small", [], 300_176_768),
    ("sizes/mt5-large", [], 1_229_581_312),
    ("xlm-roberta-base", [], 278_295_186 - 2 * 768),  # as RoBERTa's
    ("sizes/xlm-roberta-large", [], 560_142_482 - 2 * 1024),
    ("camembert-base", [], 110_655_493 - 2 * 768),
    # DebertaV2Model, and the head: a product, its bias, a norm and a bias of each token.
    ("deberta-v3-base", [], 183_831_552 + 768 * 771 + 128_100),
    ("sizes/deberta-v3-xsmall", [], 70_682_112 + 384 * 387 + 128_100),
    ("sizes/deberta-v3-small", [], 141_304_320 + 768 * 771 + 128_100),
    ("sizes/deberta-v3-large", [], 434_012_160 + 1024 * 1027 + 128_100),
]


@pytest.mark.parametrize(("name", "overrides", "parameters"), CONTINUED)
def test_a_continued_system_has_the_published_number_of_parameters(name, overrides, parameters):
    config = published(name, overrides)
    assert parameter_count(config.model, padded=False) == parameters


def test_the_head_of_a_file_says_how_many_parameters_there_are():
    said = {}
    for name, overrides, parameters in (*PARAMETERS, *CONTINUED):
        head = (MODELS / f"{name}.yaml").read_text().partition("\n\n")[0]
        if not overrides and (found := re.search(r"([\d,.]+) M parameters", head)):
            said[name] = float(found[1].replace(",", "")), round(parameters / 1e6, 1)
    assert len(said) == 46 and all(words == counted for words, counted in said.values())


def test_every_system_has_its_published_number_of_parameters():
    assert {name for name, *_ in PARAMETERS} == {"ernie2-base", *SYSTEMS}


# Ids of the released vocabularies. The tokenizer adds none.
VOCABULARIES = {
    "bert-base": 30522, "bert-large": 30522, "roberta-large": 50265, "spanbert-large": 28996, "albert-base": 30000,
    "ernie-base": 18000, "ernie2-base": 30522, "gpt": 40478, "gpt2-xl": 50257, "unilm-large": 28996,
    "unilmv2-base": 30522, "xlnet-large": 32000, "mass-base": 30522, "t5-base": 32128, "bart-large": 50265,
    "ul2-20b": 32128, "llada-8b": 126464,
    "modernbert-base": 50368, "deberta-v3-base": 128100,
}  # fmt: skip


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_system_has_the_published_vocabulary(name):
    config = published(name)
    assert config.model.vocab_size == VOCABULARIES[name] and config.tokenizer.added_tokens == "none"
    assert config.tokenizer.vocab_size in (None, config.model.vocab_size)


@pytest.mark.parametrize("size", ["base", "large"])
def test_bert_trains_nine_tenths_of_its_steps_on_short_rows(size):
    phase_plan = published(f"bert-{size}").phase_plan
    assert phase_plan.first_steps == [0, 900_000, 1_000_000] and [
        c.row_length for c in phase_plan.configs
    ] == [128, 512]
    assert {phase_plan.batch_size(step) for step in (0, 899_999, 900_000)} == {256}


def test_albert_trains_with_lamb_as_in_its_code():
    optimizer = published("albert-base").optimizer
    assert (optimizer.kind, optimizer.beta1, optimizer.beta2, optimizer.eps) == ("lamb", 0.9, 0.999, 1e-6)
    assert (optimizer.weight_decay, optimizer.clip_grad_norm) == (0.01, 1.0) and not optimizer.bias_correction


def test_t5_trains_with_adafactor_and_the_root_of_the_step():
    config = published("t5-base")
    assert (config.optimizer.kind, config.optimizer.weight_decay, config.training.z_loss) == (
        "adafactor",
        0.0,
        1e-4,
    )
    for step in (1, 10_000, 40_000, 1_000_000):
        rate = config.phase_plan.learning_rate(step)
        assert rate == pytest.approx(max(step, 10_000) ** -0.5)


def test_llada_has_the_rates_of_its_paper():
    config = published("llada-8b")
    phase_plan, tokens = config.phase_plan, 1280 * 4096
    steps = [2000, round(1.2e12 / tokens), round(2.0e12 / tokens), round(2.3e12 / tokens)]
    rates = [phase_plan.learning_rate(step) for step in (1000, *steps, steps[1] + 2)]
    assert rates == pytest.approx([2e-4, 4e-4, 4e-4, 1e-4, 1e-5, 1e-4], rel=0.01)


def test_ul2_has_the_seven_denoisers_of_its_paper_and_ul2r_those_of_levanter():
    """(mode, mean length, rate, share); the length of a continuation follows from its rate."""

    def denoisers(name):
        (choice,) = published(name).objective_choices
        return [(d.mode[0], d.mean_span_length, d.noise_ratio, d.share) for d in choice.section.mixture]

    spans = [("r", 3, 0.15), ("r", 8, 0.15), ("e", 3, 0.5), ("e", 8, 0.5), ("e", 64, 0.15), ("e", 64, 0.5)]
    assert denoisers("ul2-20b") == [*((*each, 1) for each in spans), ("s", 3, 0.25, 1)]
    few = [("r", 3, 0.15, 1), ("e", 32, 0.15, 1), ("e", 3, 0.5, 1)]
    assert denoisers("ul2r-base") == [*few, ("s", 3, 0.5, 3)]


def test_glm_130b_ramps_its_batch_and_decays_over_nine_tenths_of_its_tokens():
    config = published("glm-130b")
    phase_plan, samples = config.phase_plan, 450_000_000_000 // 2048
    sizes = {phase_plan.batch_size(step) for step in range(4297)}
    assert (
        sizes == set(range(192, 4225, 24))
        and phase_plan.batch_size(4295) == 4200 < phase_plan.batch_size(4296) == 4224
    )
    assert (
        phase_plan.consumed(55_013) < samples <= phase_plan.consumed(55_014)
        and config.training.steps == 55_014
    )
    peak, floor = 2318, 2318 + 47_494
    assert phase_plan.consumed(peak - 1) < samples * 0.005 <= phase_plan.consumed(peak)
    assert phase_plan.consumed(floor - 1) < samples * 0.9 <= phase_plan.consumed(floor)
    rates = [phase_plan.learning_rate(step) for step in (peak // 2, peak, floor, 55_014)]
    assert rates == pytest.approx([4e-5, 8e-5, 8e-6, 8e-6]) and config.model.embedding_gradient_shrink == 0.1


# Each with a number of processes that fits its batches.
DRY_RUNS = {
    "bert-base": 16, "bert-large": 32, "roberta-large": 64, "albert-base": 64, "t5-base": 64, "glm-large": 64,
    "ernie2-base": 16, "glm-130b": 768,
    "llada-8b": 64, "modernbert-base": 8, "deberta-v3-base": 64,
}  # fmt: skip


USUAL = ("t5-base", "glm-large", "modernbert-base")  # the others are slow


@pytest.mark.parametrize(
    "name", [*USUAL, *(pytest.param(name, marks=pytest.mark.slow) for name in DRY_RUNS if name not in USUAL)]
)
def test_a_whole_recipe_can_be_estimated(name, capsys):
    config = published(name)
    dry_run(config, DRY_RUNS[name], "a100")
    printed = capsys.readouterr().out
    phases = len(config.phases) or 1
    assert printed.count("parameters  ") >= phases and "it fits" in printed
    assert printed.count("\nadvice") == phases and ("\nall phases  " in printed) == (phases > 1)
    assert all(line in printed for line in config.phase_plan.lines())


def test_modernbert_trains_on_long_rows_after_short_ones():
    config = published("modernbert-base")
    phase_plan = config.phase_plan
    assert [each.row_length for each in phase_plan.configs] == [1024, 8192, 8192]
    assert (phase_plan.batch_size(0), phase_plan.batch_size(380_000), phase_plan.batch_size(400_000)) == (
        768,
        4608,
        576,
    )
    short, long, end = (step * 1.0 for step in phase_plan.first_steps[1:])
    rates = {3_826: 8e-4, short: 8e-4, short + 1: 3e-4, long: 3e-4, end: 8e-7}  # steps count from 1
    assert {step: phase_plan.learning_rate(int(step)) for step in rates} == pytest.approx(rates, rel=1e-3)
    assert abs(config.optimizer.lr * config.optimizer.weight_decay - 1e-5) < 1e-12
    assert [each.model.rotary_base for each in phase_plan.configs] == [1e4, 16e4, 16e4]
    with_tokens = phase_plan.consumed(phase_plan.first_steps[1]) * 1021
    assert 0 <= with_tokens - 1_719_000_000_000 < 4608 * 1021


def test_modernbert_large_has_rates_and_batches_of_its_own():
    config = published("sizes/modernbert-large")
    phase_plan = config.phase_plan
    assert (phase_plan.batch_size(0), phase_plan.batch_size(340_000), phase_plan.batch_size(400_000)) == (
        896,
        4928,
        616,
    )
    assert 0 <= phase_plan.consumed(1706) * 1021 - 2e9 < 4928 * 1021
    steps = [
        1706,
        phase_plan.first_steps[1],
        phase_plan.first_steps[1] + 1,
        phase_plan.first_steps[2],
        phase_plan.first_steps[3],
    ]
    assert [phase_plan.learning_rate(step) for step in steps] == pytest.approx(
        [5e-4, 5e-4, 5e-5, 5e-5, 5e-7], rel=1e-3
    )


def test_optimus_is_bert_gpt2_and_three_matrices():
    """BertForPreTraining, GPT-2 with three more tokens, and W_E [64, 768], W_M [12 x 768, 32], W_D [768, 32]."""
    import torch

    from megatron_lite.models.optimus.model import Optimus
    from megatron_lite.transformer.build import model_spec

    config = published("optimus-base")
    assert (config.model.vocab_size, config.decoder.vocab_size) == (28_996, 50_257 + 3)
    sizes = parameter_count(config.model, padded=False), parameter_count(config.decoder, padded=False)
    assert sizes == (108_932_934, 124_439_808 + 3 * 768)
    latent = 64 * 768 + 12 * 768 * 32 + 768 * 32
    assert "OPTIMUS, 233.7 M parameters" in (MODELS / "optimus-base.yaml").read_text()
    assert round((sum(sizes) + latent) / 1e6, 1) == 233.7
    with torch.device("meta"):
        made = Optimus(config.model, config.decoder, latent_of(config))
    assert sum(parameter.numel() for parameter in made.parameters()) == model_spec(config).count(config)


def test_optimus_has_the_recipe_of_its_pretraining():
    config = published("optimus-base")
    optimizer, schedule, latent = config.optimizer, config.schedule, latent_of(config)
    assert (optimizer.lr, optimizer.eps, optimizer.weight_decay) == (5e-5, 1e-8, 0.0)
    assert (schedule.kind, schedule.warmup_steps, schedule.min_lr_ratio) == ("linear", 0, 0.0)
    assert (latent.latent_size, latent.cycles, latent.zero_share, latent.rise_share) == (32, 10, 0.5, 0.25)
    assert (latent.free_bits, latent.feature, latent.memory, latent.embedding) == (1.0, "pooler", True, True)
    assert (config.tokenizer.added_tokens, config.decoder_tokenizer.added_tokens) == ("none", "optimus")
    assert not config.tokenizer.lowercase and config.data.sequence_length == 64 and config.row_length == 528


def test_every_configuration_is_in_a_table():
    named = {path.stem for path in MODELS.glob("*.yaml")}
    named |= {f"sizes/{path.stem}" for path in MODELS.glob("sizes/*.yaml")}
    own = {
        "tiny",
        "mini",
        "laptop",
        "laptop-experts",
        "small",
        "medium",
        "optimus-tiny",
        "optimus-base",
        "llada-small",
    }
    continued = {name for name, *_ in CONTINUED}
    named -= {
        name for name in named if name.startswith(("electra-", "ernie-thu-")) or name.endswith("-rtd")
    }  # tests/electra, tests/ernie_thu
    assert named == {*own, "ernie2-base", *PUBLISHED, *SUCCESSORS, *SYSTEMS, *continued}


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_survives_printing_and_reading(path):
    config = load_config([path])
    assert build(Config, yaml.safe_load(yaml.safe_dump(to_tree(config)))) == config
