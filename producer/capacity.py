"""Capacity: how many blocks of the shared pool one request holds at its peak, by kind of cache group."""

from schemas.profile import ProfileGroup


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def blocks_of_request(groups: tuple[ProfileGroup, ...], prefix_tokens: int, total_tokens: int) -> int:
    """Blocks that one request holds while it computes tokens [prefix_tokens, total_tokens) of itself in one step.

    Full attention holds everything; a sliding window holds the blocks that the window of the first new token
    reaches; a ring or tail holds its own; a recurrent group holds its running state, beside it the state block
    that the prefix hit (it stays resident), and a checkpoint block when one is used.
    Exact on all points of the frozen GLM-5.3-Flash lists against vLLM 0.33.0's own scheduler.
    """
    blocks = 0
    for group in groups:
        size = group.block_size_tokens
        if group.kind == "state":
            blocks += group.blocks_per_request or 1
            if group.spec_type == "MambaSpec":
                blocks += 1 if prefix_tokens > 0 else 0
                if group.prefill_checkpoint_blocks and total_tokens - prefix_tokens > size:
                    blocks += group.prefill_checkpoint_blocks
        else:
            skipped = 0
            if group.sliding_window is not None:
                skipped = max(0, prefix_tokens - group.sliding_window + 1) // size
            blocks += ceil_div(total_tokens, size) - skipped
    return blocks
