"""The frozen list of GLM-5.3-Flash (origin `glm53flash_grid_v1`), general in block, budget, context and batch."""

from producer.grids.axes import doublings
from producer.partition import decode_prefix
from schemas.points import DecodePoint, PointManifest, PrefillPoint

ORIGIN = "glm53flash_grid_v1"
LONGEST_CONTEXT = 131072
CONTEXT_RESERVE = 7
"""Tokens below max_model_len that the original keeps free."""
LARGEST_BATCH = 32
SHORTEST = 4


def _powers(first: int, limit: int) -> list[int]:
    """`first` and its doublings, up to and including `limit`."""
    values = []
    while first <= limit:
        values.append(first)
        first *= 2
    return values


def measured_context(max_model_len: int) -> int:
    """Longest context of the list, in tokens."""
    return min(LONGEST_CONTEXT, max_model_len - CONTEXT_RESERVE)


def candidates(block: int, token_budget: int, max_model_len: int, max_batch_size: int) -> PointManifest:
    """Every candidate, in the frozen order: new tokens, batch, prefix; context, batch. Sizes in tokens."""
    context, largest = measured_context(max_model_len), min(LARGEST_BATCH, max_batch_size)
    lengths = sorted({*_powers(SHORTEST, token_budget), *range(block, token_budget + 1, block)})
    prefill: list[PrefillPoint] = []
    for new in lengths:
        feasible = min(largest, token_budget // new)
        batches = sorted({*_powers(1, feasible), feasible})
        blocks = (context - new) // block
        prefixes = [0, *(doublings(1, blocks) if blocks > 0 else ())]
        prefill.extend(
            PrefillPoint(
                batch_size=batch_size,
                total_prefill_tokens=batch_size * new,
                total_kv_read_tokens=batch_size * prefix * block,
            )
            for batch_size in batches
            for prefix in prefixes
        )
    decode: list[DecodePoint] = []
    for length in _powers(SHORTEST, context):
        tail = length - 1 - decode_prefix(length, block)
        batches = sorted({*_powers(1, largest), min(largest, max(1, token_budget // tail))})
        decode.extend(
            DecodePoint(batch_size=batch_size, total_kv_read_tokens=batch_size * length) for batch_size in batches
        )
    return PointManifest(prefill=tuple(prefill), decode=tuple(decode))


def smoke(manifest: PointManifest, block: int) -> PointManifest:
    """Points of the list that touch its paths: no prefix, one block of prefix, a chunk over a checkpoint; two decodes.

    A launch without checkpoint has no third prefill point: its list does not hold it.
    """
    prefill = [(1, 64, 0), (1, 64, block), (1, 2 * block, block)]
    decode = [(1, 4096), (2, 4096)]
    wanted_prefill = [
        PrefillPoint(batch_size=b, total_prefill_tokens=b * new, total_kv_read_tokens=b * kv) for b, new, kv in prefill
    ]
    wanted_decode = [DecodePoint(batch_size=b, total_kv_read_tokens=b * context) for b, context in decode]
    return PointManifest(
        prefill=tuple(point for point in wanted_prefill if point in manifest.prefill),
        decode=tuple(point for point in wanted_decode if point in manifest.decode),
    )
