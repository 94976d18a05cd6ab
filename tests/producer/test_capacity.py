import pytest

from producer.capacity import blocks_of_requests, blocks_to_seed, startup_blocks_of_request
from schemas.profile import ProfileGroup


def group(spec_type: str, block: int, **more) -> ProfileGroup:
    kind = "state" if spec_type in ("MambaSpec", "CircularBufferSpec") else "attention"
    fields = {"name": "g", "kind": kind, "spec_type": spec_type, "num_layers": 1, "page_size_bytes": 1}
    return ProfileGroup(**fields, block_size_tokens=block, **more)


FULL = group("FullAttentionSpec", 128)
WINDOW = group("SlidingWindowSpec", 128, sliding_window=512)
STATE = group("MambaSpec", 256, blocks_per_request=1)
GLM = (
    *(group("MambaSpec", 2176, blocks_per_request=1, prefill_checkpoint_blocks=1) for _ in range(4)),
    group("MLAAttentionSpec", 2176),
    group("CircularBufferSpec", 4, blocks_per_request=1),
)


@pytest.mark.parametrize(
    ("groups", "tokens", "expected"),
    [
        ((FULL,), [0, 1], 1),
        ((FULL,), [0, 128], 1),
        ((FULL,), [128, 129], 2),
        # The first new token sees tokens 513..1024: blocks 0 to 3 are behind the window.
        ((WINDOW,), [1024, 1025], 9 - 4),
        ((WINDOW,), [0, 1024], 8),
        ((STATE,), [0, 256], 1),
        # The hit state block stays beside the running one for the first step, and no longer.
        ((STATE,), [256, 300], 2),
        ((STATE,), [256, 300, 301, 302], 2),
        # A decode step that crosses into another block holds the state it leaves beside the one it makes.
        ((STATE,), [0, 255, 256, 257], 2),
        ((STATE, group("FullAttentionSpec", 256)), [0, 255, 256, 257], 2 + 2),
        ((STATE, group("FullAttentionSpec", 256)), [256, 511, 512, 513], 3 + 2),
        # 61 blocks, a tail, 4 states with their hit and checkpoint: the largest request of the frozen GLM list.
        (GLM, [131072 - 8192, 131072], 61 + 1 + 4 * 3),
        (GLM, [2176, 4352], 2 + 1 + 4 * 2),
        (GLM, [0, 2176], 1 + 1 + 4),
    ],
)
def test_blocks_of_one_request_at_its_peak(groups, tokens, expected):
    assert blocks_of_requests(groups, [tokens]) == expected


def test_requests_are_served_one_after_the_other_within_a_step():
    # First step: 1 and, with its hit, 2. Second: slot 0 crosses and holds 2 while slot 1, served after it, still has 2.
    assert blocks_of_requests((STATE,), [[0, 256, 257], [256, 300, 301]]) == 2 + 2
    # The other way round slot 1 gives up its hit before slot 0 crosses: never more than 3.
    assert blocks_of_requests((STATE,), [[256, 300, 301], [0, 256, 257]]) == 3


@pytest.mark.parametrize(
    ("groups", "prefixes", "expected"),
    [
        ((FULL,), [0, 0], 0),
        ((FULL,), [256, 128], 3 + 2),
        # Four blocks of the window stay; a seed holds a step of 2,048 tokens and its window, at most its own 9 blocks.
        ((WINDOW,), [1024], 9 + 4),
        ((STATE,), [256], 3),
    ],
)
def test_blocks_within_which_prefixes_can_be_seeded(groups, prefixes, expected):
    assert blocks_to_seed(groups, prefixes, 2048) == expected


@pytest.mark.parametrize(
    ("groups", "max_model_len", "max_num_tokens", "expected"),
    [
        # Reported concurrency of the CPU engine: 1024/32, 2048/74, 2048/22 blocks.
        ((FULL,), 4096, 2048, 32),
        ((WINDOW, WINDOW, FULL), 4096, 2048, 21 + 21 + 32),
        ((STATE, STATE, STATE, group("FullAttentionSpec", 256)), 4096, 2048, 3 * 2 + 16),
        # GLM-5.3-Flash, live: 13,697 / 495 = 27.67.
        (GLM, 1_048_576, 8192, 482 + 4 * 3 + 1),
    ],
)
def test_blocks_reserved_at_start_up(groups, max_model_len, max_num_tokens, expected):
    assert startup_blocks_of_request(groups, max_model_len, max_num_tokens) == expected


@pytest.mark.parametrize(("mode", "expected"), [("align", 3 * 2 + 16), ("none", 3 * 1 + 16)])
def test_a_recurrent_group_keeps_the_state_that_it_leaves_in_align_mode_alone(mode, expected):
    """v1/kv_cache_interface.py, MambaSpec.max_memory_usage_bytes: 2 blocks, and outside align mode 1."""
    groups = (STATE, STATE, STATE, group("FullAttentionSpec", 256))
    assert startup_blocks_of_request(groups, 4096, 2048, mode) == expected


def test_a_convolution_holds_the_blocks_that_its_window_reaches():
    """Inkling's short convolutions: a window of 4 tokens in blocks of 4."""
    fields = WINDOW.model_dump() | {"kind": "convolution", "block_size_tokens": 4, "sliding_window": 4}
    convolution = ProfileGroup.model_validate(fields)
    # Token 1,025 sees tokens 1,022 to 1,025: blocks 255 and 256.
    assert blocks_of_requests((convolution,), [[1024, 1025]]) == 2
    # 3 tokens of the window and a step of 2,048 lie in 513 blocks, and one more because they start inside of one.
    assert startup_blocks_of_request((convolution,), 4096, 2048) == 513 + 1
