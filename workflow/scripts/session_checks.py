"""What each engine start of a measured cell says of itself, against the cell that it was started for."""

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from math import inf
from typing import Any, NamedTuple

from producer.adapters import GROUP_KINDS, UNIFORM_SPEC
from producer.engine import THREAD_SETTINGS
from producer.journal import Journal
from producer.launch_checks import ABSENT, MODELLED
from producer.record import RECURRENT
from schemas.journal import RankSession, SessionLine
from schemas.plan import FrozenCell

from launch_settings import block_doubts, setting_doubts
from rank_checks import same
from worker_checks import CACHE_DTYPES

COLLECTOR_AT_REST = {"enabled": False, "frozen": True}

CUDAGRAPH_MODES = {
    "NONE": ("NONE", "NONE"),
    "PIECEWISE": ("PIECEWISE", "PIECEWISE"),
    "FULL": ("FULL", "FULL"),
    "FULL_DECODE_ONLY": ("NONE", "FULL"),
    "FULL_AND_PIECEWISE": ("PIECEWISE", "FULL"),
}
"""Graph mode of a launch -> that of its prefill and of its decode steps (vLLM 0.32.0, config/compilation.py:59-69)."""

CLOCK_STEP = timedelta(minutes=1)
"""How far the clock of a host may be set back while a cell is measured."""

RUN_ID = re.compile(r"[0-9a-f]{32}")


class Kind(NamedTuple):
    """What is asked of a value that no file of the cell fixes: in words, and the question."""

    words: str
    holds: Callable[[Any], bool]

    def __str__(self) -> str:
        return self.words


def is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


TEXT = Kind("a text", lambda value: isinstance(value, str) and value != "")
TEXT_OR_NONE = Kind("a text or None", lambda value: value is None or TEXT.holds(value))
FLAG = Kind("True or False", lambda value: isinstance(value, bool))
POSITIVE = Kind("a positive count", lambda value: is_count(value, 1))
POSITIVE_OR_NONE = Kind("a positive count or None", lambda value: value is None or is_count(value, 1))
COUNT_OR_NONE = Kind("a count or None", lambda value: value is None or is_count(value))
MAPPING = Kind("a mapping", lambda value: isinstance(value, dict))
LIST_OF_MAPPINGS = Kind(
    "a list of mappings", lambda value: isinstance(value, list) and all(isinstance(part, dict) for part in value)
)


def list_of(kind: Kind, length: int | None = None) -> Kind:
    """Lists of such values, of one length or of any but 0."""

    def holds(value: Any) -> bool:
        right = isinstance(value, list) and (len(value) == length if length is not None else bool(value))
        return right and all(kind.holds(part) for part in value)

    return Kind(f"a list of {'' if length is None else f'{length} times '}{kind}", holds)


def mismatches(field: str, expected: Any, found: Any) -> Iterator[str]:
    """A line for each leaf that is not what it should be, by value and type; a mapping has exactly its keys."""
    if isinstance(expected, Kind):
        if not expected.holds(found):
            yield f"{field}: expected {expected}, found {found}"
    elif not isinstance(expected, Mapping):
        if not same(expected, found):
            yield f"{field}: expected {expected}, found {found}"
    elif not isinstance(found, dict):
        yield f"{field}: expected a mapping, found {found}"
    else:
        for key in sorted(expected.keys() | found.keys()):
            if key not in found:
                shown = MAPPING if isinstance(expected[key], Mapping) else expected[key]
                yield f"{field}.{key}: expected {shown}, found nothing"
            elif key not in expected:
                yield f"{field}.{key}: expected no such field, found {found[key]}"
            else:
                yield from mismatches(f"{field}.{key}", expected[key], found[key])


def part(record: Any, *keys: str) -> Any:
    """What stands at `keys` of a record that may be no mapping; None where nothing does."""
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    return record


