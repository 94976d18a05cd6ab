"""The prompts of Dynamo's self-benchmark: their lengths and digests, derived again where their specification allows."""

import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import repeat
from random import Random

from msgspec import UNSET

from schemas.canonical import digest, sha256
from schemas.native import NativePoint, Row

from dynamo_blocks import Blocks, Protocol
from dynamo_points import REAL_KV, Shape


def prompt_sha256(protocol: Protocol, rank: int, salt: str, length: int, vocab_size: int) -> str:
    """sha256 of a salted random prompt's `length` token ids as little-endian uint32 (native artifact, 6.2)."""
    draw = Random(f"content-v1:{protocol.content_seed}:dp{rank}:{salt}").random  # noqa: S311 (Dynamo's own generator)
    # What `choices(range(1, vocab_size), k=length)` draws, in two thirds of the time: most of judging a cell.
    last = float(vocab_size - 1)
    ids = array("I", [int(draw() * last) + 1 for _ in repeat(None, length)])
    if sys.byteorder == "big":
        ids.byteswap()
    return sha256(ids.tobytes())


def underivable(row: Row, blocks: Blocks) -> str:
    """Why the token ids of a point cannot be made again; empty when they can."""
    protocol = blocks.protocol
    if protocol is None:
        return "no protocol"
    if row.kv_seed_regime in (*REAL_KV, "real_prefix"):
        return "real seeds"
    if "giant_fake_off_by_batch" in row.point.sample_reasons:
        return "measured short of the declared total"
    if protocol.synthetic_content != "random" or protocol.synthetic_pool_tag:
        return f"{protocol.synthetic_content} content {protocol.synthetic_pool_tag}".rstrip()
    return ""


def salts(point: NativePoint, lengths: list[int], point_key: str) -> list[str]:
    """The salt of each slot's prompt."""
    if point.point_type == "decode":
        name = f"decode:{digest([length - 1 for length in lengths])}"
    elif point.total_kv_read_tokens:
        name = f"point:{point_key}:fake_prefix"
    else:
        name = f"prefill:{digest(lengths)}"
    return [f"{name}:slot{slot}" for slot in range(len(lengths))]


def prompt_lengths(row: Row, shape: Shape, blocks: Blocks) -> list[int]:
    """Injected prompts: the whole request; of a native chain of real KV the context without its last token."""
    native = blocks.kvwarm is not None and blocks.kvwarm.initialization_strategy is not UNSET
    short = 1 if native and row.kv_seed_regime in REAL_KV else 0
    return [length - short for length in shape.lengths]


def vague_lengths(row: Row, blocks: Blocks) -> bool:
    """Whether prompts may be longer or shorter than their contexts: on a shared chain, or short of a declared total."""
    native = blocks.kvwarm is not None and blocks.kvwarm.initialization_strategy is not UNSET
    shared = row.kv_seed_regime in REAL_KV and not native
    return shared or "giant_fake_off_by_batch" in row.point.sample_reasons


def prompt_failures(where: str, row: Row, rank: int, shape: Shape, blocks: Blocks) -> Iterator[str]:
    """The length of each prompt, and its digest where it can be derived."""
    measurement = row.fpms[0].benchmark_measurement
    if measurement is UNSET or measurement.prompts.status == "unavailable":
        return
    requests = measurement.prompts.requests
    lengths, found = prompt_lengths(row, shape, blocks), [each.num_tokens for each in requests]
    if lengths != found and not vague_lengths(row, blocks):
        yield f"{where} prompts num_tokens: expected {lengths}, found {found}"
        return
    if blocks.protocol is None or underivable(row, blocks):
        return
    for each, salt in zip(requests, salts(row.point, lengths, measurement.point_key), strict=True):
        derived = prompt_sha256(blocks.protocol, rank, salt, each.num_tokens, blocks.synthetic_prompts.vocab_size)
        if derived != each.sha256:
            yield f"{where} prompt of slot {each.slot}: expected sha256 {derived}, found {each.sha256}"


def prompt_gaps(rows: list[Row], blocks: Blocks) -> Iterator[str]:
    """Prompts that are not recorded, or whose ids nothing in the artifact gives again."""
    points: Counter[str] = Counter()
    for row in rows:
        measurement = row.fpms[0].benchmark_measurement
        if measurement is UNSET:
            continue
        if measurement.prompts.status == "unavailable":
            points["unavailable"] += 1
            continue
        if why := underivable(row, blocks):
            points[f"not derivable ({why})"] += 1
        tokens = sum(request.num_tokens for request in measurement.prompts.requests)
        if vague_lengths(row, blocks) and tokens != row.point.total_kv_read_tokens:
            points["longer or shorter than their contexts"] += 1
    for line, count in sorted(points.items()):
        yield f"prompts of {count} points: {line}"
