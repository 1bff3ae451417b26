"""The layer of further tokens (MTP) of GLM-4.5 in plain torch with the block of transformers, and as files have it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.hf.published import as_in_files
from support.hf.published_files import edit
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm


def rms(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


class Further(torch.nn.Module):
    """The formula: the paper's h' = M [RMSNorm(h); RMSNorm(Emb(t))], embedding first, as in published files."""

    def __init__(self, theirs: Any):
        super().__init__()
        config, width = theirs.config, theirs.config.hidden_size
        self.block = Glm4MoeDecoderLayer(config, config.num_hidden_layers)
        self.enorm, self.hnorm, self.last = (Glm4MoeRMSNorm(width, config.rms_norm_eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        for tensor in self.state_dict().values():
            torch.nn.init.normal_(tensor, 0.2, 0.3)

    def forward(self, theirs: Any, text: torch.Tensor) -> torch.Tensor:
        """Cross entropies of the token after the next of one document, [len(text) - 2]."""
        body, epsilon = theirs.model, theirs.config.rms_norm_eps
        hidden = body(text[None], use_cache=False).last_hidden_state[:, :-1]  # after the norm
        joined = [
            rms(body.embed_tokens(text[None, 1:]), self.enorm.weight, epsilon),
            rms(hidden, self.hnorm.weight, epsilon),
        ]
        x = torch.cat(joined, -1) @ self.eh_proj.weight.T
        n = x.shape[1]
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        angles = body.rotary_emb(x, torch.arange(n)[None])
        y = self.block(x, attention_mask=mask, position_embeddings=angles)
        logits = theirs.lm_head(rms(y, self.last.weight, epsilon))[0]
        return F.cross_entropy(logits[:-1], text[2:], reduction="none")

    def in_files(self, tensors: Mapping[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
        """Tensors by our names here, as files have them."""
        names = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "last": "shared_head.norm"}
        named = {}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            named[f"model.layers.{layer}.{rest if part == 'block' else f'{names[part]}.{rest}'}"] = tensor
        return as_in_files(named)


def add_further(theirs: Any, directory: Path) -> Further:
    """Add the layer to a directory of the class, with the copies of tables that released files have."""
    torch.manual_seed(4)
    theirs.config._attn_implementation = "eager"
    further = Further(theirs)
    state, layer = load_file(directory / "model.safetensors"), theirs.config.num_hidden_layers
    state |= further.in_files(further.state_dict(), layer)
    for copy, first in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        state[f"model.layers.{layer}.{copy}.weight"] = state[f"{first}.weight"].clone()
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    edit(directory, num_nextn_predict_layers=1)
    return further
