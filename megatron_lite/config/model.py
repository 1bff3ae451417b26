"""The section `model` of the configuration: the Transformer, and the rules among its options.

The options are orthogonal. Their defaults are GLM's; systems.py has those of the other systems.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from data_utils.common.losses import CLASS_HEADS
from data_utils.common.settings import REQUIRED, check, checked, section, setting
from megatron_lite.config.experts import OF_BALANCE, ExpertsConfig, check_experts
from megatron_lite.config.lora import LoraConfig, check_lora
from megatron_lite.config.systems import FIXED, SYSTEMS, UNSUPPORTED
from megatron_lite.config.task_head import OF_TEXTS, TaskHeadConfig, check_task_head

# Another one is also computed in transformer/kernels/fused.py and triton_kernels.py
# and named in hf/common/system_table.py.
ACTIVATIONS = ("gelu_tanh", "gelu_erf", "relu", "silu")
NORMS = ("pre", "post", "deepnorm")
POSITIONS = ("learned_blocks", "learned", "rotary", "none")
BLOCK_POSITIONS = ("added", "table", "halves", "none")
RELATIVE = ("none", "buckets", "xlnet", "disentangled")
FFNS = ("plain", "gated")
BIASES = ("all", "qkv", "mlp", "none")
INITS = ("gpt2", "plain", "uniform", "t5", "deepnorm")


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("model.mup")
class MupConfig:
    base_hidden_size: int = setting(REQUIRED, "hidden_size of the base model.", at_least=1)
    base_head_size: int | None = setting(
        None, "head_dim of the base model; null = as this model.", at_least=1
    )


VOCAB_MULTIPLE = 128  # the reference pads vocabularies to a multiple of this, which suits GPU matrix units


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int = 1) -> int:
    """Rows of the word embedding: `vocab_size` rounded up so that every shard has a multiple of 128 rows."""
    multiple = VOCAB_MULTIPLE * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("model", presets=("system", SYSTEMS))
class ModelConfig:
    system: str | None = setting(
        None,
        "Published system; sets the architecture options that the file leaves out. null = glm.",
        one_of=tuple(SYSTEMS),
        unsupported=UNSUPPORTED,
    )
    num_layers: int = setting(
        REQUIRED, "Number of Transformer blocks; of the encoder if decoder_layers > 0.", at_least=1
    )
    decoder_layers: int = setting(
        0, "Number of decoder blocks with cross-attention (T5, BART, MASS); 0 = no decoder.", at_least=0
    )
    mtp_layers: int = setting(
        0,
        "Further blocks that predict the token after the next in training (MTP; GLM-4.5, DeepSeek-V3: 1).",
        at_least=0,
        at_most=1,
    )
    hidden_size: int = setting(REQUIRED, "Hidden size.", at_least=1)
    num_attention_heads: int = setting(
        REQUIRED, "Number of attention heads; must divide hidden_size if head_dim is null.", at_least=1
    )
    head_dim: int | None = setting(
        None, "Size of an attention head; null = hidden_size / num_attention_heads.", at_least=1
    )
    num_key_value_heads: int | None = setting(
        None,
        "Number of key/value heads (grouped-query attention; GLM-4: 2); null = num_attention_heads.",
        at_least=1,
    )
    ffn: str = setting(
        "plain",
        "plain: W2 activation(W1 x); gated: W2 (activation(Wg x) * W1 x), with Wg and W1 fused into one "
        "matrix (GLM-4, GLM-130B).",
        one_of=FFNS,
    )
    ffn_size: int | None = setting(None, "Inner size of the FFN; null = 4 hidden_size.", at_least=1)
    experts: ExpertsConfig | None = setting(
        None, "Mixture of experts: each token is computed by a few of many FFNs; null = one FFN."
    )
    vocab_size: int | None = setting(
        None,
        "Vocabulary size, special tokens included, before padding; null = the tokenizer's.",
        at_least=1,
    )
    max_position: int = setting(
        512, "Largest position id; position embeddings have max_position + 1 rows.", at_least=1
    )
    positions: str = setting(
        "learned_blocks",
        "learned_blocks = two learned tables, position in the text and position in the span (GLM); learned "
        "= one learned table; rotary = RoPE (GLM-4); none = no position embedding.",
        one_of=POSITIONS,
    )
    block_positions: str = setting(
        "added",
        "Position in the span with rotary positions: added = added to the position in the text, so that a "
        "span continues from its mask; table = a learned table as in learned_blocks; halves = rotates the "
        "second half of the rotary features, the position in the text rotates the first (ChatGLM-6B); none "
        "= ignored (ablation; also for learned positions).",
        one_of=BLOCK_POSITIONS,
    )
    rotary_share: float = setting(
        1.0, "Fraction of each head's features that are rotated (GLM-4: 0.5).", above=0, at_most=1
    )
    rotary_base: float = setting(10000.0, "RoPE base (theta).", above=1, on_resume="phase")
    rotary_base_local: float | None = setting(
        None, "RoPE base of local layers (ModernBERT: 10000); null = rotary_base.", above=1
    )
    rotary_scaling: tuple[float, ...] = setting(
        (),
        "Llama 3 RoPE scaling: [factor, low frequency factor, high frequency factor, original context "
        "length], such as [8, 1, 4, 8192]; [] = off.",
    )
    query_key_norm: bool = setting(False, "RMSNorm on the queries and keys of each head (Qwen3).")
    query_key_norm_over: str = setting(
        "head",
        "What query_key_norm norms: each head by itself, or the queries of all heads together and the keys of all "
        "(OLMoE; not with tensor parallelism).",
        one_of=("head", "all"),
    )
    attention_window: int = setting(
        0,
        "Sliding window: local layers attend to tokens at most this many positions away (ModernBERT: 64); 0"
        " = all layers are global.",
        at_least=0,
    )
    global_every: int = setting(
        1,
        "With attention_window: every n-th layer (0, n, 2n, ...) is global, the others are local "
        "(ModernBERT: 3).",
        at_least=1,
    )
    relative: str = setting(
        "none",
        "Relative positions in attention scores: none; buckets = bias per distance bucket (T5, UniLMv2); "
        "xlnet = Transformer-XL terms, segment terms and a query stream; disentangled = content-to-position"
        " and position-to-content (DeBERTa).",
        one_of=RELATIVE,
    )
    position_buckets: int = setting(
        0,
        "Relative position buckets per direction, half of them logarithmic (DeBERTa-v3: 256); 0 = one per "
        "distance.",
        at_least=0,
    )
    position_projections: bool = setting(
        False, "Separate query and key projections for relative positions; false = shared with the tokens."
    )
    position_norm: bool = setting(
        False, "Norm on the relative position embeddings (with relative disentangled)."
    )
    unscaled_scores: bool = setting(False, "Do not divide attention scores by sqrt(head size) (T5).")
    norm: str = setting(
        "pre",
        "pre: x + f(LayerNorm(x)) and a final LayerNorm (GLM, GPT-2); post: LayerNorm(x + f(x)) (BERT, "
        "GPT); deepnorm: LayerNorm(sqrt(2L) x + f(x)) (GLM-130B).",
        one_of=NORMS,
    )
    sandwich_norm: bool = setting(
        False, "Additional LayerNorm on the outputs of attention and FFN (GLM-4-0414)."
    )
    embedding_norm: bool = setting(False, "LayerNorm on the sum of the embeddings (BERT, ALBERT, BART).")
    first_norm: bool = setting(
        True, "With norm pre: LayerNorm before the first attention; false for ModernBERT."
    )
    norm_bias: bool = setting(True, "LayerNorm has a bias; false = weight only (ModernBERT).")
    rms_norm: bool = setting(False, "RMSNorm instead of LayerNorm (T5).")
    layernorm_epsilon: float = setting(1e-5, "Epsilon of every LayerNorm.", above=0)
    activation: str = setting(
        "gelu_tanh",
        "Activation of the FFN and of the heads. GLM was trained with gelu_tanh; its Hugging Face code "
        "computes gelu_erf.",
        one_of=ACTIVATIONS,
    )
    biases: str = setting(
        "all", "Linear layers of a block that have a bias: all, qkv, mlp (XLNet) or none (T5).", one_of=BIASES
    )
    embedding_dropout: float = setting(0.1, "Dropout probability after the embeddings.", at_least=0, below=1)
    attention_dropout: float = setting(0.1, "Dropout probability on attention weights.", at_least=0, below=1)
    activation_dropout: float = setting(
        0.0, "Dropout probability inside the FFN, after the activation (MASS).", at_least=0, below=1
    )
    output_dropout: float = setting(
        0.1, "Dropout probability on the outputs of attention and FFN.", at_least=0, below=1
    )
    final_dropout: float = setting(
        0.0, "Dropout probability after the final norm of each stack (T5, XLNet).", at_least=0, below=1
    )
    init: str = setting(
        "gpt2",
        "Weight initialization: plain = N(0, init_std^2); uniform = U(-init_std, init_std) (NeoBERT); gpt2 "
        "= plain, but output projections with init_std/sqrt(2L); t5 = scaled by the size of each matrix; "
        "deepnorm = Xavier in the blocks, with value, output and FFN matrices divided by sqrt(2L).",
        one_of=INITS,
    )
    init_std: float = setting(0.02, "Standard deviation of the initial weights.", above=0)
    mup: MupConfig | None = setting(
        None,
        "muP (arXiv:2203.03466): scale initial weights, learning rates and logits with the width, so that a"
        " learning rate tuned on a narrow base model transfers; null = off.",
    )
    init_cutoff: float | None = setting(
        None,
        "Truncate the initial weights at this many standard deviations (ModernBERT: 2); null = not "
        "truncated.",
        above=0,
    )
    init_words_std: float | None = setting(
        None, "Standard deviation of the initial word embedding; null = as init and init_std.", above=0
    )
    init_positions_std: float | None = setting(
        None, "Standard deviation of the initial position embeddings; null = as init and init_std.", above=0
    )
    embedding_gradient_shrink: float = setting(
        1.0,
        "Multiplies the gradient of the embeddings (GLM-130B: 0.1); 1 = off.",
        above=0,
        at_most=1,
        on_resume="phase",
    )
    scale_embedding: bool = setting(False, "Multiply word embeddings by sqrt(hidden_size) (MASS).")
    segments: int = setting(
        0,
        "Rows of the segment embedding: 2 for BERT (segments A and B), 6 for UniLM (types of language "
        "model), 1 for RoBERTa (added to every token); 0 = none.",
        at_least=0,
    )
    task_types: int = setting(
        0, "Rows of the task embedding, one per objective (ERNIE 2.0: 16); 0 = none.", at_least=0
    )
    task_rows: tuple[int, ...] = setting(
        (),
        "Row of the task embedding for each loss, by loss number. Filled in at the start: objectives take "
        "rows 0, 1, ... in order, and rows of a checkpoint are kept. [] in a checkpoint = the loss number.",
        on_resume="free",
    )
    tie_word_embeddings: bool = setting(
        True, "Share the word embedding with the output projection; false = a separate output matrix (GLM-4)."
    )
    scale_head: bool = setting(
        False, "Multiply the input of the output projection by 1/sqrt(hidden_size) (T5)."
    )
    logit_soft_cap: float | None = setting(
        None, "Soft cap k on the token logits, k tanh(logit / k) (Gemma 2); null = none.", above=0
    )
    head_transform: bool = setting(
        False, "Dense layer with activation and norm before the output projection (BERT)."
    )
    head_transform_bias: bool = setting(True, "Bias in the dense layer of head_transform.")
    head_bias: bool = setting(False, "Per-token bias in the output projection (BERT, XLNet).")
    sentence_classes: int = setting(
        0, "Classes of the sentence-pair head on CLS: 2 for BERT, ALBERT, UniLM; 0 = no head.", at_least=0
    )
    class_heads: tuple[str, ...] = setting(
        (), "Additional classification heads as NAME:CLASSES, such as sentence_reordering:9."
    )
    sentence_dropout: float = setting(
        0.0,
        "Dropout probability before the classifier of the sentence-pair head (ALBERT: 0.1).",
        at_least=0,
        below=1,
    )
    task_head: TaskHeadConfig = section(TaskHeadConfig)
    span_boundary_places: int = setting(
        0,
        "Positions that SpanBERT's boundary head predicts from the tokens around a span; 0 = no such head.",
        at_least=0,
    )
    embedding_size: int | None = setting(
        None, "Size of the word embedding (ALBERT: 128); null = hidden_size.", at_least=1
    )
    share_layers: str = setting(
        "none",
        "Weights shared by all blocks: none, attention, ffn (both without norms) or all (ALBERT).",
        one_of=("none", "attention", "ffn", "all"),
    )
    adapter_size: int = setting(
        0, "Bottleneck size of the adapters that fine-tuning adds, such as 64; 0 = none.", at_least=0
    )
    lora: LoraConfig | None = setting(
        None,
        "LoRA: train low-rank updates of the blocks' linear layers and nothing else (fine-tuning: the new head "
        "too); null = off.",
    )

    def __post_init__(self) -> None:
        _check_model(self)

    @property
    def begins_by_width(self) -> bool:
        """Whether `init` scales initial weights by the widths of the matrices (muP does so itself)."""
        return self.init in ("t5", "deepnorm")

    @property
    def width_ratio(self) -> float:
        """hidden_size over that of muP's base model; 1 without muP."""
        return self.hidden_size / self.mup.base_hidden_size if self.mup else 1.0

    @property
    def query_factor(self) -> float:
        """Factor of the queries. Kernels always divide scores by sqrt(head size), so other scales are put here."""
        base = self.mup.base_head_size if self.mup else None
        scale = self.head_size if self.unscaled_scores else (base or self.head_size) / self.head_size
        return math.sqrt(scale / 3 if self.relative == "disentangled" else scale)

    @property
    def has_task_pooler(self) -> bool:
        """Whether a pooler comes before the task's head."""
        return self.task_head.has_pooler(is_pretrained=self.sentence_classes > 0)

    def is_local(self, layer: int) -> bool:
        """Whether a layer attends within `attention_window` only."""
        return self.attention_window > 0 and layer % self.global_every > 0

    @property
    def local_share(self) -> float:
        """The fraction of layers that are local."""
        return sum(map(self.is_local, range(self.num_layers))) / self.num_layers

    @property
    def has_distance_scores(self) -> bool:
        """Whether scores have learned terms of distances and segments, and the query stream starts from one vector."""
        return self.relative == "xlnet"

    @property
    def has_query_terms(self) -> bool:
        """Whether relative positions add terms to the scores that depend on queries."""
        return self.relative in ("xlnet", "disentangled")

    @property
    def position_rows(self) -> int:
        """Rows of the table of disentangled relative positions: the buckets of both directions."""
        return 2 * (self.position_buckets or self.max_position + 1)

    @property
    def is_plain(self) -> bool:
        """Whether the model has only GLM's own layers and heads: only such models can be exported in GLM's format."""
        return _is_plain(self)

    @property
    def has_plain_blocks(self) -> bool:
        """Whether fused_block.py can compute the blocks."""
        others = self.decoder_layers, self.sandwich_norm, self.adapter_size, self.activation_dropout
        is_plain = self.norm == "pre" and self.share_layers == self.relative == "none" and not any(others)
        return is_plain and self.lora is None and self.experts is None and self.query_key_norm_over == "head"

    @property
    def has_position_tables(self) -> bool:
        """Whether a learned table limits the positions."""
        return self.positions.startswith("learned") or self.block_positions == "table"

    @property
    def total_layers(self) -> int:
        """Blocks of encoder and decoder."""
        return self.num_layers + self.decoder_layers

    @property
    def head_size(self) -> int:
        """Width of an attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def attention_size(self) -> int:
        """Width of the queries of all heads together."""
        return self.num_attention_heads * self.head_size

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and of values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Features of a head that rotary positions rotate."""
        return int(self.rotary_share * self.head_size)

    @property
    def inner_size(self) -> int:
        """Inner width of the FFN."""
        return self.ffn_size or 4 * self.hidden_size

    def has_experts(self, layer: int) -> bool:
        """Whether the FFN of a block is a mixture of experts."""
        return self.experts is not None and layer >= self.experts.dense_layers

    def has_bias(self, product: str) -> bool:
        """Whether a linear layer of a block has a bias. Args: product: "qkv", "attention" (its output) or "mlp"."""
        return self.biases == "all" or self.biases == product


