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


def estimated_blocks_of_request(groups: tuple[ProfileGroup, ...], total_tokens: int, block_size: int) -> int:
    """The original planner's estimate: attention by the deployment's block, one for each state group, one more for
    each that holds a checkpoint. It leaves out the state block that a prefix hit keeps resident."""
    blocks = 0
    for group in groups:
        if group.kind == "state":
            blocks += 1 + (1 if group.prefill_checkpoint_blocks else 0)
        else:
            blocks += ceil_div(total_tokens, block_size)
    return blocks


def startup_blocks_of_request(groups: tuple[ProfileGroup, ...], max_model_len: int, max_num_tokens: int) -> int:
    """Blocks that vLLM reserves for one request of `max_model_len` tokens when it reports its concurrency.

    v1/kv_cache_interface.py `max_memory_usage_bytes`: a sliding window keeps what one step may add to it, plus one
    block; a recurrent group in align mode keeps two blocks beside speculative and checkpoint blocks.
    """
    blocks = 0
    for group in groups:
        size = group.block_size_tokens
        if group.spec_type == "MambaSpec":
            blocks += 1 + (group.blocks_per_request or 1) + (group.prefill_checkpoint_blocks or 0)
        elif group.kind == "state":
            blocks += group.blocks_per_request or 1
        elif group.sliding_window is not None:
            blocks += ceil_div(min(group.sliding_window - 1 + max_num_tokens, max_model_len), size) + 1
        else:
            blocks += ceil_div(max_model_len, size)
    return blocks
