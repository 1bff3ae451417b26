"""Outputs of a class of transformers for the directory of a published system, to compare ours with.

    logits           with positions, segments and tasks handed over: every row of every table counts
    default inputs   with tokens and a mask alone, pad_texts on the side of the system: positions, segments, tasks and
                     the first token of a decoder are the class's own
    labels           the loss that the class computes where it is given labels (of classes that write)
    generation       the logits of each step of the class's own `generate`, with its cache, after prompts that are
                     pad_texts on the left where there is no encoder (of classes that write)
    head             the head on CLS, or that of a task
    hidden states    the last layer's, of a base model, and of an ELECTRA discriminator without its generator
    memory           XLNet's: a text in two segments

Shapes: B sequences, S tokens of a sequence, D hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from data_utils.common.batch_fields import ORD, POSITION_IDS, SEGMENT_IDS, TOKENS
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.common.config_json import by_transformers, quiet
from megatron_lite.hf.common.verify import Check
from megatron_lite.hf.published.recognition import is_body
from megatron_lite.hf.published.segment_memory import read_segment
from megatron_lite.hf.published.source import PublishedSource, load_class
from megatron_lite.hf.published.systems import published_system
from megatron_lite.hf.published.verify_inputs import (
    default_inputs,
    encoder_decoder_inputs,
    in_batch,
    in_target,
    is_token,
    our_output,
    pad_texts,
    padding_id,
    text_batch,
    texts_to_batch,
    their_output,
    without_segments_and_tasks,
)
from megatron_lite.transformer.predictions import task_outputs
from megatron_lite.transformer.transformer import Transformer

log = logging.getLogger(__name__)

_XLNET_INPUTS = {"input_ids": TOKENS, "token_type_ids": SEGMENT_IDS}
_SENTENCE_LOGITS = ("seq_relationship_logits", "sop_logits")
_IGNORED = -100  # the label of what has no loss, in transformers
_STEPS = 6  # tokens that `generate` writes
_LONGEST_PROMPT = 24


@torch.no_grad()
def class_checks(
    directory: Path,
    class_name: str,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    start: int | None = None,
    source: PublishedSource | None = None,
) -> list[Check]:
    """Outputs of the class of transformers for a directory's model, computed in `dtype`.

    Raises: CheckpointError, also for what the class raises over untrusted files.

    Args:
        config: of our model.
        start: id of the decoder's first token in training; None: the class's default.
        source: of an import.
    """
    theirs: Any = load_class(directory, class_name, dtype, source)
    with by_transformers(directory):
        if is_body(class_name):
            # A body has no logits to compare.
            return [_hidden_state_check(theirs, config, text_batch(config))]
        if config.task_head.type != "none":
            # XLNet's class takes a sequence's last position, padding or not, so its sequence has no padding.
            batch = text_batch(config)[: 1 if config.relative == "xlnet" else None]
            return [task_check(their_output(theirs, config, batch), config, batch)]
        return _language_checks(theirs, config, start)


def _language_checks(theirs: Any, config: ModelConfig, start: int | None) -> list[Check]:
    """Checks of a class that predicts tokens."""
    checks = _all_input_checks(theirs, config, text_batch(config))
    if config.decoder_layers:
        start = getattr(theirs.config, "decoder_start_token_id", None) if start is None else start
        if start is None:
            return checks  # the class of such a directory can neither take labels nor generate
        checks += _decoder_checks(theirs, config, start)
    else:
        # With the class's own defaults too: with our positions and segments, a RoBERTa whose positions are off by its
        # padding token would pass.
        checks += _default_input_checks(theirs, config)
    if config.decoder_layers and theirs.config.num_hidden_layers < config.decoder_layers:
        log.warning(
            "generation is not compared: it fails in %s where a decoder has more layers than its encoder",
            type(theirs).__name__,
        )  # its cache has one slot for each layer of the encoder
    elif config.decoder_layers or published_system(config).is_causal:
        checks.append(_generation_check(theirs, config, start))
    if config.relative == "xlnet":
        checks.append(_memory_check(theirs, text_batch(config)[:1]))
    return checks


def logits_check(
    name: str,
    expected: torch.Tensor,
    batch: np.ndarray,
    is_compared: torch.Tensor,
) -> Check:
    """The logits of some positions. Args: is_compared: which, bool [B, S]."""
    return Check(name, expected, lambda model: our_output(model, batch, has_task_rows=True)[1][is_compared])


def _loss_check(
    expected: torch.Tensor, batch: np.ndarray, is_compared: torch.Tensor, targets: torch.Tensor
) -> Check:
    """The mean loss of some positions. Args: is_compared: which, bool [B, S]."""

    def compute(model: Transformer) -> torch.Tensor:
        logits = our_output(model, batch, has_task_rows=True)[1][is_compared]
        return F.cross_entropy(logits, targets).view(1, 1)

    return Check("labels", expected.view(1, 1), compute)


def _cls_checks(name: str, out: Mapping[str, torch.Tensor], batch: np.ndarray) -> list[Check]:
    """The head on CLS, if the class has one. Args: out: of the class."""

    def compute(model: Transformer) -> torch.Tensor:
        assert model.heads.sentence is not None
        hidden = our_output(model, batch, has_task_rows=True)[0][:, 0]
        return model.heads.sentence(model.final_layernorm(hidden))

    return [Check(name, out[each], compute) for each in _SENTENCE_LOGITS if each in out]


def _all_input_checks(theirs: torch.nn.Module, config: ModelConfig, batch: np.ndarray) -> list[Check]:
    out = their_output(theirs, config, batch)
    expected, is_compared = in_batch(_token_logits(out), config, batch)
    return [logits_check("logits", expected, batch, is_compared), *_cls_checks("head", out, batch)]


def _token_logits(out: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return out["logits"] if "logits" in out else out["prediction_logits"]


def _default_input_checks(theirs: Any, config: ModelConfig) -> list[Check]:
    """Tokens and a mask, as a tokenizer gives them."""
    batch = without_segments_and_tasks(text_batch(config, seed=1), theirs)
    is_compared, system = is_token(batch), published_system(config)
    ids, mask = default_inputs(theirs, batch, system.padding_side)
    labels = {"labels": ids.masked_fill(mask == 0, _IGNORED)} if system.is_causal else {}
    out = theirs(input_ids=ids, attention_mask=mask, **labels)
    checks = [
        logits_check("default inputs", _token_logits(out)[mask.bool()], batch, is_compared),
        *_cls_checks("default inputs", out, batch),
    ]
    if system.is_causal:
        predicts = is_compared.clone()
        # The last token of a text predicts nothing.
        predicts[range(len(predicts)), predicts.sum(1) - 1] = False
        tokens = torch.from_numpy(batch[:, TOKENS].astype(np.int64))
        targets = tokens.roll(-1, dims=1)[predicts]
        checks.append(_loss_check(out.loss, batch, predicts, targets))
    return checks


def _decoder_checks(theirs: Any, config: ModelConfig, start: int) -> list[Check]:
    """The default input of a decoder is its labels, shifted to the right behind its first token."""
    batch = without_segments_and_tasks(text_batch(config, seed=1), theirs)
    inputs = encoder_decoder_inputs(batch, padding_id(theirs))
    tokens, is_label = inputs.pop("decoder_input_ids"), in_target(batch)
    targets = tokens[is_label]
    out = theirs(**inputs, labels=tokens.masked_fill(~is_label, _IGNORED))
    for sequence in batch:
        positions = np.flatnonzero(sequence[ORD] > 0)
        # The class shifts the labels itself; our sequence gets the same shift.
        sequence[TOKENS, positions[1:]] = sequence[TOKENS, positions[:-1]]
        sequence[TOKENS, positions[:1]] = start
    is_target = torch.from_numpy(batch[:, ORD] > 0)
    return [
        logits_check("default inputs", out.logits[is_label], batch, is_target),
        _loss_check(out.loss, batch, is_target, targets),
    ]


def _generation_check(theirs: Any, config: ModelConfig, start: int | None) -> Check:
    """Greedy, on prompts of several lengths. Our model then reads the prompts with their completions."""
    longest = min(_LONGEST_PROMPT, config.max_position + 1)
    steps = min(_STEPS, longest // 2)
    lengths = [longest - steps, max(1, (longest - steps) // 2)]
    if not published_system(config).counts_real_tokens and not config.decoder_layers:
        lengths = lengths[:1]  # the class counts padding before a prompt as positions
    random_tokens = without_segments_and_tasks(text_batch(config, seed=2), theirs)[: len(lengths), TOKENS]
    prompts = [tokens[:length] for tokens, length in zip(random_tokens, lengths, strict=True)]
    ids, mask = pad_texts(prompts, padding_id(theirs), "right" if config.decoder_layers else "left")
    with quiet():
        spans, expected = generated(theirs, {"input_ids": ids, "attention_mask": mask}, steps)
    # The last token of a completion is predicted and not read.
    completions = [np.array(tokens[:-1], np.int32) for tokens in spans]
    if config.decoder_layers:
        assert start is not None
        batch = texts_to_batch(config, prompts, [np.array([start, *tokens]) for tokens in completions])
        is_compared = torch.from_numpy(batch[:, ORD] > 0)
    else:
        batch = texts_to_batch(
            config, [np.concatenate(each) for each in zip(prompts, completions, strict=True)]
        )
        first = torch.tensor([[len(prompt) - 1] for prompt in prompts])
        is_compared = is_token(batch) & (torch.arange(batch.shape[2])[None] >= first)
    return logits_check("generation", expected, batch, is_compared)


def generated(
    theirs: Any, inputs: Mapping[str, torch.Tensor], steps: int
) -> tuple[list[list[int]], torch.Tensor]:
    """What a class of transformers writes, greedily and with its cache.

    Returns: the tokens of each completion up to its first end token, which counts; and their logits, [tokens, V].
    """
    out = theirs.generate(
        **inputs, max_new_tokens=steps, do_sample=False, num_beams=1, num_return_sequences=1, use_cache=True,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    ends = theirs.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    spans = []
    for tokens in out.sequences[:, -len(out.logits) :].tolist():
        count = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        spans.append(tokens[:count])
    logits = torch.stack(out.logits, dim=1)  # [prompts, steps, V]
    return spans, torch.cat([each[: len(span)] for each, span in zip(logits, spans, strict=True)]).float()


def task_check(out: Any, config: ModelConfig, batch: np.ndarray) -> Check:
    """The head of a task, on all tokens or on one token of each text. Args: out: of a class for the batch."""
    is_compared = is_token(batch)
    if config.task_head.type in ("classes", "values"):
        is_compared = torch.zeros_like(is_compared)
        is_compared[:, -1 if config.relative == "xlnet" else 0] = True
        expected = out["logits"]
    elif config.task_head.type == "spans":
        expected = torch.stack([out["start_logits"], out["end_logits"]], dim=-1)[is_compared]
    else:
        expected = out["logits"][is_compared]
    positions = is_compared.flatten().nonzero()[:, 0]

    def compute(model: Transformer) -> torch.Tensor:
        hidden, _ = our_output(model, batch, has_task_rows=True)
        return task_outputs(
            model.heads, [hidden.flatten(0, 1)], positions, model.final_layernorm, None
        ).float()

    return Check("head", expected, compute)


def _hidden_state_check(theirs: Any, config: ModelConfig, batch: np.ndarray) -> Check:
    """The last hidden states of a class without a head, after its last norm; of a decoder where there is one."""
    out = their_output(theirs, config, batch)["last_hidden_state"]
    expected, is_compared = in_batch(out, config, batch)

    def compute(model: Transformer) -> torch.Tensor:
        return model.final_layernorm(our_output(model, batch, has_task_rows=True)[0][is_compared])

    return Check("hidden states", expected, compute)


def _memory_check(theirs: Any, fields: np.ndarray) -> Check:
    """A text in two segments, the second with the memory of the first. Args: fields: int32 [1, fields, S]."""
    longest, reused = theirs.config.mem_len or None, theirs.config.reuse_len or None
    first, second = (segment.copy() for segment in np.array_split(fields, 2, axis=2))
    second[:, POSITION_IDS] = np.arange(second.shape[2])
    mems = None
    for segment in (first, second):
        inputs = {
            name: torch.from_numpy(segment[:, field].astype(np.int64))
            for name, field in _XLNET_INPUTS.items()
        }
        out = theirs(**inputs, mems=mems, use_mems=True)
        mems = out.mems

    def compute(model: Transformer) -> torch.Tensor:
        _, memory = read_segment(model, first, longest=longest, reused=reused)
        hidden, _ = read_segment(model, second, memory)
        return model.logits(hidden.flatten(0, -2))

    return Check("memory", out.logits.flatten(0, 1), compute)