def expected_engine(cell: FrozenCell, session: SessionLine, rank: int, found: RankSession) -> dict[str, Any]:
    """The `engine` block of a rank (`observe_engine`), without cache groups and `serving_config`."""
    identity = cell.identity
    topology, limits = identity.topology, identity.limits
    threads = part(found.engine, "threads")
    settings = {name: identity.environment.get(name, TEXT) for name in THREAD_SETTINGS}
    cache_dtypes = CACHE_DTYPES.get(identity.precision.kv_cache, ())
    return {
        "kv_cache": {
            "cache_dtype": Kind(f"one of {cache_dtypes}", lambda value: value in cache_dtypes),
            # One block for the scheduler and the cache configuration: any other launch is refused (launch_checks).
            "block_size": cell.block_size,
            "enable_prefix_caching": True,
            "groups": LIST_OF_MAPPINGS,
        },
        "quantization": {"method": TEXT_OR_NONE, "checkpoint_config": None, "quant_config_class": None},
        "scheduler": {
            "max_num_batched_tokens": limits.max_num_tokens,
            "max_num_seqs": limits.max_batch_size,
            **{
                name: MODELLED[f"scheduler_config.{name}"]
                for name in ("async_scheduling", "enable_chunked_prefill", "long_prefill_token_threshold")
            },
        },
        # The path of the model may have moved since; what it holds is the cell's by its digest.
        "model": {"dtype": "bfloat16", "model_type": TEXT, "architectures": list_of(TEXT), "model": TEXT},
        "parallel": {
            "data_parallel_size": topology.dp,
            "data_parallel_rank": rank,
            "tensor_parallel_size": topology.tp,
            "pipeline_parallel_size": topology.pp,
            "prefill_context_parallel_size": topology.cp,
            "decode_context_parallel_size": topology.cp,
            "enable_expert_parallel": topology.moe_ep > 1,
            "enable_eplb": False,
        },
        "speculative": None,
        "graph": {
            "cudagraph_mode": found.cudagraph.get("mode"),
            "cudagraph_capture_sizes": found.cudagraph.get("capture_sizes"),
            "resolution": "worker",
        },
        "versions": {"vllm": identity.runtime_backend_version, "python": session.producer.get("python_version")},
        "resolved": None,
        "resolution": "pending_worker_probe",
        # Settings that the cell leaves open may be vLLM's own, or not set.
        "threads": {
            "torch_num_threads": list_of(POSITIVE, topology.tp),
            **{
                name: value
                for name, value in settings.items()
                if name in identity.environment or (isinstance(threads, dict) and name in threads)
            },
        },
        # This process and its workers: one or more of them in processes of their own.
        "collectors": [COLLECTOR_AT_REST] * (1 + topology.tp),
        "serving_config": MAPPING,
    }


def expected_group(cell: FrozenCell, group: dict[str, Any], groups: int) -> dict[str, Any]:
    """One of so many `groups` of a rank's cache: what its class has, and what a release may have beside it."""
    # The scheduler's block is the least common multiple of its groups' (0.32.0, v1/core/kv_cache_utils.py:804).
    divides = Kind(f"a divisor of {cell.block_size}", lambda value: is_count(value, 1) and not cell.block_size % value)
    name = group.get("type")
    kind = GROUP_KINDS.get(name) if isinstance(name, str) else None
    whole = groups == 1 or name == RECURRENT
    attention = {
        # Without a quantized cache its elements are the model's.
        "dtype": "bfloat16" if cell.identity.precision.kv_cache == "bfloat16" else TEXT,
        "head_size": POSITIVE,
        "num_kv_heads": POSITIVE,
    }
    recurrent = {"mamba_cache_mode": cell.identity.engine.mamba_cache_mode or "none"}
    window = {"sliding_window": POSITIVE} if name == "SlidingWindowSpec" else {}
    optional = {
        "dtype": TEXT,
        "head_size": POSITIVE,
        "num_kv_heads": POSITIVE,
        "sliding_window": POSITIVE_OR_NONE,
        "attention_chunk_size": POSITIVE_OR_NONE,
        "non_causal": FLAG,
        **recurrent,
    }
    return {
        **{field: asked for field, asked in optional.items() if field in group},
        "type": Kind("a cache-spec class", lambda value: value in (*GROUP_KINDS, UNIFORM_SPEC)),
        "block_size": cell.block_size if whole else POSITIVE if kind == "state" else divides,
        **(attention if kind == "attention" else recurrent if name == RECURRENT else {}),
        **window,
    }