# Dotted names of options that change training, but not what a trained model computes.
OF_TRAINING = frozenset(
    (
        "system", "embedding_dropout", "attention_dropout", "activation_dropout", "output_dropout", "final_dropout",
        "sentence_dropout", "task_head.dropout", "task_head.pooler", "init", "init_std", "init_cutoff",
        "init_words_std", "init_positions_std", "embedding_gradient_shrink",
        *(f"experts.{name}" for name in OF_BALANCE),
    )
)  # fmt: skip
# All options that GLM's exported class supports.
_OF_GLM = OF_TRAINING | {
    "num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position", "layernorm_epsilon", "activation",
    "positions", "block_positions", "rotary_share", "rotary_base", "task_head",
    "logit_soft_cap", "mup",
}  # fmt: skip


# (positions, block_positions) that need no rotary positions.
_WITHOUT_ROTARY = (("learned_blocks", "added"), ("learned", "added"), ("none", "added"), ("learned", "none"))


def _check_model(model: ModelConfig) -> None:
    """Raise ConfigError for options that contradict each other."""
    check(
        model.head_dim is not None or model.hidden_size % model.num_attention_heads == 0,
        f"model.num_attention_heads ({model.num_attention_heads}) must divide model.hidden_size "
        f"({model.hidden_size}); choose a divisor of {model.hidden_size}, or set model.head_dim.",
    )
    check(
        model.num_attention_heads % model.key_value_heads == 0,
        f"model.num_key_value_heads ({model.num_key_value_heads}) must divide model.num_attention_heads "
        f"({model.num_attention_heads}); choose a divisor of {model.num_attention_heads}.",
    )
    check(
        model.positions == "rotary" or (model.positions, model.block_positions) in _WITHOUT_ROTARY,
        f"model.block_positions is {model.block_positions} with model.positions {model.positions}, but it "
        "needs rotary positions; set positions to rotary, or remove block_positions.",
    )
    divisor, rule = (4, "a multiple of 4") if model.block_positions == "halves" else (2, "an even number")
    check(
        model.positions != "rotary" or (model.rotary_size > 0 and model.rotary_size % divisor == 0),
        f"model.rotary_share ({model.rotary_share}) of head size {model.head_size} gives "
        f"{model.rotary_size} rotated features, which must be {rule}; change rotary_share.",
    )
    scaling = model.rotary_scaling
    check(
        not scaling or (len(scaling) == 4 and min(scaling) > 0 and scaling[1] < scaling[2]),
        f"model.rotary_scaling is {list(scaling)}; it must be [] or four positive numbers: factor, low "
        "frequency factor, high frequency factor (above the low one), original context length.",
    )
    check(
        not model.decoder_layers or model.share_layers == "none",
        f"model.share_layers is {model.share_layers} with model.decoder_layers ({model.decoder_layers}), "
        "but encoder and decoder blocks cannot share weights; set share_layers to none.",
    )
    single_stack_options = {
        "positions": model.positions == "rotary",
        "relative": model.has_query_terms,
        "norm": model.norm == "deepnorm",
        "sandwich_norm": model.sandwich_norm,
        "attention_window": model.attention_window > 0,
        "first_norm": not model.first_norm,
        "num_key_value_heads": model.num_key_value_heads is not None,
        "query_key_norm": model.query_key_norm,
    }
    for name, is_chosen in single_stack_options.items():
        check(
            not (model.decoder_layers and is_chosen),
            f"model.{name} is {getattr(model, name)} with model.decoder_layers ({model.decoder_layers}), but "
            f"cross-attention does not support it; set decoder_layers to 0, or remove {name}.",
        )
    check(
        model.sentence_classes != 1,
        "model.sentence_classes is 1; a classification head needs at least 2 classes: set it to 2, or to "
        "0 for no head.",
    )
    _check_class_heads(model)
    _check_norms(model)
    _check_windows(model)
    _check_disentangled(model)
    _check_mup(model)
    check_lora(model)
    check_experts(model)
    check_task_head(model)


