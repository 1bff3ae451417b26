"""OPTIMUS (arXiv:2004.04092): sentences through a latent vector, from one stack into another.

One document of a row is one sentence x, twice. The encoder's tokens are `[CLS] x [SEP]`, of order 0. The decoder's
are the memory slot (order 1, position 0), whose keys and values each layer replaces by the latent vector's, and
`<BOS> x` (orders 2, 3, ...), which predict `x <EOS>`. Where there is no memory there is no slot: orders begin at 1
and positions at 0. A sentence is a document without its eos.

The decoder may have a vocabulary of its own. The chunks of a sample are then each sentence in the encoder's tokens
and the same in the decoder's, by turns; else one chunk serves both. Nothing is drawn: a row is a function of its text
alone.

Source of the layout: ChunyuanLI/Optimus, code/examples/big_ae.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from data_utils.common.batch_fields import ONE_AS_INT32, ORD, POSITION_IDS, TARGETS, TOKENS, WEIGHTS
from data_utils.common.errors import DataError
from data_utils.common.losses import Loss
from data_utils.common.settings import check, checked, setting
from data_utils.objectives.base import RowObjective, WholeTextSizes
from data_utils.objectives.compiled import (
    Chunks,
    begin_row,
    compiled,
    copy_range,
    count_up,
    entry_point,
    mark_document,
    put,
    set_range,
)
from data_utils.objectives.own_model import NO_OPTIONS, require, require_alone
from data_utils.objectives.registry import register
from data_utils.tokenizers.vocabulary import Vocabulary

FEATURES = ("pooler", "cls")
_BOUNDARIES = 2  # CLS and SEP
# Options of both stacks, and the value that each must have.
_FIXED = {
    "decoder_layers": 0, "share_layers": "none", "embedding_size": None, "relative": "none", "adapter_size": 0,
    "mup": None,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("optimus")
class OptimusConfig(WholeTextSizes):
    """The latent vector, what carries it to the decoder, and the weight of its divergence over the steps."""

    latent_size: int = setting(32, "Dimension of the latent vector.", at_least=1)
    feature: str = setting(
        "pooler",
        "Encoder output that parametrises the posterior: pooler (dense layer and tanh on CLS, as in the "
        "released code) or cls (last hidden state of CLS, as in the paper).",
        one_of=FEATURES,
    )
    memory: bool = setting(True, "Add the latent vector as a key and value to every decoder layer.")
    embedding: bool = setting(True, "Add the latent vector to the decoder's embeddings.")
    beta: float = setting(1.0, "Maximum weight of the KL term; 0 = plain autoencoder.", at_least=0)
    cycles: int = setting(
        1, "Annealing cycles of the KL weight, spread evenly over training.steps.", at_least=1
    )
    zero_share: float = setting(
        0.5, "Fraction of a cycle during which the KL weight is 0.", at_least=0, at_most=1
    )
    rise_share: float = setting(
        0.25, "Fraction of a cycle during which the KL weight rises linearly to beta.", at_least=0, at_most=1
    )
    free_bits: float = setting(
        1.0, "Minimum KL per latent dimension, in nats; below it the KL term has no gradient.", at_least=0
    )
    noise_free: bool = setting(
        False,
        "Decode the posterior mean while the KL weight is 0 (plain autoencoder); false = sample then too, "
        "as the released code does.",
    )
    init_std: float | None = setting(
        None,
        "Standard deviation of the initial latent matrices; null = 1/sqrt(hidden_size) of the stack a "
        "matrix belongs to (posterior: encoder; memory, embedding: decoder), or that stack's init_std if it"
        " starts from trained weights.",
        above=0,
    )
    length_weighted: bool = setting(
        False, "Divide the reconstruction loss of each sentence by its length in tokens."
    )
    encoder_from: str | None = setting(None, "Run or checkpoint that initializes the encoder.", is_path=True)
    decoder_from: str | None = setting(None, "Run or checkpoint that initializes the decoder.", is_path=True)

    segments = 1
    needed_roles = ("cls", "sep")  # of the encoder; the decoder's: see check_vocabulary
    model_module = "megatron_lite.models.optimus.model_spec"
    model_files = ("latent.json", "latent.safetensors", "encoder/", "decoder/")
    has_second_stack = True
    own_model_advice = "joins two Transformers by a latent vector; use scripts/latent.py for it."

    def __post_init__(self) -> None:
        check(
            self.memory or self.embedding,
            "optimus.memory and optimus.embedding are both false, so the decoder does not receive the latent "
            "vector; set one of them to true.",
        )
        shares = self.zero_share + self.rise_share
        check(
            shares <= 1.0,
            f"optimus.zero_share + optimus.rise_share is {shares:g}; the sum must be at most 1.",
        )

    def check_run(self, config: Any) -> None:
        """Raise ConfigError unless the rest is as two stacks and a latent vector need it."""
        decoder = config.decoder
        check(
            decoder is not None,
            "the objective optimus needs a decoder, but the section decoder is null; set it as the section model "
            "is set for the encoder.",
        )
        require_alone(config, "optimus has samples of its own kind and stands")
        require(
            config.data, "data", {"short_prob": 0.0}, "but samples of optimus are rows of whole sentences"
        )
        self._check_rest(config)
        needed = self.max_position_needed(config.data.sequence_length)
        for key, stack in (("model", config.model), ("decoder", decoder)):
            require(stack, key, _FIXED, "which the stacks of optimus cannot have")
            check(
                needed <= stack.max_position or stack.positions == "none",
                f"data.sequence_length ({config.data.sequence_length}) needs position ids up to {needed}, but "
                f"{key}.max_position is {stack.max_position}; set it to {needed} or lower data.sequence_length.",
            )
        check(
            self.feature != "pooler" or config.model.sentence_classes > 0,
            "optimus.feature is pooler, but model.sentence_classes is 0, so the encoder has no pooler; set "
            "model.sentence_classes=2, or optimus.feature=cls.",
        )

    def _check_rest(self, config: Any) -> None:
        training = config.training
        sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
        require(config.parallel, "parallel", sizes, "but optimus runs with data parallelism and ZeRO only")
        check(
            self.cycles <= training.steps,
            f"optimus.cycles is {self.cycles}, more than training.steps ({training.steps}); lower it.",
        )
        model_from, stack_from = config.checkpoint.initialize_from, self.encoder_from or self.decoder_from
        check(
            model_from is None or stack_from is None,
            f"checkpoint.initialize_from is {model_from}, but optimus also initializes a stack from {stack_from}; set "
            "checkpoint.initialize_from, or optimus.encoder_from and decoder_from, to null.",
        )
        allowed = NO_OPTIONS | {"loss_normalization": "global_tokens"}
        why = "but the loss of optimus is a bound of each sentence's likelihood"
        require(config.training, "training", allowed, why)

    @property
    def has_target(self) -> bool:
        return True

    @property
    def loss_share(self) -> float:
        """Share of predicted tokens: the decoder's half of a row."""
        return 0.5

    @property
    def overhead(self) -> int:
        """Row tokens of a sentence beyond its text in both vocabularies: CLS, SEP, BOS, and the memory slot."""
        return _BOUNDARIES + 1 + self.memory

    def max_position_needed(self, sequence_length: int) -> int:
        """Largest position: SEP's in the encoder; with memory the decoder's last token's."""
        return sequence_length + 1

    def check_vocabulary(self, vocabulary: Vocabulary) -> None:
        where = "tokenizer" if vocabulary.decoder is None else "decoder_tokenizer"
        lacking = (vocabulary.decoder or vocabulary).lacking
        missing = [role for role in ("sop", "eop") if role in lacking]
        check(
            not missing,
            f"optimus needs the special token{'s' * (len(missing) > 1)} {', '.join(missing)} in the decoder's "
            f"vocabulary, which lacks {'them' if len(missing) > 1 else 'it'}; set {where}.added_tokens=optimus and "
            "build the corpora again.",
        )


