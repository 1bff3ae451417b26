"""The section `model` of the configuration: the Transformer.

The options are orthogonal. Their defaults are GLM's; systems.py has those of the other systems.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from data_utils.common.losses import MOST_LOSSES
from data_utils.common.settings import REQUIRED, Former, checked, setting
from megatron_lite.config.systems import LEFT_OUT, SYSTEMS

ACTIVATIONS = ("gelu_tanh", "gelu_erf", "relu", "silu")
NORMS = ("pre", "post", "deepnorm")
POSITIONS = ("learned_blocks", "learned", "rotary", "none")
BLOCK_POSITIONS = ("added", "table", "halves", "none")
RELATIVE = ("none", "buckets", "xlnet", "disentangled")
FFNS = ("plain", "gated")
BIASES = ("all", "qkv", "mlp", "none")
TASK_HEADS = ("none", "classes", "values", "tags", "spans")
INITS = ("gpt2", "plain", "uniform", "t5", "deepnorm")
FORMER_SETTINGS: Former = {
    "gelu": ("activation", {"tanh": "gelu_tanh", "erf": "gelu_erf"}),
    "sentence_head": ("sentence_classes", {False: 0, True: 2}),
    "task_embedding": ("task_types", {False: 0, True: MOST_LOSSES}),
    "share_layers": ("share_layers", {False: "none", True: "all"}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("model.mup")
class MupConfig:
    base_hidden_size: int = setting(REQUIRED, "hidden_size of the narrow model", at_least=1)
    base_head_size: int | None = setting(None, "width of its heads; null = that of this model", at_least=1)


VOCAB_MULTIPLE = 128  # the reference pads vocabularies to a multiple of this, which suits GPU matrix units


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int = 1) -> int:
    """Rows of the word embedding: `vocab_size` rounded up so that every shard has a multiple of 128 rows."""
    multiple = VOCAB_MULTIPLE * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("model", former=FORMER_SETTINGS, presets=("system", SYSTEMS))
class ModelConfig:
    system: str | None = setting(
        None,
        "a published system, which sets the options of its architecture where the file does not; null = glm",
        one_of=tuple(SYSTEMS),
        left_out=LEFT_OUT,
    )
    num_layers: int = setting(REQUIRED, "Transformer blocks; with decoder_layers the encoder's", at_least=1)
    decoder_layers: int = setting(
        0, "blocks of a decoder with cross-attention (T5, BART, MASS); 0 = one stack", at_least=0
    )
    hidden_size: int = setting(REQUIRED, "width of the residual stream", at_least=1)
    num_attention_heads: int = setting(
        REQUIRED, "attention heads; must divide hidden_size where head_dim is null", at_least=1
    )
    head_dim: int | None = setting(None, "width of a head; null = hidden_size / number of heads", at_least=1)
    num_key_value_heads: int | None = setting(
        None,
        "heads of keys and values, each shared by a group of attention heads (GLM-4: 2); null = num_attention_heads",
        at_least=1,
    )
    ffn: str = setting(
        "plain",
        "plain: W2 activation(W1 x); gated: W2 (activation(Wg x) * W1 x), with both in one matrix (GLM-4, GLM-130B)",
        one_of=FFNS,
    )
    ffn_size: int | None = setting(None, "inner width of the FFN; null = 4 hidden_size", at_least=1)
    vocab_size: int | None = setting(
        None, "ids of the tokenizer, special ones counted, unpadded; null = the tokenizer's", at_least=1
    )
    max_position: int = setting(512, "largest position id; the tables have max_position + 1 rows", at_least=1)
    positions: str = setting(
        "learned_blocks",
        "tables of position ids: learned_blocks (GLM: in the text, and in the span), learned (in the text); rotary: no "
        "table, queries and keys are turned (GLM-4); none",
        one_of=POSITIONS,
    )
    block_positions: str = setting(
        "added",
        "what rotary positions do with the position in a span: added (to that in the text: spans continue from their "
        "mask), table (a learned one, as in learned_blocks), halves (it turns the second half of the features that "
        "are turned, that in the text the first; ChatGLM-6B), none (nothing: GLM's ablation, for learned ones too)",
        one_of=BLOCK_POSITIONS,
    )
    rotary_share: float = setting(
        1.0, "part of the features of each head that rotary positions turn (GLM-4: 0.5)", above=0, at_most=1
    )
    rotary_base: float = setting(10000.0, "base of the wavelengths of rotary positions", above=1)
    rotary_base_local: float | None = setting(
        None, "rotary_base of local layers (ModernBERT: 10000); null = rotary_base", above=1
    )
    rotary_scaling: tuple[float, ...] = setting(
        (),
        "Llama 3's longer wavelengths: factor, low and high frequency factor, original length, as [8, 1, 4, 8192]; "
        "[] = none",
    )
    query_key_norm: bool = setting(False, "RMSNorm of each head's queries and keys (Qwen3)")
    attention_window: int = setting(
        0,
        "local layers see tokens whose position ids differ by this many at most (ModernBERT: 64); 0 = all are global",
        at_least=0,
    )
    global_every: int = setting(
        1, "layers 0, n, 2n, ... are global, with attention_window others local (ModernBERT: 3)", at_least=1
    )
    relative: str = setting(
        "none",
        "relative positions in the scores of attention: none; buckets of distances (T5, UniLMv2); xlnet: also "
        "segments, and one vector for what is predicted; disentangled: buckets with queries and keys (DeBERTa)",
        one_of=RELATIVE,
    )
    position_buckets: int = setting(
        0, "buckets of each direction, half of them logarithmic (DeBERTa-v3: 256); 0 = all apart", at_least=0
    )
    position_projections: bool = setting(False, "buckets have matrices of queries and keys of their own")
    position_norm: bool = setting(False, "a norm of the buckets' embeddings, of relative disentangled")
    unscaled_scores: bool = setting(False, "scores without the factor 1/sqrt(width of a head) (T5)")
    norm: str = setting(
        "pre",
        "pre: x + f(LayerNorm(x)) and a final LayerNorm (GLM, GPT-2); post: LayerNorm(x + f(x)) (BERT, GPT); deepnorm: "
        "LayerNorm(sqrt(2L) x + f(x)) (GLM-130B)",
        one_of=NORMS,
    )
    sandwich_norm: bool = setting(False, "LayerNorm on the outputs of attention and FFN too (GLM-4-0414)")
    embedding_norm: bool = setting(False, "LayerNorm on the sum of the embeddings (BERT, ALBERT, BART)")
    first_norm: bool = setting(True, "with norm pre also before the first attention (ModernBERT: false)")
    norm_bias: bool = setting(True, "a bias in every LayerNorm; false: a weight alone (ModernBERT)")
    rms_norm: bool = setting(False, "divide by the root mean square instead of LayerNorm (T5)")
    layernorm_epsilon: float = setting(1e-5, "epsilon of every LayerNorm", above=0)
    activation: str = setting(
        "gelu_tanh",
        "of the FFN and of heads. GLM was trained with gelu_tanh; its Hugging Face code computes gelu_erf",
        one_of=ACTIVATIONS,
    )
    biases: str = setting(
        "all", "which products of a block have a bias: all, qkv, mlp (XLNet) or none (T5)", one_of=BIASES
    )
    embedding_dropout: float = setting(0.1, "dropout probability after the embeddings", at_least=0, below=1)
    attention_dropout: float = setting(0.1, "dropout probability on attention weights", at_least=0, below=1)
    activation_dropout: float = setting(
        0.0, "dropout probability within the FFN, after the activation (MASS)", at_least=0, below=1
    )
    output_dropout: float = setting(
        0.1, "dropout probability on the output of attention and FFN", at_least=0, below=1
    )
    final_dropout: float = setting(
        0.0, "dropout probability after the last norm of each stack (T5, XLNet)", at_least=0, below=1
    )
    init: str = setting(
        "gpt2",
        "initial weights: plain = all N(0, init_std^2); uniform = all between -init_std and init_std (NeoBERT); gpt2 = "
        "output projections init_std/sqrt(2L); t5 = by the widths of each matrix; deepnorm = in blocks Xavier's, of "
        "values, output projections and FFN over sqrt(2L)",
        one_of=INITS,
    )
    init_std: float = setting(0.02, "standard deviation of initial weights", above=0)
    mup: MupConfig | None = setting(
        None,
        "initial scales, rates and logits follow the width, so that a learning rate found on a narrow model of the "
        "same proportions serves this one (muP, arXiv:2203.03466); null = no",
    )
    init_cutoff: float | None = setting(
        None, "standard deviations beyond which initial weights are drawn again (ModernBERT: 2)", above=0
    )
    init_words_std: float | None = setting(
        None, "standard deviation of initial word embeddings; null = as init and init_std say", above=0
    )
    init_positions_std: float | None = setting(
        None, "standard deviation of initial tables of positions; null = as init and init_std say", above=0
    )
    embedding_gradient_shrink: float = setting(
        1.0, "factor on the gradient of embeddings (GLM-130B: 0.1); 1 = off", above=0, at_most=1
    )
    scale_embedding: bool = setting(False, "multiply word embeddings by sqrt(hidden_size) (MASS)")
    segments: int = setting(
        0,
        "rows of a segment embedding: BERT 2 (texts A and B), UniLM 6 (kinds of language model), RoBERTa 1 (added to "
        "every token), 0 = none",
        at_least=0,
    )
    task_types: int = setting(0, "rows of an embedding of objectives (ERNIE 2.0: 16), 0 = none", at_least=0)
    task_rows: tuple[int, ...] = setting(
        (),
        "row of that embedding for each loss, by its number; a start fills it in: objectives take rows 0, 1, ... in "
        "their order, and a checkpoint's rows stay. () in a checkpoint: the loss's number itself",
    )
    tie_word_embeddings: bool = setting(
        True, "predict tokens through the word embedding; false: through a matrix of its own (GLM-4)"
    )
    scale_head: bool = setting(False, "multiply what the output projection takes by 1/sqrt(hidden_size) (T5)")
    logit_soft_cap: float | None = setting(
        None, "bound k of the logits of tokens, k tanh(logit / k) (Gemma 2); null = none", above=0
    )
    head_transform: bool = setting(False, "a layer with activation and norm before the output matrix (BERT)")
    head_transform_bias: bool = setting(True, "a bias in that layer's product")
    head_bias: bool = setting(False, "a bias for each token of the output projection (BERT, XLNet)")
    sentence_classes: int = setting(
        0, "classes of a head on CLS for two sentences: 2 (BERT, ALBERT, UniLM), 0 = none", at_least=0
    )
    class_heads: tuple[str, ...] = setting((), "further heads of classes: sentence_reordering:9, ...")
    sentence_dropout: float = setting(
        0.0, "dropout probability before the classes of the head on CLS (ALBERT: 0.1)", at_least=0, below=1
    )
    task_head: str = setting(
        "none",
        "a head that fine-tuning adds: classes or values (of a text), tags (of words), spans (first and last token of "
        "an answer); none = tasks are solved by predicting tokens",
        one_of=TASK_HEADS,
    )
    task_classes: int = setting(0, "classes or tags of the task's head", at_least=0)
    task_heads: tuple[str, ...] = setting(
        (), "heads of several tasks, each NAME:KIND:CLASSES, as fine-tuning on several tasks fills them in"
    )
    task_pooler: bool | None = setting(
        None,
        "a layer (task_pooler_kind) before the head of classes or values: that of the head on CLS where the model has "
        "one, else a new one; null = where the model has one",
    )
    task_pooler_kind: str = setting(
        "tanh",
        "that layer's activation: tanh, or gelu (ELECTRA); transform: it is head_transform, also for tags and spans "
        "(ModernBERT)",
        one_of=("tanh", "gelu", "transform"),
    )
    task_mix: bool = setting(
        False,
        "the task's head reads a learned mix of the embeddings' and all blocks' outputs, not the last one's (ELMo)",
    )
    task_pool: str = setting(
        "token",
        "what the head of classes or values reads of a text: token (the one that stands for it), or concat (that one, "
        "the maximum and the mean of all of them, through a layer with ReLU; ULMFiT)",
        one_of=("token", "concat"),
    )
    task_dropout: float = setting(0.1, "dropout probability before the task's head", at_least=0, below=1)
    span_boundary_places: int = setting(
        0, "places of SpanBERT's head, which predicts a span from the tokens around it; 0 = none", at_least=0
    )
    embedding_size: int | None = setting(None, "width of embeddings (ALBERT: 128); null = same", at_least=1)
    share_layers: str = setting(
        "none",
        "weights that all blocks share: none, those of attention, of ffn (both without norms), or all (ALBERT)",
        one_of=("none", "attention", "ffn", "all"),
    )
    adapter_size: int = setting(0, "inner width of fine-tuning's adapters: 64; 0 = none", at_least=0)

    def __post_init__(self) -> None:
        from megatron_lite.config.model_rules import check_model

        check_model(self)

    @property
    def begins_by_width(self) -> bool:
        """Whether initial values follow the widths of the matrices without muP."""
        return self.init in ("t5", "deepnorm")

    @property
    def width_ratio(self) -> float:
        """The width over that of muP's base model; 1 without muP."""
        return self.hidden_size / self.mup.base_hidden_size if self.mup else 1.0

    @property
    def query_factor(self) -> float:
        """Factor of the queries, for kernels that scale scores by 1 / sqrt(head size)."""
        base = self.mup.base_head_size if self.mup else None
        scale = self.head_size if self.unscaled_scores else (base or self.head_size) / self.head_size
        return math.sqrt(scale / 3 if self.relative == "disentangled" else scale)

    @property
    def task_outputs(self) -> int:
        """Numbers that the task's head computes for a row; 0 = there is no head."""
        return {"none": 0, "values": 1, "spans": 2}.get(self.task_head, self.task_classes)

    @property
    def has_task_pooler(self) -> bool:
        """Whether the layer of task_pooler comes before the task's head."""
        chosen = self.sentence_classes > 0 if self.task_pooler is None else self.task_pooler
        heads = ("classes", "values") if self.task_pooler_kind != "transform" else TASK_HEADS[1:]
        kinds = {self.task_head, *(head.split(":")[1] for head in self.task_heads)}
        return chosen and not kinds.isdisjoint(heads) and not self.has_task_pool

    @property
    def has_task_pool(self) -> bool:
        """Whether the task's head reads all tokens of a text."""
        return self.task_pool != "token" and self.task_head in ("classes", "values")

    def is_local(self, layer: int) -> bool:
        """Whether a layer sees only what is near."""
        return self.attention_window > 0 and layer % self.global_every > 0

    @property
    def local_share(self) -> float:
        """Part of all layers that are local."""
        return sum(map(self.is_local, range(self.num_layers))) / self.num_layers

    @property
    def has_distance_scores(self) -> bool:
        """Whether scores have learned terms of distances and segments, and a query stream begins with one vector."""
        return self.relative == "xlnet"

    @property
    def has_query_terms(self) -> bool:
        """Whether relative positions add terms to the scores that depend on queries."""
        return self.relative in ("xlnet", "disentangled")

    @property
    def position_rows(self) -> int:
        """Buckets of both directions, of relative positions that are disentangled."""
        return 2 * (self.position_buckets or self.max_position + 1)

    @property
    def is_plain(self) -> bool:
        """True for GLM's own layers and heads and no others: only such models can be exported in GLM's format."""
        from megatron_lite.config.model_rules import is_plain

        return is_plain(self)

    @property
    def has_plain_blocks(self) -> bool:
        """Whether blocks are those that one function of autograd computes (fused_block.py)."""
        others = self.decoder_layers, self.sandwich_norm, self.adapter_size, self.activation_dropout
        return self.norm == "pre" and self.share_layers == self.relative == "none" and not any(others)

    @property
    def has_position_tables(self) -> bool:
        """Whether a learned table ends the positions that the model can take."""
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
        """Width of all heads together: of the queries, the keys and the values."""
        return self.num_attention_heads * self.head_size

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and of values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Features of a head that rotary positions turn."""
        return int(self.rotary_share * self.head_size)

    @property
    def inner_size(self) -> int:
        """Inner width of the FFN."""
        return self.ffn_size or 4 * self.hidden_size

    def has_bias(self, product: str) -> bool:
        """Whether a product of a block has a bias. Args: product: "qkv", "attention" (its output) or "mlp"."""
        return self.biases == "all" or self.biases == product
