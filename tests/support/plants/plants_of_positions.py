"""Planted bugs of disentangled attention, and of rotary bases that change with the phase."""

from __future__ import annotations

from support.plants.plant import Plant

DETACHED = "tests/electra/test_detached.py"
PAIR = "tests/electra/test_detached_pair.py"
CLASS = "tests/hf/test_published.py::test_logits_and_gradients_match_the_class[deberta_v3]"
LAYOUTS = "tests/train/test_parity.py::test_some_further_cases_equal_one_process"
ENGINE = "megatron_lite/engine/engine.py"
BASES = "tests/train/test_rotary_phases.py::test_a_phase_has_its_base_in_training_evaluation_and_export"

POSITIONS = (
    Plant(
        "distances from the key to the query",
        "megatron_lite/transformer/disentangled.py",
        "positions[queries][..., :, None] - positions[keys][..., None, :]",
        "positions[keys][..., None, :] - positions[queries][..., :, None]",
        (CLASS,),
    ),
    Plant(
        "queries of buckets without the factor of queries",
        "megatron_lite/transformer/disentangled.py",
        "position_queries * (self.factor * scale)",
        "position_queries * scale",
        (CLASS,),
    ),
    Plant(
        "the gradient of buckets is that of a rank's own heads",
        "megatron_lite/transformer/disentangled.py",
        "PositionVectors(self.parallel.copy(vectors), tuple(buckets))",
        "PositionVectors(vectors, tuple(buckets))",
        (LAYOUTS,),
    ),
    Plant(
        "a table of relative positions is used once for each group of documents",
        "megatron_lite/transformer/position_bias.py",
        "table = self()",
        "table = [self() for _ in plan.query_key_pairs(positions.device)][-1]",
        (f"{LAYOUTS}[1x1x2]",),
    ),
    Plant(
        "the discriminator's loss teaches the generator's words",
        "megatron_lite/models/electra/model.py",
        "with torch.no_grad():",
        "if True:",
        (f"{DETACHED}::test_losses_and_gradients_match_a_plain_model",),
    ),
    Plant(
        "a discriminator's own words begin as others do",
        "megatron_lite/models/electra/model_spec.py",
        "nn.init.zeros_(model.encoder.embedding.word_embeddings.weight)",
        "pass",
        (f"{DETACHED}::test_losses_and_gradients_match_a_plain_model",),
    ),
    Plant(
        "a discriminator alone without the generator's words",
        "megatron_lite/checkpoint/full_word_embedding.py",
        "slices=(*checkpoint.slices, *added)",
        "slices=checkpoint.slices",
        (f"{PAIR}::test_the_pair_comes_back_with_the_words_of_the_sum",),
    ),
    Plant(
        "tied words share a bucket of gradients with what all stages hold",
        "megatron_lite/engine/parameter_groups.py",
        "on_all_stages=name.startswith(SHARED_BY_STAGES),",
        "",
        (LAYOUTS,),
    ),
    Plant(
        "a model keeps the rotary base of the run in all phases",
        ENGINE,
        "module.config = replace(module.config, rotary_base=model.rotary_base)",
        "pass",
        (BASES,),
    ),
    Plant(
        "a phase changes the rotary base of local layers too",
        ENGINE,
        "rotary_base=model.rotary_base)",
        "rotary_base=model.rotary_base, rotary_base_local=model.rotary_base)",
        (BASES,),
    ),
    Plant(
        "pipeline stages keep the rotary base of the run in all phases",
        "megatron_lite/engine/pipeline.py",
        "self._stages.options = model",
        "pass",
        ("tests/train/test_phases.py::test_batches_change_in_every_layout[2-parallel2]",),
    ),
    Plant(
        "a checkpoint is opened and exported with the rotary base of the run",
        "megatron_lite/inference/open_run.py",
        ".trained(state.step)",
        "",
        (BASES,),
    ),
    Plant(
        "an evaluation before the first step has the rotary base of the run",
        "megatron_lite/train/trainer.py",
        "self.engine.set_step(state.step)  #",
        "#",
        (BASES,),
    ),
)