def _check_class_heads(model: ModelConfig) -> None:
    heads = dict(head.partition(":")[::2] for head in model.class_heads)
    fit = all(name in CLASS_HEADS and n.isdecimal() and 1 < int(n) < 10_000 for name, n in heads.items())
    check(
        fit and len(heads) == len(model.class_heads),
        f"model.class_heads is {list(model.class_heads)}; each entry must be NAME:CLASSES with at least 2 "
        f"classes and a distinct NAME of {', '.join(CLASS_HEADS)}.",
    )
    check(
        model.sentence_classes > 0 or not model.class_heads,
        f"model.class_heads is {list(model.class_heads)}, but these heads use the pooler of "
        "model.sentence_classes, which is 0; set sentence_classes to 2.",
    )


def _check_norms(model: ModelConfig) -> None:
    check(
        model.first_norm or (model.norm == "pre" and model.share_layers != "all"),
        f"model.first_norm is false with model.norm {model.norm} and model.share_layers "
        f"{model.share_layers}, but it needs norm pre and separate blocks; remove first_norm.",
    )
    check(
        model.norm_bias or not model.rms_norm,
        "model.norm_bias is false with model.rms_norm, but RMSNorm has no bias; remove one of them.",
    )

    check(
        model.query_key_norm or model.query_key_norm_over == "head",
        f"model.query_key_norm_over is {model.query_key_norm_over}, but query_key_norm is false; set it to true, or "
        "query_key_norm_over to head.",
    )


