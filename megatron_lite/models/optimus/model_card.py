"""The model card of an export of OPTIMUS."""

from __future__ import annotations

from megatron_lite.hf.common.model_card import sizes, write_card
from megatron_lite.hf.common.provenance import provenance
from megatron_lite.inference.open_run import OpenRun
from megatron_lite.models.optimus.config import decoder_of, latent_of

_OPTIMUS = """A variational autoencoder of sentences (arXiv:2004.04092). From the encoder's {feature},
`posterior.weight` gives mean and log variance of a latent vector of {latent_size} components. The decoder takes it
{ways}. {origin}"""
_MEMORY = (
    "as key and value of each layer (`memory.weight`), a cache of length 1, so that positions begin at 1"
)
_EMBEDDING = "as a sum with its word embeddings (`embedding.weight`)"
_STACKS = """from safetensors.torch import load_file
from transformers import AutoModelForPreTraining, GPT2LMHeadModel

encoder = AutoModelForPreTraining.from_pretrained("PATH/encoder")
decoder = GPT2LMHeadModel.from_pretrained("PATH/decoder")
latent = load_file("PATH/latent.safetensors")"""


def optimus_card(run: OpenRun) -> str:
    """The card of an export, in Markdown."""
    config = run.config
    origin, latent = provenance(run, "sentences"), latent_of(config)
    paths = [text for is_used, text in ((latent.memory, _MEMORY), (latent.embedding, _EMBEDDING)) if is_used]
    introduction = _OPTIMUS.format(
        latent_size=latent.latent_size,
        feature="pooled CLS" if latent.feature == "pooler" else "CLS",
        ways=", and ".join(paths),
        origin=origin,
    )
    words = {
        "tags": "- optimus",
        "title": "OPTIMUS",
        "introduction": introduction,
        "sizes": f"an encoder of {sizes(config.model)}, and a decoder of {sizes(decoder_of(config))}",
        "example": _STACKS,
    }
    return write_card(run, words, origin.is_imported)
