"""Configuration of GLM (autoregressive blank infilling) for transformers. Part of an export's code."""

from transformers import PretrainedConfig


class GLMConfig(PretrainedConfig):
    """Sizes, dropout and the token ids that mark blanks.

    The model type is not "glm": in transformers that is GLM-4, another architecture.

    Fields:
        vocab_size: rows of the word embedding; rows that only pad a training vocabulary are left out.
        max_position: largest value of both position ids; each table has one row more.
        positions: "learned_blocks" (both position ids have a table) or "rotary".
        block_positions: the block position with rotary positions: "added", "table", "halves" or "none"; see
            positions_glm.py.
        rotary_share, rotary_base: fraction of each head's features that is rotated; theta.
        attention_window: local layers attend to keys whose position id differs by at most this; 0 = no local layers.
            Layers 0, n, 2n, ... are global (n: global_every). rotary_base_local: theta of local layers; None =
            rotary_base.
        rms_norm, biases: RMSNorm instead of LayerNorm; "all" or "none", of the layers' products.
        ffn, ffn_size: "plain", or "gated": gelu of the first half, times the second; inner width, None = 4 hidden_size.
        gelu: "tanh" (how GLM is trained) or "erf" (what the released models' published code computes).
        mask_token_ids: the ids that stand for a blank: [MASK], [sMASK], [gMASK].
        trained_objectives: what the weights were pretrained on; without "blank_infilling" among them they are
            not used to fill blanks. None = unknown.
        sop_token_id, eop_token_id: start (input side) and end (target side) of a predicted span.
    """

    model_type = "glm-blank-infilling"
    attribute_map = {"num_hidden_layers": "num_layers"}  # noqa: RUF012  what transformers expects here
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 30527
    hidden_size: int = 768
    num_layers: int = 12
    num_attention_heads: int = 12
    max_position: int = 512
    positions: str = "learned_blocks"
    block_positions: str = "added"
    rotary_share: float = 1.0
    rotary_base: float = 10000.0
    attention_window: int = 0
    global_every: int = 1
    rotary_base_local: float | None = None
    rms_norm: bool = False
    biases: str = "all"
    ffn: str = "plain"
    ffn_size: int | None = None
    embedding_dropout: float = 0.1
    attention_dropout: float = 0.1
    output_dropout: float = 0.1
    layernorm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    gelu: str = "tanh"
    use_cache: bool = True
    tie_word_embeddings: bool = True
    cls_token_id: int | None = None
    sop_token_id: int | None = None
    eop_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    mask_token_ids: list[int] | None = None
    trained_objectives: list[str] | None = None

    def require_blank_infilling(self) -> None:
        """Raise ValueError if the weights were not trained to fill blanks."""
        if self.trained_objectives is not None and "blank_infilling" not in self.trained_objectives:
            raise ValueError(
                f"this model was trained on {', '.join(self.trained_objectives)}, which does not teach to fill "
                'blanks; train it on them and add "blank_infilling" to config.trained_objectives, or use another.'
            )


GLMConfig.register_for_auto_class()