def check_launch(field: str, cell: FrozenCell, launch: Any) -> Iterator[str]:
    """The launch is one that the rules describe (`launch_facts`), with the cell's blocks."""
    anything = Kind(ABSENT, lambda _: True)
    blocks = {
        "block_size": cell.block_size,
        "cache_config.block_size": cell.block_size,
        "hash_block_size": cell.hash_block_size,
        "recurrent_block_sizes": Kind(
            f"a list of {cell.block_size}",
            lambda value: isinstance(value, list) and all(same(size, cell.block_size) for size in value),
        ),
    }
    found = list(mismatches(field, dict.fromkeys(MODELLED, anything) | blocks, launch))
    yield from found
    if found:
        return
    version = cell.identity.runtime_backend_version
    for path, expected, value in (*setting_doubts(version, launch), *block_doubts(launch)):
        yield f"{field}.{path}: expected {expected}, found {value}"


def check_serving(field: str, cell: FrozenCell, engine: dict[str, Any]) -> Iterator[str]:
    """What the align rule hangs on: the launch, and a checkpoint exactly where there are recurrent groups."""
    serving = engine.get("serving_config")
    groups = part(engine, "kv_cache", "groups")
    names = [group.get("type") for group in groups] if LIST_OF_MAPPINGS.holds(groups) else []
    sizes = part(serving, "launch", "recurrent_block_sizes")
    recurrent = len(sizes) if isinstance(sizes, list) else 0
    checkpoint: Any = {"blocks": COUNT_OR_NONE, "alignment": POSITIVE_OR_NONE}
    if not recurrent or (RECURRENT not in names and part(serving, "mamba_prefill_checkpoint") is None):
        checkpoint = None  # a bundle of recurrent and other layers is no recurrent group
    yield from mismatches(field, {"mamba_prefill_checkpoint": checkpoint, "launch": MAPPING}, serving)
    least = names.count(RECURRENT)
    most = least + names.count(UNIFORM_SPEC)
    if not least <= recurrent <= most:
        yield f"{field}.launch.recurrent_block_sizes: expected {least} to {most} of its groups, found {recurrent}"
    yield from check_launch(f"{field}.launch", cell, part(serving, "launch"))


