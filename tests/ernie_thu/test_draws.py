"""Entities that the model reads: shares of replaced and removed ones, drawn by the sample alone; and their places."""

import numpy as np
from support.data.recipes import make, text_of
from support.systems.entity_models import COUNT, NOISE, RandomVectors, batch_of, rows_of

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, DOC, FIELDS, TARGETS, TOKENS, WEIGHTS
from data_utils.loader.loader import collate
from megatron_lite.models.ernie_thu.batch import EntityBatch

SAMPLES, LENGTH = 500, 2000  # a million draws


def test_shares_of_replaced_removed_and_kept_entities():
    fields = np.zeros((SAMPLES, len(FIELDS), LENGTH), np.int32)
    fields[:, BLOCK_POSITION_IDS] = 1 + np.arange(LENGTH) % 997
    batch = EntityBatch(fields, np.arange(SAMPLES), NOISE, RandomVectors())
    _, which, begins = batch.candidates
    assert len(which) == SAMPLES * LENGTH and (np.diff(begins) == 997).all()
    given = batch.read_candidates
    itself = NOISE.replaced / 997  # a draw may be the entity itself
    for found, share in (
        (given == -1, NOISE.removed),
        ((given >= 0) & (given != which), NOISE.replaced - itself),
        (given == which, 1 - NOISE.removed - NOISE.replaced + itself),
    ):
        error = 3 * (share * (1 - share) / len(given)) ** 0.5
        assert abs(found.mean() - share) < error
    drawn = (given - begins[batch.examples[0][batch.mentioned]])[(given >= 0) & (given != which)]
    assert drawn.min() == 0 and drawn.max() == 996
    counts = np.bincount(drawn, minlength=997)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 997 + 5 * (2 * 997) ** 0.5  # chi-square


def test_draws_depend_on_the_sample_alone():
    whole = batch_of(6)
    example, row = whole.examples[0][whole.mentioned], whole.mentioned // whole.fields.shape[2]
    begins = whole.candidates[2]
    for number in range(6):
        alone = EntityBatch(rows_of(6)[number : number + 1], np.array([number]), NOISE, RandomVectors())
        own = whole.read_candidates[row == number]
        own = np.where(own < 0, -1, own - begins[example[row == number].min()])
        assert own.tolist() == alone.read_candidates.tolist()
    other = EntityBatch(whole.fields, whole.samples + 1, NOISE, RandomVectors())
    assert not np.array_equal(other.read_candidates, whole.read_candidates)


def test_entities_stay_on_their_tokens():
    """Through pairs whose halves are exchanged, and through masks: the entity of a token is its own."""
    made = make("entities", 120)
    pieces = [text_of(length, first=1000 + 50 * at) for at, length in enumerate((40, 30, 20))]
    text = np.concatenate(pieces)
    entities = np.where(text % 3 == 0, text % COUNT, -1).astype(np.int32)  # of a token, by its id
    entities[text < 1000] = -1
    lengths = np.array([len(piece) for piece in pieces])
    seen = 0
    for sample in range(30):
        batch = collate(made, np.stack([text, entities]), lengths, np.array([3]), np.array([sample]))[0]
        token = np.where(batch[WEIGHTS] != 0, batch[TARGETS], batch[TOKENS])
        is_text = (batch[DOC] >= 0) & (token >= 1000)
        expected = np.where(is_text & (token % 3 == 0), token % COUNT + 1, 0)
        assert batch[BLOCK_POSITION_IDS].tolist() == expected.tolist()
        seen += int((expected > 0).sum())
    assert seen > 500