@compiled
def _write_encoder(row, offset, text, settings):
    """[CLS] x [SEP]. Returns the end."""
    end = offset + len(text) + 2
    row[TOKENS, offset] = settings.cls
    copy_range(row[TOKENS], offset + 1, end - 1, text, 0)
    row[TOKENS, end - 1] = settings.sep
    count_up(row[POSITION_IDS], offset, end, 0)
    return end


@compiled
def _write_decoder(row, offset, text, settings):
    """The slot, and BOS x, which predict x EOS. Returns the end."""
    slot = np.int64(settings.memory)
    if slot:
        put(row, offset, settings.sop, 0, 1)
    first = offset + slot
    end = first + len(text) + 1
    row[TOKENS, first] = settings.sop
    copy_range(row[TOKENS], first + 1, end, text, 0)
    copy_range(row[TARGETS], first, end - 1, text, 0)
    row[TARGETS, end - 1] = settings.eop
    set_range(row[WEIGHTS], first, end, ONE_AS_INT32)
    count_up(row[POSITION_IDS], first, end, slot)
    # Order above 0 makes the decoder's tokens causal. The slot has order 1, before all of them, so that every
    # token sees it.
    count_up(row[ORD], first, end, 1 + slot)
    return end


@compiled
def _end_of_text(tokens, start, end, eos):
    """The end of the text tokens[start:end] without the eos at its end."""
    return end - 1 if end > start and tokens[end - 1] == eos else end


