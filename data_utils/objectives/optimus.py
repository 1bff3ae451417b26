"""OPTIMUS (arXiv:2004.04092): sentences through a latent vector, from one stack into another.

One document of a row is one sentence x, twice. The encoder's tokens are `[CLS] x [SEP]`, of order 0. The decoder's are the memory
slot (order 1, position 0), whose keys and values each layer replaces by the latent vector's, and `<BOS> x` (orders 2, 3, ...),
which predict `x <EOS>`. Where there is no memory there is no slot, and positions begin at 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from data_utils.base.settings import check, checked, setting
from data_utils.objectives.rows import RowSizes

FEATURES = ("pooler", "cls")


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("optimus")
class OptimusConfig(RowSizes):
    """The latent vector, what carries it to the decoder, and the weight of its divergence over the steps."""

    latent_size: int = setting(32, "components of the latent vector", at_least=1)
    feature: str = setting(
        "pooler",
        "what of the encoder gives the latent vector: pooler (a dense layer and tanh on CLS, as the released code has it) "
        "or cls (the last layer's CLS itself, as the paper has it)",
        one_of=FEATURES,
    )
    memory: bool = setting(
        True, "whether the latent vector is a key and value of each of the decoder's layers"
    )
    embedding: bool = setting(True, "whether the latent vector is added to the decoder's embeddings")
    beta: float = setting(1.0, "the largest weight of the divergence; 0 = an autoencoder", at_least=0)
    cycles: int = setting(1, "how often the weight rises from 0, evenly over training.steps", at_least=1)
    zero_share: float = setting(0.5, "part of a cycle in which the weight is 0", at_least=0, at_most=1)
    rise_share: float = setting(0.25, "part of a cycle in which it rises to beta", at_least=0, at_most=1)
    free_bits: float = setting(
        1.0, "nats of each component's divergence below which it is not lowered further", at_least=0
    )
    length_weighted: bool = setting(
        False, "divide each sentence's reconstruction loss by its number of tokens"
    )
    encoder_from: str | None = setting(None, "run or checkpoint with whose weights the encoder begins")
    decoder_from: str | None = setting(None, "run or checkpoint with whose weights the decoder begins")

    def __post_init__(self) -> None:
        check(
            self.memory or self.embedding,
            "optimus.memory and optimus.embedding are both false, so that nothing carries the latent vector to the decoder; "
            "set one of them to true.",
        )
        shares = self.zero_share + self.rise_share
        check(
            shares <= 1.0,
            f"optimus.zero_share + optimus.rise_share is {shares:g}; together they must be at most 1.",
        )
