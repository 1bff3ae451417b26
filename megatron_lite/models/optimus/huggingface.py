"""OPTIMUS as two directories of transformers and a file of what lies between them, and back to a run.

    DIRECTORY/encoder/             as its class has it (BertForPreTraining, ...), with its tokenizer
    DIRECTORY/decoder/             GPT2LMHeadModel, with its tokenizer
    DIRECTORY/latent.json          format, version, latent_size, feature, memory, embedding
    DIRECTORY/latent.safetensors   posterior.weight [2P, H], memory.weight [L * D, P], embedding.weight [D, P]

Both ways are proved: the posterior through the encoder's class, and the logits given a latent vector through
GPT2LMHeadModel, where the memory is a cache of length 1 and W_D z is added to the word embeddings.

Shapes: N sentences, T tokens, P latent size, H and D hidden sizes of encoder and decoder, L blocks of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import build, check, merge
from data_utils.objectives.optimus import OptimusConfig
from data_utils.tokenizers.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from megatron_lite.checkpoint.read import weight_reader
from megatron_lite.checkpoint.tensor_files import write_tensors
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.task_rows import with_task_rows
from megatron_lite.config.tree import Config
from megatron_lite.hf.files import proof
from megatron_lite.hf.files.config_json import by_transformers
from megatron_lite.hf.files.first_checkpoint import write_imported_run
from megatron_lite.hf.files.model_card import sizes, write_card
from megatron_lite.hf.files.proof_report import Report
from megatron_lite.hf.files.provenance import provenance
from megatron_lite.hf.files.recipe import Recorded, read_recipe, write_recipe
from megatron_lite.hf.files.tokenizer_proof import prove_exported
from megatron_lite.hf.files.weights import (
    DTYPES,
    IMPORTED_FILES,
    METADATA,
    Weights,
    check_shapes,
    new_directory,
    open_safetensors,
    read_json,
    write_json,
)
from megatron_lite.hf.model_format import HuggingFaceFormat
from megatron_lite.hf.published.runs import (
    Stack,
    check_vocabulary,
    copy_imported_files,
    require_same_model,
    write_stack,
)
from megatron_lite.hf.published.source import PublishedSource, is_published, load_class, open_published
from megatron_lite.hf.published.systems import published_system
from megatron_lite.hf.published.tensor_map import to_ours
from megatron_lite.hf.published.tokenizers import import_tokenizer, require_same_ids
from megatron_lite.inference.open_run import OpenRun, open_run
from megatron_lite.models.optimus.config import decoder_of, latent_of
from megatron_lite.models.optimus.interface import Sentence
from megatron_lite.models.optimus.model import LATENT
from megatron_lite.models.optimus.open_run import LatentRun, Rows, latent_run, longest_sentence
from megatron_lite.transformer.build import model_spec
from megatron_lite.transformer.trained_model import DECODER, ENCODER

FORMAT, VERSION = "megatron-lite-optimus", 1
DESCRIPTION, MATRICES = "latent.json", "latent.safetensors"
DESCRIBED = ("latent_size", "feature", "memory", "embedding")
_DECODER_CLASS = "GPT2LMHeadModel"
# Tokens that config.json names -> roles of the tokenizer; None: those of the system.
_ROLES = {ENCODER: None, DECODER: {"pad_token_id": "pad", "eos_token_id": "eop", "bos_token_id": "sop"}}
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


class OptimusFormat(HuggingFaceFormat):
    """Two directories, and the files of the latent space between them."""

    beyond_glm = "two Transformers joined by a latent vector"

    def is_format_of(self, directory: Path) -> bool:
        return (directory / DESCRIPTION).exists()

    def write(self, directory: Path, run: OpenRun, dtype: str, max_shard_bytes: int) -> None:
        checkpoint, config = run.checkpoint, run.config
        encoder, decoder = config.model, decoder_of(config)
        check_shapes(Weights(checkpoint.shapes, _unread), model_spec(config).shapes(config), checkpoint.path)
        _require_classes(encoder, decoder, str(checkpoint.path))
        kept = checkpoint.path.parent.parent / IMPORTED_FILES
        for prefix, stack, tokenizer in (
            (ENCODER, encoder, run.tokenizer),
            (DECODER, decoder, run.decoder_tokenizer or run.tokenizer),
        ):
            parameters, name = checkpoint.stack(prefix), directory_of(prefix)
            weights = Weights(parameters.shapes, weight_reader(parameters))
            origin = f"the {name} of {checkpoint.path}"
            described = Stack(stack, weights, tokenizer, kept / name, origin, _ROLES[prefix])
            (directory / name).mkdir()
            write_stack(directory / name, described, dtype, max_shard_bytes)
        latent = checkpoint.stack(LATENT)
        matrices = map(weight_reader(latent), latent.shapes)
        write_tensors(directory / MATRICES, latent.shapes, matrices, DTYPES[dtype], METADATA)
        section = {name: getattr(latent_of(config), name) for name in DESCRIBED}
        write_json(directory / DESCRIPTION, {"format": FORMAT, "version": VERSION, **section})
        write_recipe(directory, run)
        (directory / "README.md").write_text(_card(run), encoding="utf-8")

    def read(
        self, source: Path, output: Path, tree: Mapping[str, Any], *, verify: bool, tolerance: float
    ) -> proof.Proof | None:
        recorded = read_recipe(source)
        with new_directory(output) as directory:
            opened = _open(source)
            for prefix, stack in opened.stacks.items():
                copy_imported_files(stack, directory / IMPORTED_FILES / directory_of(prefix))
            config = _config(opened, directory, recorded, tree, verify)
            weights = _joined(opened)
            check_shapes(weights, model_spec(config).shapes(config), source)
            write_imported_run(directory, output, weights, config)
            if not verify:
                return None
            assert config.tokenizer is not None
            decoder_tokenizer = config.decoder_tokenizer
            run = open_run(
                directory,
                Path(config.tokenizer.path),
                None if decoder_tokenizer is None else Path(decoder_tokenizer.path),
            )
            prove_exported(run.tokenizer, source / directory_of(ENCODER))
            prove_exported(run.decoder_tokenizer or run.tokenizer, source / directory_of(DECODER))
            return proof.joined(prove(run, source, "fp32", tolerance, f"the import of {source}"))

    def prove(self, run: OpenRun, directory: Path, dtype: str, tolerance: float) -> Report:
        comparisons = prove(run, directory, dtype, tolerance, f"the export of {run.checkpoint.path}")
        tokenizers = {
            directory_of(prefix): prove_exported(tokenizer, directory / directory_of(prefix)).as_record()
            for prefix, tokenizer in (
                (ENCODER, run.tokenizer),
                (DECODER, run.decoder_tokenizer or run.tokenizer),
            )
        }
        return Report(comparisons, tolerance, tokenizers)


HUGGINGFACE_FORMAT = OptimusFormat()


def directory_of(prefix: str) -> str:
    """The directory of a stack. Args: prefix: of its parameters, ENCODER or DECODER."""
    return prefix.rstrip(".")


def _card(run: OpenRun) -> str:
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


def _unread(name: str) -> torch.Tensor:
    raise AssertionError(f"{name} is only compared by its shape")


def _require_classes(encoder: ModelConfig, decoder: ModelConfig, origin: str) -> None:
    """Raise CheckpointError unless the encoder reads as a BERT does, and the decoder is a GPT-2."""
    try:
        is_bidirectional = not published_system(encoder).is_causal
    except CheckpointError:
        is_bidirectional = False
    for key, stack, is_right, rule in (
        ("model", encoder, is_bidirectional, "the encoder must be of a system like bert"),
        ("decoder", decoder, decoder.system == "gpt2", "the decoder must be of the system gpt2"),
    ):
        if not is_right:
            raise CheckpointError(
                f"{origin} has {key}.system {shown(stack.system)}, for which transformers has no class; {rule}."
            )


# Import


@dataclass(frozen=True)
class _Source:
    """A directory to import."""

    path: Path
    stacks: Mapping[str, PublishedSource]  # by prefix
    matrices: Weights
    latent: dict[str, Any]  # DESCRIBED


def _open(path: Path) -> _Source:
    described = read_json(path / DESCRIPTION)
    found = described.get("format"), described.get("version")
    if found != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path / DESCRIPTION} is of format {shown(found[0])}, version {shown(found[1])}; this program reads "
            f"{FORMAT}, version {VERSION}."
        )
    try:
        section = build(OptimusConfig, {name: described[name] for name in DESCRIBED}, "")
    except KeyError as error:
        raise CheckpointError(f"{path / DESCRIPTION} has no {error}; fetch it again.") from None
    except ConfigError as error:
        raise CheckpointError(f"{path / DESCRIPTION}: {error}") from None
    stacks = {}
    for prefix in (ENCODER, DECODER):
        of_stack = path / directory_of(prefix)
        if not is_published(of_stack):
            raise CheckpointError(f"{of_stack} is of no system that can be imported; fetch it again.")
        stacks[prefix] = open_published(of_stack)
    encoder, decoder = (build(ModelConfig, stack.settings) for stack in stacks.values())
    _require_classes(encoder, decoder, str(path))
    latent = {name: getattr(section, name) for name in DESCRIBED}
    return _Source(path, stacks, open_safetensors(path / MATRICES), latent)


def _joined(source: _Source) -> Weights:
    """All tensors under our names."""
    parts = {prefix: to_ours(stack.theirs, stack.mappings) for prefix, stack in source.stacks.items()}
    parts[LATENT] = source.matrices
    shapes = {
        f"{prefix}{name}": shape for prefix, part in parts.items() for name, shape in part.shapes.items()
    }

    def read(name: str) -> torch.Tensor:
        prefix = name[: name.index(".") + 1]
        return parts[prefix].read(name.removeprefix(prefix)).float()

    return Weights(shapes, read)


def _config(
    source: _Source, directory: Path, recorded: Recorded, tree: Mapping[str, Any], verify: bool
) -> Config:
    """The configuration of the run in `directory`."""
    whole = merge({"objectives": {"optimus": 1}, **recorded.config, **recorded.tokenizers}, tree)
    given = tree.get("optimus") or {}
    for name, value in source.latent.items():
        check(
            given.get(name, value) == value,
            f"optimus.{name} is {shown(given.get(name))}, but {source.path} has {shown(value)}; leave it out.",
        )
    whole["optimus"] = {**(whole.get("optimus") or {}), **source.latent}
    tokenizers = {}
    for prefix, key, of_tokenizer, added in (
        (ENCODER, "model", "tokenizer", "none"),
        (DECODER, "decoder", "decoder_tokenizer", "optimus"),
    ):
        stack = source.stacks[prefix]
        whole[key] = {**stack.settings, **{k: v for k, v in (whole.get(key) or {}).items() if v is not None}}
        options = {k: v for k, v in (whole.get(of_tokenizer) or {}).items() if v is not None}
        is_brought = "path" not in options
        if is_brought:
            kept = directory / IMPORTED_FILES / directory_of(prefix)
            with by_transformers(stack.path):
                options = import_tokenizer(stack.path, kept, {"added_tokens": added, **options})
        whole[of_tokenizer] = options
        tokenizers[prefix] = _tokenizer(options, of_tokenizer, stack)
        if verify and not is_brought:
            kept = directory / IMPORTED_FILES / directory_of(prefix)
            require_same_ids(of_tokenizer, tokenizers[prefix], stack.path, kept)
    # Whether the stacks share a tokenizer is not recorded; equal ones are one section.
    if tokenizers[ENCODER].fingerprint == tokenizers[DECODER].fingerprint:
        whole["decoder_tokenizer"] = None
    config = build(Config, whole)
    assert config.decoder is not None
    require_same_model("model", config.model, source.stacks[ENCODER])
    require_same_model("decoder", config.decoder, source.stacks[DECODER])
    return with_task_rows(config)


def _tokenizer(options: Mapping[str, Any], key: str, stack: PublishedSource) -> Tokenizer:
    tokenizer = load_tokenizer(build(TokenizerConfig, dict(options), f"{key}."))
    check_vocabulary(tokenizer, stack)
    return tokenizer


# Proof


def prove(run: OpenRun, directory: Path, dtype: str, tolerance: float, what: str) -> dict[str, proof.Proof]:
    """Compare a run with its directory: posteriors, and logits given latent vectors. Raises CheckpointError.

    Args: dtype: of the directory's weights, to which those of the run are rounded.
    """
    return proof.prove(
        lambda computed: _ask(run, directory, computed),
        lambda: latent_run(run, torch.device("cpu"), lambda weight: weight.to(DTYPES[dtype]).float()),
        tolerance,
        what,
        run.checkpoint.shapes,
    )


Latent = Mapping[str, torch.Tensor]  # the matrices of MATRICES


@torch.no_grad()
def _ask(run: OpenRun, directory: Path, dtype: torch.dtype) -> list[proof.Question]:
    """Outputs of the classes of transformers for encoder and decoder, computed in `dtype`."""
    matrices = open_safetensors(directory / MATRICES)
    latent = {name: matrices.read(name).to(dtype) for name in matrices.shapes}
    generator = torch.Generator().manual_seed(0)
    posteriors = _of_posteriors(run, directory / directory_of(ENCODER), latent, generator, dtype)
    return [posteriors, _of_logits(run, directory / directory_of(DECODER), latent, generator, dtype)]


def _of_posteriors(
    run: OpenRun, directory: Path, latent: Latent, generator: torch.Generator, dtype: torch.dtype
) -> proof.Question:
    """The posteriors' parameters [N, 2 P] of sentences of several lengths."""
    config, special, section = run.config.model, run.tokenizer.special, latent_of(run.config)
    assert config.vocab_size is not None and section is not None
    longest, sentences, expected = min(longest_sentence(run.config), 200), [], []
    theirs = load_class(directory, published_system(config).pretraining_class(config), dtype)
    base = getattr(theirs, theirs.base_model_prefix)  # type: ignore[call-overload]
    # Several lengths: a wrong mask or position shows only where rows differ.
    for length in {longest, max(1, longest // 2), 1}:
        random = torch.randint(config.vocab_size, (length,), generator=generator)
        drawn = random.masked_fill(random == base.config.pad_token_id, special.unk).tolist()
        sentences.append(Sentence("", drawn, [special.unk]))
        tokens = torch.tensor([[special.cls, *drawn, special.sep]])
        with by_transformers(directory):
            out = base(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        feature = out.pooler_output if section.feature == "pooler" else out.last_hidden_state[:, 0]
        expected.append(feature @ latent["posterior.weight"].T)

    def answer(ours: LatentRun) -> torch.Tensor:
        return torch.cat([torch.cat(ours.encode([sentence]), dim=1) for sentence in sentences])

    return proof.Question("posteriors", torch.cat(expected), answer)


def _of_logits(
    run: OpenRun, directory: Path, latent: Latent, generator: torch.Generator, dtype: torch.dtype
) -> proof.Question:
    """The decoder's logits for three texts of BOS and random tokens, each with its own latent vector."""
    config, section = run.config.decoder, latent_of(run.config)
    assert config is not None and config.vocab_size is not None and section is not None
    begin = (run.decoder_tokenizer or run.tokenizer).special.sop
    z = torch.randn(3, section.latent_size, generator=generator)
    length = min(longest_sentence(run.config), 200)
    drawn = torch.randint(config.vocab_size, (3, length), generator=generator)
    tokens = torch.cat([torch.full((3, 1), begin), drawn], dim=1)
    # The class reads the memory as a cache of length 1, so that its positions begin at 1; ours has a slot
    # before the first token.
    has_memory = "memory.weight" in latent
    with_slot = torch.cat([tokens[:, :1], tokens], dim=1) if has_memory else tokens
    decoder = load_class(directory, _DECODER_CLASS, dtype)
    with by_transformers(directory):
        expected = their_logits(decoder, latent, tokens, z.to(dtype))

    def answer(ours: LatentRun) -> torch.Tensor:
        return Rows(ours.model, z, begin, has_memory).read(with_slot, has_memory)[:, has_memory:]

    return proof.Question("logits", expected, answer)


def their_logits(
    gpt2: torch.nn.Module, latent: Latent, tokens: torch.Tensor, z: torch.Tensor
) -> torch.Tensor:
    """Logits of GPT2LMHeadModel given latent vectors: int64 [N, T], [N, P] -> [N, T, V]."""
    decoder: Any = gpt2
    embedded, cache = decoder.transformer.wte(tokens), None
    if "embedding.weight" in latent:
        embedded = embedded + (z @ latent["embedding.weight"].T)[:, None]
    if "memory.weight" in latent:
        cache, heads = DynamicCache(), decoder.config.n_head
        memory = (z @ latent["memory.weight"].T).view(len(z), decoder.config.n_layer, heads, 1, -1)
        for layer in range(decoder.config.n_layer):
            cache.update(memory[:, layer], memory[:, layer], layer)
    places = torch.arange(tokens.shape[1])[None] + (cache is not None)
    return decoder(inputs_embeds=embedded, position_ids=places, past_key_values=cache).logits