@entry_point
def _fill_rows(batch, chunks, tables, record):
    settings, chunks = record[0], Chunks(*chunks)
    tokens = chunks.tokens
    k, start = 0, 0  # the chunk, and where its text begins
    for i in range(len(batch)):
        row, offset = batch[i], 0
        begin_row(row, settings.pad)
        for document in range(
            chunks.first_document, chunks.first_document + chunks.counts[i] // settings.texts
        ):
            # One document for both texts, so that packing, plans and loaders are those of the other objectives.
            first = offset
            end = start + chunks.lengths[k]
            stop = _end_of_text(tokens, start, end, settings.eos)
            offset = _write_encoder(row, offset, tokens[start:stop], settings)
            if settings.texts > 1:
                k += 1
                start, end = end, end + chunks.lengths[k]
                stop = _end_of_text(tokens, start, end, settings.decoder_eos)
            offset = _write_decoder(row, offset, tokens[start:stop], settings)
            mark_document(row, first, offset, document, settings.loss)
            start = end
            k += 1


@register
class Optimus(RowObjective):
    """See the top of this file. The loss `kl` is the latent vector's, and of no token."""

    name = "optimus"
    config_class = OptimusConfig
    losses = (Loss("reconstruction", 22), Loss("kl", 23))
    entry = staticmethod(_fill_rows)

    @property
    def texts(self) -> int:
        """Number of chunks in which a sentence is stored: one per stack with its own tokenizer."""
        return 1 if self.vocabulary.decoder is None else 2

    def values(self) -> dict[str, Any]:
        decoder = (self.vocabulary.decoder or self.vocabulary).special
        return super().values() | {
            "texts": self.texts,
            "sop": int(decoder.sop),
            "eop": int(decoder.eop),
            "decoder_eos": int(decoder.eos),
        }

    def tokens_needed(self, chunk_lengths: np.ndarray) -> np.ndarray:
        if self.texts == 1:
            return super().tokens_needed(chunk_lengths)
        is_decoders = np.arange(len(chunk_lengths)) % 2
        return chunk_lengths + np.where(is_decoders, self.config.overhead - _BOUNDARIES, _BOUNDARIES)

    def fill(
        self,
        batch: np.ndarray,
        tokens: np.ndarray,
        chunk_lengths: np.ndarray,
        chunks_per_sample: np.ndarray,
        sample_indices: np.ndarray,
    ) -> None:
        odd = np.flatnonzero(chunks_per_sample % self.texts)
        if len(odd):
            raise DataError(
                f"sample {sample_indices[odd[0]]} has {chunks_per_sample[odd[0]]} chunks, but every sentence needs "
                "two, one for the encoder and one for the decoder; open the corpora with both tokenizers."
            )
        super().fill(batch, tokens, chunk_lengths, chunks_per_sample, sample_indices)
