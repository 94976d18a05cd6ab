"""What a person reads before a profile is accepted; the figures are those that GLM-5.3-Flash's own launch showed."""

from profiles import glm, group, profile

from accept import summary


def test_the_summary_of_a_hybrid_has_each_group_the_pool_and_the_longest_requests():
    *groups, pool, requests = summary(glm())
    assert groups[0] == "state: 9 layers of MambaSpec, blocks of 2176 tokens, 1 of a request"
    assert groups[4] == "attention: 22 layers of MLAAttentionSpec, blocks of 2176 tokens"
    assert groups[5] == "state: 11 layers of CircularBufferSpec, blocks of 4 tokens, 1 of a request"
    # 185,126,092,800 bytes; 482 blocks of attention, three for each of four recurrent groups, one for the tail.
    assert pool == "13696 free blocks of 13516800 bytes: 172.41 GiB"
    assert requests == "a request of 1048576 tokens reserves 495 blocks: 27.67 of them at once"


def test_a_window_and_what_the_engine_switched_off_are_said():
    windowed = group("SlidingWindowSpec", 128, sliding_window=512)
    lines = list(summary(profile(windowed, enable_prefix_caching=False, enable_chunked_prefill=False)))
    assert lines[0] == "attention: 1 layer of SlidingWindowSpec, blocks of 128 tokens, window 512"
    assert lines[-1] == "the engine switched off enable_prefix_caching and enable_chunked_prefill: it cannot be planned"
