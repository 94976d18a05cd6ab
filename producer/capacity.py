"""Capacity: how many blocks of the shared pool one request holds at its peak, by kind of cache group."""

from schemas.profile import ProfileGroup


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def blocks_in_step(group: ProfileGroup, computed: int, after: int, first: bool) -> int:
    """Blocks of one group that a request holds when a step has taken it from `computed` to `after` tokens.

    `first` says whether the step is its first, in which `computed` tokens are a prefix hit.

    Full attention holds everything; a sliding window the blocks that the window of the step's first token reaches; a
    ring or tail its own. A recurrent group holds its running state; beside it, in the first step, the state block
    that the prefix hit and a checkpoint block when one is used; in a later step that crosses into another block, the
    state block it leaves (vLLM v1/core/single_type_kv_cache_manager.py, MambaManager.remove_skipped_blocks and
    allocate_new_blocks).
    """
    size = group.block_size_tokens
    if group.spec_type == "MambaSpec":
        running = group.blocks_per_request or 1
        if first:
            checkpoint = group.prefill_checkpoint_blocks if after - computed > size else 0
            return running + (1 if computed else 0) + (checkpoint or 0)
        return running + (1 if ceil_div(after, size) > ceil_div(computed, size) else 0)
    if group.kind == "state":
        return group.blocks_per_request or 1
    skipped = 0
    if group.sliding_window is not None:
        skipped = max(0, computed - group.sliding_window + 1) // size
    return ceil_div(after, size) - skipped


def blocks_of_requests(groups: tuple[ProfileGroup, ...], requests: list[list[int]]) -> int:
    """Most blocks of the pool that requests in lockstep hold together.

    Each request is its computed tokens before its first step and after each step: [prefix, prompt, prompt + 1, ...].
    Within a step the scheduler serves them one after the other, so the peak may lie between two of them.
    """
    held = [0] * len(requests)
    peak = 0
    for step in range(1, len(requests[0])):
        for slot, tokens in enumerate(requests):
            computed, after = tokens[step - 1], tokens[step]
            held[slot] = sum(blocks_in_step(group, computed, after, step == 1) for group in groups)
            peak = max(peak, sum(held))
    return peak


def retained_blocks(groups: tuple[ProfileGroup, ...], prefix: int) -> int:
    """Cached blocks that a later request with this prefix must still find."""
    blocks = 0
    for group in groups if prefix else ():
        if group.spec_type == "MambaSpec":
            blocks += 1
        elif group.kind != "state":
            whole = prefix // group.block_size_tokens
            window = group.sliding_window
            blocks += whole if window is None else min(whole, ceil_div(window - 1, group.block_size_tokens))
    return blocks


def blocks_to_seed(groups: tuple[ProfileGroup, ...], prefixes: list[int], max_num_tokens: int) -> int:
    """Blocks within which the prefixes of all slots can surely be seeded together and then be found.

    What must stay cached of each prefix, and beside it what a seed may hold while it runs: never too few, so that no
    seed evicts another slot's prefix.
    """
    blocks = 0
    for prefix in prefixes:
        for group in groups if prefix else ():
            size, window = group.block_size_tokens, group.sliding_window
            if group.spec_type == "MambaSpec":
                blocks += 1 + 2 + (group.prefill_checkpoint_blocks or 0)
            elif group.kind == "state":
                blocks += group.blocks_per_request or 1
            elif window is None:
                blocks += ceil_div(prefix + 1, size)
            else:
                blocks += min(ceil_div(prefix + 1, size), ceil_div(window - 1 + max_num_tokens, size) + 1)
                blocks += min(prefix // size, ceil_div(window - 1, size))
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


def startup_blocks_of_request(
    groups: tuple[ProfileGroup, ...], max_model_len: int, max_num_tokens: int, mamba_cache_mode: str = "align"
) -> int:
    """Blocks that vLLM reserves for one request of `max_model_len` tokens when it reports its concurrency.

    v1/kv_cache_interface.py `max_memory_usage_bytes`: a sliding window keeps what one step may add to it, plus one
    block; a recurrent group in align mode keeps two blocks beside speculative and checkpoint blocks, in any other
    mode its running state alone.
    """
    blocks = 0
    for group in groups:
        size = group.block_size_tokens
        if group.spec_type == "MambaSpec":
            kept = 1 + (group.prefill_checkpoint_blocks or 0) if mamba_cache_mode == "align" else 0
            blocks += (group.blocks_per_request or 1) + kept
        elif group.kind == "state":
            blocks += group.blocks_per_request or 1
        elif group.sliding_window is not None:
            blocks += ceil_div(min(group.sliding_window - 1 + max_num_tokens, max_model_len), size) + 1
        else:
            blocks += ceil_div(max_model_len, size)
    return blocks