def _check_windows(model: ModelConfig) -> None:
    check(
        (model.attention_window > 0) == (model.global_every > 1),
        f"model.attention_window is {model.attention_window} with model.global_every "
        f"{model.global_every}; local layers need attention_window above 0 and global_every above 1: set "
        "both, or remove both.",
    )
    check(
        model.rotary_base_local is None or (model.attention_window > 0 and model.positions == "rotary"),
        f"model.rotary_base_local is {model.rotary_base_local}, but it needs local layers with rotary "
        "positions; set positions to rotary and attention_window, or remove it.",
    )
    check(
        not model.attention_window or model.relative == "none",
        f"model.relative is {model.relative} with model.attention_window ({model.attention_window}), but "
        "local layers do not support relative positions; remove one of them.",
    )


def _check_disentangled(model: ModelConfig) -> None:
    """Rules of relative "disentangled", and of the options that only it uses."""
    is_chosen, half = model.relative == "disentangled", model.position_buckets // 2
    for name, default in (("position_buckets", 0), ("position_projections", False), ("position_norm", False)):
        value = getattr(model, name)
        check(
            is_chosen or value == default,
            f"model.{name} is {value} with model.relative {model.relative}; set relative to disentangled, or "
            f"remove {name}.",
        )
    check(
        not model.position_buckets or (model.position_buckets == 2 * half and 2 <= half < model.max_position),
        f"model.position_buckets is {model.position_buckets} with model.max_position "
        f"({model.max_position}); it must be even, and half of it at least 2 and below max_position, or 0 "
        "for one bucket per distance.",
    )
    others = {
        "positions": model.positions == "rotary",
        "num_key_value_heads": model.key_value_heads != model.num_attention_heads,
        "query_key_norm": model.query_key_norm,
    }
    for name, is_other in others.items():
        check(
            not (is_chosen and is_other),
            f"model.{name} is {getattr(model, name)} with model.relative disentangled, which does not support "
            "it; remove one of them.",
        )


