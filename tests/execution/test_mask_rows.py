"""Masks on the device: packed for the rows that need them, applied first, closed when they fail."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.execution import packing, sampling
from engine.execution.buckets import Ladder
from engine.scheduling.schedule import Masks, RowKind
from tests.execution import toys
from tests.execution.test_sampling import Row, batch_of
from tests.execution.toys import DECODE, LAST_CHUNK, LATE, schedule_of

VOCAB = 70
"""More than two words, and not a multiple of 32."""
MASKED = LATE | RowKind.MASKED


def words_of(*ids: int) -> np.ndarray:
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    for i in ids:
        words[i // 32] |= np.uint32(1) << np.uint32(i % 32)
    return words.view(np.int32)


def masks_of(*entries: tuple[int, int, tuple[int, ...]]) -> Masks:
    """Of (slot, generation, ids)."""
    return Masks(
        np.array([slot for slot, *_ in entries], np.int32),
        np.array([generation for _, generation, _ in entries], np.int64),
        np.stack([words_of(*ids) for *_, ids in entries]),
    )


def sampled(
    rows, masks: Masks, slots, generations, is_masked, sampler=sampling.sample
) -> sampling.Sampled:
    mask_rows = sampling.MaskRows(
        is_masked=jnp.asarray(np.array(is_masked)),
        row_slots=jnp.asarray(np.array(slots, np.int32)),
        row_generations=jnp.asarray(np.array(generations, np.int32)),
        slots=jnp.asarray(masks.slots),
        generations=jnp.asarray(masks.generations.astype(np.int32)),
        words=jnp.asarray(masks.words),
    )
    return jax.device_get(jax.jit(sampler)(*batch_of(rows), mask_rows))


def row(**fields) -> Row:
    logits = np.random.default_rng(7).normal(size=VOCAB)
    return Row(logits=logits, history=(1, 2), **fields)


COLUMNS = [
    {},
    {"temperature": 1.0},
    {"temperature": 5.0, "top_k": 3},
    {"temperature": 2.0, "top_p": 0.3, "min_p": 0.1},
    {"repetition_penalty": 3.0, "presence_penalty": -2.0, "frequency_penalty": -2.0},
    {"processed_logprobs": 1, "temperature": 1.0},
]


@pytest.mark.parametrize("columns", COLUMNS, ids=str)
def test_masked_row_samples_only_what_its_mask_allows_whatever_the_logits(columns):
    for allowed in ((0,), (31, 32), (5, 63, 64, 69)):
        for seed in range(6):
            bias = {i: 100.0 for i in (1, 2, 30, 33, 68)}  # on ids the mask forbids
            one = row(columns=columns | {"seed_low": seed}, logit_bias=bias)
            found = sampled([one], masks_of((4, 9, allowed)), [4], [9], [True])
            assert found.token_ids[0] in allowed
            assert not found.lacks_mask[0] and not found.is_stuck[0]


def test_rows_find_their_own_mask_in_any_order_and_free_rows_keep_their_bits():
    rows = [row(), row(), row()]
    masks = masks_of((2, 1, (40,)), (6, 3, (11,)))
    found = sampled(rows, masks, [6, 0, 2], [3, 1, 1], [True, False, True])
    free = jax.device_get(jax.jit(sampling.sample)(*batch_of(rows)))
    assert found.token_ids.tolist() == [11, free.token_ids[1], 40]
    assert found.logprobs[1] == free.logprobs[1] and not found.lacks_mask.any()


@pytest.mark.parametrize(
    ("slot", "generation"), [(4, 8), (5, 9), (0, 0)], ids=["generation", "slot", "both"]
)
def test_mask_of_another_owner_fails_closed(slot, generation):
    found = sampled([row()], masks_of((slot, generation, (3,))), [4], [9], [True])
    assert found.lacks_mask.tolist() == [True]
    assert found.logprobs[0] != 0 and found.is_stuck.tolist() == [True]


def test_greedy_sampler_masks_like_the_full_one():
    one = row(columns={"temperature": 0.0})
    rows = [one, one, one, dataclasses.replace(one, logits=np.full(VOCAB, np.nan))]
    masks = masks_of((2, 1, (40,)), (6, 3, (11, 12)), (5, 2, (9,)))
    # The third row finds the mask of an owner before it.
    owners = [6, 0, 2, 5], [3, 1, 8, 2], [True, False, True, True]
    full = sampled(rows, masks, *owners)
    lean = sampled(
        rows, masks, *owners, sampler=lambda logits, *rest: sampling.greedy(logits, rest[-1])
    )
    assert lean.lacks_mask.tolist() == full.lacks_mask.tolist() == [False, False, True, False]
    assert lean.is_stuck.tolist() == full.is_stuck.tolist()
    assert lean.nonfinite.tolist() == full.nonfinite.tolist() == [False, False, False, True]
    assert lean.token_ids.tolist() == full.token_ids.tolist()
    assert lean.token_ids[0] in (11, 12)
    np.testing.assert_array_equal(lean.logprobs[:2], full.logprobs[:2])


def test_raw_logprobs_are_of_the_unmasked_logits_and_processed_ones_of_the_masked():
    masks = masks_of((4, 9, (3, 40)))
    raw = sampled([row(columns={"num_logprobs": 2})], masks, [4], [9], [True])
    free = jax.device_get(jax.jit(sampling.sample)(*batch_of([row(columns={"num_logprobs": 2})])))
    assert raw.top_ids.tolist() == free.top_ids.tolist()
    columns = {"num_logprobs": 2, "processed_logprobs": 1}
    processed = sampled([row(columns=columns)], masks, [4], [9], [True])
    assert sorted(processed.top_ids[0, :2].tolist()) == [3, 40]
    assert np.exp(processed.top_logprobs[0, :2]).sum() == pytest.approx(1.0)


def test_masked_row_that_other_edits_leave_no_id_is_told_of():
    stuck = row(allowed=(7, 8))
    found = sampled([stuck, row()], masks_of((4, 9, (3,))), [4, 5], [9, 1], [True, False])
    assert found.is_stuck.tolist() == [True, False]
    assert not found.lacks_mask.any()


LADDER = Ladder(
    rows=(1, 4),
    tokens=(8, 32),
    widths=(3, 5),
    query_lens=(1,),
    max_chunk_rows=3,
    deterministic=False,
    masked_rows=2,
    mask_words=3,
)


def test_masks_add_three_programs_and_change_no_other():
    without = dataclasses.replace(LADDER, masked_rows=0, mask_words=0).keys()
    keys = LADDER.keys()
    assert keys[: len(without)] == without
    greedy, full, mixed = keys[len(without) :]
    assert (greedy.sampler, full.sampler, mixed.sampler) == ("greedy", "full", "full")
    for decode in (greedy, full):
        assert (decode.is_decode, decode.rows, decode.width) == (True, 4, 5)
        assert decode.masked_rows == mixed.masked_rows == 2 and "masks 2" in str(decode)
    assert (mixed.is_decode, mixed.head, mixed.tokens) == (False, "score", 32)


def test_steps_with_masks_run_on_the_masked_programs_and_others_do_not():
    keys = LADDER.keys()
    masks = masks_of((0, 0, (1,)))
    one = schedule_of([(0, MASKED, [0], 4)], masks=masks)
    assert LADDER.key_of(one) == keys[-3]
    assert LADDER.key_of(dataclasses.replace(one, is_full_sampler=True)) == keys[-2]
    both = schedule_of([(0, MASKED, [0], 4), (1, LAST_CHUNK, [1, 2], 0)], masks=masks)
    assert LADDER.key_of(both) == keys[-1]
    assert not LADDER.key_of(schedule_of([(0, LATE, [0], 4)])).masked_rows


def test_deterministic_ladder_has_masks_in_every_program():
    ladder = dataclasses.replace(LADDER, deterministic=True)
    keys = ladder.keys()
    assert len(keys) == 3 and all(key.masked_rows == 2 for key in keys)
    plain = schedule_of([(0, LATE, [0], 4)])
    masked = schedule_of([(0, MASKED, [0], 4)], masks=masks_of((0, 0, (1,))))
    assert ladder.key_of(plain) == ladder.key_of(masked)


def test_ladder_without_masks_refuses_a_masked_step():
    ladder = dataclasses.replace(LADDER, masked_rows=0, mask_words=0)
    step = schedule_of([(0, MASKED, [0], 4)], masks=masks_of((0, 0, (1,))))
    with pytest.raises(ValueError, match="1 rows are masked but no program takes masks"):
        ladder.key_of(step)


def check(schedule, key) -> None:
    packing.check(schedule, key, max_slots=5, vocab_size=VOCAB)


KEY = toys.decode_key(rows=4, sampler="full", masked_rows=1, mask_words=3)


def test_masked_rows_on_a_program_without_masks_are_refused():
    key = toys.decode_key(rows=4, sampler="full")
    with pytest.raises(ValueError, match="1 masked rows with 0 masks exceed the 0 that"):
        check(schedule_of([(0, MASKED, [0], 4)]), key)


def test_more_masks_than_the_program_takes_are_refused():
    masks = masks_of((0, 0, (1,)), (1, 0, (1,)))
    with pytest.raises(ValueError, match="2 masked rows with 2 masks exceed the 1 that"):
        check(schedule_of([(0, MASKED, [0], 4), (1, MASKED, [0], 4)], masks=masks), KEY)


def test_masks_of_another_vocabulary_are_refused():
    masks = dataclasses.replace(masks_of((0, 0, (1,))), words=np.zeros((1, 2), np.int32))
    with pytest.raises(ValueError, match="masks have 2 words, the program takes 3"):
        check(schedule_of([(0, MASKED, [0], 4)], masks=masks), KEY)


def test_masks_arrive_as_they_were_packed_and_unused_entries_name_no_slot():
    key = dataclasses.replace(KEY, masked_rows=3)
    generations = np.array([2**40 + 5, 1], np.int64)
    step = schedule_of(
        [(3, MASKED, [0], 4), (1, DECODE, [0], 4)],
        masks=masks_of((3, 2**40 + 5, (0, 64))),
        generations=generations,
    )
    check(step, key)
    flat = packing.pack(step, key, max_slots=5, page_changes=(np.zeros((3, 0), np.int32),))
    _, packed = packing.unpack(key, 1, jnp.asarray(flat))
    masks = packed.masks
    assert masks is not None
    assert masks.is_masked.tolist() == [True, False, False, False]
    assert masks.slots.tolist() == [3, 6, 6] and masks.row_slots.tolist()[:2] == [3, 1]
    assert masks.generations.tolist()[0] == masks.row_generations.tolist()[0] == 5
    assert masks.words[0].tolist() == words_of(0, 64).tolist()
    assert not masks.words[1:].any()


def test_programs_without_masks_pack_nothing_for_them():
    names = [name for name, *_ in packing.batch_ranges(toys.decode_key(sampler="full"), 1).places]
    assert not any("mask" in name or name == "generations" for name in names)