def expected_limits(cell: FrozenCell, blocks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The blocks `limits` and `capacity` of a rank with so many cache blocks, one of which is never given out."""
    limits, decode = cell.identity.limits, cell.identity.phase == "decode"
    common = {
        "max_num_scheduled_tokens": limits.max_num_tokens,
        "max_num_running_reqs": limits.max_batch_size,
        "max_model_len": limits.max_model_len,
    }
    own = {
        "block_size": cell.block_size,
        "num_gpu_blocks": Kind(
            f"at least {cell.free_blocks} free blocks of the accepted profile and one more",
            lambda value: is_count(value, cell.free_blocks + 1),
        ),
        "configured_max_batch_size": limits.max_batch_size,
        "feasible_max_batch_size": limits.max_batch_size if decode else 0,
    }
    free = {"usable_blocks_without_watermark": blocks - 1, "usable_blocks_with_watermark": blocks - 1}
    return common | own, common | free | {"kvwarm_eligible": decode}


def expected_cudagraph(cell: FrozenCell, found: dict[str, Any]) -> dict[str, Any]:
    """The block `cudagraph` (`observe_graph`): all of it follows from the mode and the captured sizes."""
    mode, sizes, eager = found.get("mode"), found.get("capture_sizes"), cell.identity.engine.enforce_eager
    modes = tuple(CUDAGRAPH_MODES)
    prefill, decode = CUDAGRAPH_MODES[str(mode)] if mode in modes else (TEXT, TEXT)
    captured: list[int] = []
    if isinstance(sizes, list) and list_of(POSITIVE).holds(sizes) and mode != "NONE" and not eager:
        captured = sorted(sizes)
    return {
        "mode": "NONE" if eager else Kind(f"one of {modes}", lambda value: value in modes),
        "prefill_mode": prefill,
        "decode_mode": decode,
        "max_capture_size": max(captured, default=0),
        "capture_sizes": captured,
        "prefill_capture_sizes": captured,
        "decode_capture_sizes": [size for size in captured if size <= cell.identity.limits.max_batch_size],
    }


def check_rank(where: str, cell: FrozenCell, session: SessionLine, rank: int) -> Iterator[str]:
    """One rank's engine."""
    own = session.ranks[rank]
    if own.device_name != cell.device_name:
        yield f"{where} device: expected {cell.device_name} of the accepted profile, found {own.device_name}"
    if own.dp_rank != rank:
        yield f"{where} dp_rank: expected {rank}, found {own.dp_rank}"
    if not 0 < own.engine_start_seconds < inf:
        yield f"{where} engine_start_seconds: expected a positive number, found {own.engine_start_seconds}"
    yield from mismatches(f"{where} engine", expected_engine(cell, session, rank, own), own.engine)
    groups = part(own.engine, "kv_cache", "groups")
    if LIST_OF_MAPPINGS.holds(groups):
        if not groups:
            yield f"{where} engine.kv_cache.groups: expected one at least, found none"
        for number, group in enumerate(groups):
            field = f"{where} engine.kv_cache.groups[{number}]"
            yield from mismatches(field, expected_group(cell, group, len(groups)), group)
    yield from check_serving(f"{where} engine.serving_config", cell, own.engine)
    limits, capacity = expected_limits(cell, own.limits.get("num_gpu_blocks", 0))
    yield from mismatches(f"{where} limits", limits, own.limits)
    yield from mismatches(f"{where} capacity", capacity, own.capacity)
    yield from mismatches(f"{where} cudagraph", expected_cudagraph(cell, own.cudagraph), own.cudagraph)


def parsed(value: str) -> datetime | None:
    """A time as the producer writes it (`utc_now`), or None for any other text."""
    layout = "%Y-%m-%dT%H:%M:%S.%fZ"
    try:
        time = datetime.strptime(value, layout)
    except ValueError:
        return None
    return time if time.strftime(layout) == value else None


def check_times(journal: Journal) -> Iterator[str]:
    """Lines were written one after another."""
    times = []
    for session in journal.sessions:
        times.append((f"session {session.session} started_at", session.started_at))
        times += [
            (f"benchmark_id={line.benchmark_id} completed_at", line.completed_at)
            for line in journal.points
            if line.session == session.session
        ]
    before = None
    for field, value in times:
        time = parsed(value)
        if time is None:
            yield f"{field}: expected a time such as 2026-01-31T12:00:00.000000Z, found {value}"
            continue
        if before is not None and time < before - CLOCK_STEP:
            yield f"{field}: expected a time after {before} of the line before, found {value}"
        before = time


def check_sessions(cell: FrozenCell, journal: Journal) -> Iterator[str]:
    """Every engine start, of every rank."""
    ranks = cell.identity.topology.dp
    for session in journal.sessions:
        where = f"session {session.session}"
        if not RUN_ID.fullmatch(session.run_id):
            yield f"{where} run_id: expected 32 hexadecimal digits, found {session.run_id}"
        if len(session.ranks) != ranks:
            yield f"{where} ranks: expected {ranks}, found {len(session.ranks)}"
        for rank in range(len(session.ranks)):
            yield from check_rank(f"{where} rank {rank}", cell, session, rank)
    yield from check_times(journal)
