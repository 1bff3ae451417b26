"""Sizes that the tensors of a directory have, by the option of the model that they are.

A config.json that comes from another model than its weights has many wrong sizes. The shapes decide most of them, so an
import names all of these fields with both numbers, instead of the first that fails.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Of all heads, which are numbers of heads times their width and no options.
QUERY_WIDTH, KEY_WIDTH = "width of queries", "width of keys"
# A parameter of ours and a dimension of it -> the option. Blocks of a decoder are named decoder_layers here.
_OPTIONS = {
    ("embedding.word_embeddings.weight", 0): "vocab_size",
    ("embedding.word_embeddings.weight", 1): "embedding_size",
    ("embedding.position_embeddings.weight", 0): "max_position",
    ("embedding.segment_embeddings.weight", 0): "segments",
    ("layers.attention.dense.weight", 0): "hidden_size",
    ("layers.attention.dense.weight", 1): QUERY_WIDTH,
    ("layers.attention.key.weight", 0): KEY_WIDTH,
    ("layers.mlp.dense_4h_to_h.weight", 1): "ffn_size",
}
_BLOCK = re.compile(r"((?:decoder_)?layers)\.(\d*)\.")  # without a number: one that all blocks share


def tensor_sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Option of the section `model` -> its value by the shapes; options that no tensor decides are left out.

    Blocks that differ among themselves decide nothing. Args: shapes: of parameters under our names.
    """
    found: dict[str, set[int]] = {}
    layers: dict[str, int] = {}
    for name, shape in shapes.items():
        if block := _BLOCK.match(name):
            if block[2]:
                option = {"layers": "num_layers"}.get(block[1], block[1])
                layers[option] = max(layers.get(option, 0), int(block[2]) + 1)
            name = f"layers.{name[block.end() :]}"
        for (parameter, dimension), option in _OPTIONS.items():
            if name == parameter and len(shape) == 2:
                found.setdefault(option, set()).add(shape[dimension] - (option == "max_position"))
    return {option: min(values) for option, values in found.items() if len(values) == 1} | layers


REMEDY = "fetch config.json and the weights of one model"


def wrong_size(field: str, said: int, actual: int, is_given: bool = True) -> str:
    """The sentence on a field of config.json. Args: is_given: False for the default of its class."""
    return f"{field} is {said}{'' if is_given else ' where it is not given'}, but the tensors have {actual}"
