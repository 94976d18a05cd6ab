"""Token stream, reduction, seeding order."""

import hashlib
import random
import struct

import pytest

from producer.partition import decode_prefix
from producer.reduction import adjacent_upper_median
from producer.seeding import distinct_prefix_tokens, execution_order
from producer.tokens import TokenStream, ids_sha256
from schemas.points import PrefillPoint


def test_the_kept_value_is_the_fifth_smallest_of_measurements_2_to_10():
    walls = [0.1, 9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0]
    assert adjacent_upper_median(walls) == (5.0, [1, 2, 3, 4, 5, 6, 7, 8, 9])


def test_an_even_number_of_samples_takes_the_upper_one():
    assert adjacent_upper_median([0.0, 1.0, 2.0, 3.0, 4.0])[0] == 3.0


def test_tokens_can_be_derived_from_their_specification_by_hand():
    stream = TokenStream("53", vocab_size=1000)
    source = random.Random("passgrid_tokens_v1:53:dp0:prefix:slot2")
    by_hand = [3 + int(source.random() * 997) for _ in range(7)]
    assert list(stream.prefix(2, 7)) == by_hand
    assert list(stream.prefix(2, 4)) == by_hand[:4]


def test_a_prompt_digest_is_over_little_endian_uint32():
    ids = TokenStream("53", 1000).unique("x", 5)
    assert ids_sha256(ids) == hashlib.sha256(struct.pack("<5I", *ids)).hexdigest()


def test_repetitions_share_their_prefix_and_nothing_else():
    stream = TokenStream("53", 100_000)
    first, second = stream.prompt("k", 0, 1, 64, 128), stream.prompt("k", 1, 1, 64, 128)
    assert first[:64] == second[:64]
    assert sum(a == b for a, b in zip(first[64:], second[64:], strict=True)) < 3


def test_points_run_by_prefix_and_keep_their_frozen_order_inside():
    points = tuple(
        PrefillPoint(batch_size=b, total_prefill_tokens=b * 8, total_kv_read_tokens=b * p)
        for b, p in ((1, 256), (2, 0), (4, 128), (1, 0), (2, 256))
    )
    assert execution_order(points, 128) == [1, 3, 2, 0, 4]
    # Slots 0 and 1 reach 256, slots 2 and 3 reach 128.
    assert distinct_prefix_tokens(points, 128) == 2 * 256 + 2 * 128


@pytest.mark.parametrize(("context", "expected"), [(2, 0), (129, 0), (130, 128), (257, 128), (258, 256)])
def test_a_decode_prefix_leaves_one_prompt_token_to_compute(context, expected):
    assert decode_prefix(context, 128) == expected