def _check_mup(model: ModelConfig) -> None:
    # muP has no rule for these options: the model would silently train at wrong learning rates.
    not_covered = {
        "init": model.begins_by_width,
        "embedding_size": model.embedding_size is not None,
        "relative": model.has_query_terms,
        "unscaled_scores": model.unscaled_scores,
        "scale_head": model.scale_head,
        "scale_embedding": model.scale_embedding,
    }
    for name, is_chosen in not_covered.items():
        check(
            not (model.mup and is_chosen),
            f"model.{name} is {getattr(model, name)} with model.mup, which does not cover it; remove one of "
            "them.",
        )


def _is_plain(model: ModelConfig) -> bool:
    """See `ModelConfig.is_plain`."""
    others = (field for field in fields(model) if field.name not in _OF_GLM)
    # Options that are not listed count: a new option is refused until GLM's class supports it.
    is_default = all(getattr(model, field.name) == field.default for field in others)
    head = model.task_head
    has_its_head = head.type in ("none", *OF_TEXTS) and not (
        model.has_task_pooler or head.has_pool or head.mix
    )
    is_known = model.activation.startswith("gelu") and model.positions in ("learned_blocks", "rotary")
    return is_default and is_known and has_its_head


def require_class(model: ModelConfig) -> None:
    """Raise ConfigError for a new run with an option that its system's class of transformers does not have."""
    for name, value in FIXED.get(model.system or "", {}).items():
        check(
            getattr(model, name) == value,
            f"model.{name} is {getattr(model, name)} with model.system {model.system}, but its transformers "
            f"class requires {value}, so the model could not be exported; set it to {value}, or choose "
            "another system.",
        )


def require_rotary(model: ModelConfig) -> None:
    """Raise ConfigError for a new run with an option of rotary positions where the model has none.

    A system's own value may stay, so that `positions` is one setting of an ablation.
    """
    of_system = SYSTEMS.get(model.system or "", {})
    for field in fields(model):
        value = getattr(model, field.name)
        check(
            model.positions == "rotary"
            or field.name not in ("rotary_share", "rotary_base", "rotary_scaling")
            or value == of_system.get(field.name, field.default),
            f"model.{field.name} is {value} with model.positions {model.positions}, but only rotary positions read "
            f"it; set positions to rotary, or remove {field.name}.",
        )
