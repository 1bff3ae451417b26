"""A latent space learnt in seconds: OPTIMUS under torch's AdamW, without engine and trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from data_utils.common.settings import build
from data_utils.loader.loader import open_datasets
from data_utils.objectives import LOSS_NAMES
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.config.tree import Config
from megatron_lite.models.optimus.config import latent_of
from megatron_lite.models.optimus.latent import beta
from megatron_lite.models.optimus.model import Optimus
from megatron_lite.models.optimus.open_run import LatentRun
from megatron_lite.transformer.build import build_model, model_spec
from megatron_lite.transformer.micro_batch import MicroBatch


def learn(tree: dict[str, Any]) -> LatentRun:
    """What a run of these settings would learn, but for the learning rate, which falls linearly to a tenth."""
    tokenizer = load_tokenizer(build(Config, tree).tokenizer)
    config = build(Config, tree).with_vocab_size(tokenizer.vocab_size)
    latent, steps, rows = latent_of(config), config.training.steps, config.batch.global_batch_size
    assert latent is not None
    data = open_datasets(config.data, config.objective_choices, tokenizer, config.training.seed)
    samples = model_spec(config).samples(config, data.train, "train")
    model = build_model(config, len(LOSS_NAMES))
    assert isinstance(model, Optimus)
    solver = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(steps):
        model.beta = beta(
            step, steps, peak=latent.beta, cycles=latent.cycles,
            zero_share=latent.zero_share, rise_share=latent.rise_share,
        )  # fmt: skip
        for group in solver.param_groups:
            group["lr"] = config.optimizer.lr * (1.0 - 0.9 * step / steps)
        batch = samples.batch(np.arange(step * rows, (step + 1) * rows))
        given = MicroBatch.from_batch(batch, torch.device("cpu"), config.model, decoder_config=config.decoder)
        loss, sums = model(given)
        (loss / sums[:, 1].max()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad_norm)
        solver.step()
        solver.zero_grad()
    return LatentRun(config, tokenizer, tokenizer, model.eval(), "the model")
