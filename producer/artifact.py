"""The rank artifact: a pure function of the frozen cell and its journal."""

from pathlib import Path
from typing import Any

from msgspec import UNSET

from producer.contracts import CONTRACTS, Contract
from producer.journal import Journal
from producer.reduction import adjacent_upper_median
from producer.seeding import distinct_prefix_tokens, execution_order
from producer.tokens import FIRST_TOKEN
from schemas.canonical import digest
from schemas.errors import Refusal
from schemas.journal import PointLine, RankPoint, RankSession, SessionLine, Span
from schemas.native import (
    NONE_QUEUED,
    REGIME_STAMPS,
    SCHEMA_VERSION,
    ArtifactTiming,
    BenchmarkMeasurement,
    BenchmarkSample,
    CellReceipt,
    Coverage,
    DpRank,
    Estimate,
    Fpm,
    IterationGroup,
    NativePoint,
    Preparation,
    RankArtifact,
    RankResult,
    RawFpm,
    Row,
    Session,
    Timing,
)
from schemas.plan import FrozenCell
from schemas.points import Point, PrefillPoint, partition_block, point_key, rows_block

FPM_VERSION = 1


def native_point(cell: FrozenCell, index: int, cudagraph: dict[str, Any], regime: str | None = None) -> NativePoint:
    """Point `index` (from 0) of the frozen list in the artifact's form; its id is the place in that list from 1."""
    phase = cell.identity.phase
    point: Point = cell.points.points()[index]
    tokens = point.total_prefill_tokens if isinstance(point, PrefillPoint) else point.batch_size
    capture = min((size for size in cudagraph[f"{phase}_capture_sizes"] if size >= tokens), default=None)
    reasons = ["explicit"]
    if regime in REGIME_STAMPS:
        reasons.append(REGIME_STAMPS[regime])
    return NativePoint(
        point_type=phase,
        benchmark_id=index + 1,
        total_prefill_tokens=point.total_prefill_tokens if isinstance(point, PrefillPoint) else 0,
        total_kv_read_tokens=point.total_kv_read_tokens,
        batch_size=point.batch_size,
        expected_cudagraph_mode="NONE" if capture is None else cudagraph[f"{phase}_mode"],
        expected_capture_size=capture,
        padding_tokens=None if capture is None else capture - tokens,
        sample_reasons=reasons,
        partition=partition_block(point),
        rows=rows_block(point),
    )


def grid_digest(cell: FrozenCell, cudagraph: dict[str, Any]) -> str:
    """sha256 of all points in execution order, before stamps (Dynamo's `grid_digest`)."""
    order = execution_order(cell.points.points(), cell.cache_hit_alignment_tokens)
    points = [native_point(cell, index, cudagraph) for index in order]
    return digest([{name: getattr(p, name) for name in p.__struct_fields__ if name != "dp_rank"} for p in points])


def _raw_fpms(line: PointLine, dp_rank: int) -> list[RawFpm]:
    return [
        RawFpm(
            version=FPM_VERSION,
            worker_id="",
            dp_rank=dp_rank,
            counter_id=line.benchmark_id,
            wall_time=repetition.end_monotonic - repetition.start_monotonic,
            scheduled_requests=repetition.scheduled_requests,
            queued_requests=NONE_QUEUED,
            benchmark_sample=BenchmarkSample(
                sample_index=index,
                forward_index=repetition.forward_index,
                timing=Timing(
                    basis=repetition.basis,
                    start_monotonic=repetition.start_monotonic,
                    end_monotonic=repetition.end_monotonic,
                ),
                cudagraph=repetition.cudagraph,
                repetition=repetition.ordinal,
                producer_overhead_seconds=repetition.overhead_seconds,
            ),
        )
        for index, repetition in enumerate(line.ranks[dp_rank].repetitions)
    ]


def _retained(
    cell: FrozenCell, line: PointLine, journal: Journal, grid: str, position: int, ledger: int, dp_rank: int
) -> Fpm:
    raw = _raw_fpms(line, dp_rank)
    wall, indices = adjacent_upper_median([fpm.wall_time for fpm in raw])
    copied, own = raw[1], line.ranks[dp_rank]
    phase = cell.identity.phase
    return Fpm(
        version=copied.version,
        worker_id=copied.worker_id,
        dp_rank=dp_rank,
        counter_id=copied.counter_id,
        wall_time=wall,
        scheduled_requests=copied.scheduled_requests,
        queued_requests=copied.queued_requests,
        benchmark_measurement=BenchmarkMeasurement(
            schema_version=1,
            point_key=point_key(phase, cell.points.points()[line.benchmark_id - 1]),
            dp_rank=dp_rank,
            prompts=own.prompts,
            preparation=Preparation(
                grid_digest=grid,
                completed_points_before=position,
                kv_seed_regime=line.kv_seed_regime,
                warmup_records_before=ledger,
            ),
            expected_internal_samples=cell.identity.measurement.measurement_repeats,
            raw_fpms=raw,
            estimate=Estimate(method="adjacent_upper_median", raw_sample_indices=indices),
            repetition_line_sha256=journal.line_sha256[line.benchmark_id],
            session=line.session,
            rejections=own.rejections or UNSET,
            device_state=own.device_state or UNSET,
        ),
    )


def _warmup_record(span: Span, point: NativePoint, position: int) -> dict[str, Any]:
    return {
        "kind": span.kind,
        "requested_shape": {name: getattr(point, name) for name in point.__struct_fields__ if name != "dp_rank"},
        "forward_index_start": span.forward_index_start,
        "completed_points_before": position,
        "status": "completed",
        "validation": {"status": "passed", "reason": None},
        "forward_index_end": span.forward_index_end,
        "observed_forward_count": span.forward_index_end - span.forward_index_start,
        "first_scheduled_requests": span.first,
        "last_scheduled_requests": span.last,
    }


def measurement_protocol(session: SessionLine, cell: FrozenCell, device_was_asked: bool) -> dict[str, Any]:
    """Dynamo's `measurement_protocol` block, with the producer's own record and what makes its prompts again."""
    unobserved = ["sampled_continuation_token_ids"]
    if not device_was_asked:
        unobserved += ["device_clock_frequency", "power_state"]
    return {
        "schema_version": 1,
        "content_identity": "coordinate_rank_slot_v1",
        "content_seed": session.producer["token_seed"],
        "synthetic_content": "seeded_tokens",
        "synthetic_pool_tag": "",
        "prompt_hash_encoding": "uint32_le",
        "independent_repetitions": 1,
        "timing_metric": "scheduler_wall_time",
        "execution_evidence": {
            "schema_version": 1,
            "sample_field": "benchmark_sample",
            "warmup_field": "warmup_evidence",
            "forward_index_scope": "rank_process",
            "timing_clock": "process_local_monotonic",
            "cudagraph_source": "ModelRunnerOutput.cudagraph_stats",
            "warmup_scope": "request_completion_and_existing_shape_validation",
        },
        "input_evidence_scope": "injected_prompt_token_ids",
        "unobserved": unobserved,
        "prompt_specification": {
            "generator": cell.identity.token_generator,
            "seed": cell.identity.token_seed,
            "vocab_range": [FIRST_TOKEN, cell.vocab_size],
            "prefix": "prefix:slot{slot}",
            "suffix": "point:{point_key}:repetition{repetition}:slot{slot}",
        },
        "preparation": {
            "warmup_iterations": 0,
            "prefill_real_seed": cell.identity.phase == "prefill",
            "decode_real_kv_warmup": cell.identity.phase == "decode",
            "giant_kv_threshold": 0,
            "giant_kv_repeats": cell.identity.measurement.measurement_repeats,
        },
        "producer": session.producer,
        "serving_config": session.ranks[0].engine["serving_config"],
    }


def _common_capacity(ranks: list[RankSession]) -> dict[str, Any]:
    """What every rank can hold: the smallest over ranks."""
    return {key: min(rank.capacity[key] for rank in ranks) for key in ranks[0].capacity}


def assemble(cell: FrozenCell, journal: Journal, dp_rank: int) -> RankArtifact:
    """The artifact of one rank, from a finished journal.

    Rows stand in execution order, so forward indices rise through the file. They are this rank's; the groups hold
    those of all ranks, and the slowest one's time.

    Raises:
        ValueError: no session, or a point of the cell without a line.
    """
    if not journal.sessions:
        raise ValueError("the journal has no session")
    session, last = journal.sessions[0], journal.sessions[-1]
    world = list(range(journal.ranks))
    own, cudagraph = last.ranks[dp_rank], session.ranks[0].cudagraph
    points = cell.points.points()
    order = execution_order(points, cell.cache_hit_alignment_tokens)
    lines = {line.benchmark_id: line for line in journal.points}
    missing = [index + 1 for index in order if index + 1 not in lines]
    if missing:
        raise ValueError(f"points {missing} are not measured")
    grid = grid_digest(cell, cudagraph)
    rows: list[Row] = []
    groups: list[IterationGroup] = []
    ledgers: list[list[dict[str, Any]]] = [[] for _ in world]
    for position, index in enumerate(order):
        line = lines[index + 1]
        point = native_point(cell, index, cudagraph, line.kv_seed_regime)
        fpms = []
        for rank, ledger in enumerate(ledgers):
            ledger.extend(_warmup_record(span, point, position) for span in line.ranks[rank].warmups)
            fpms.append(_retained(cell, line, journal, grid, position, len(ledger), rank))
        rows.append(Row(point=point, kv_seed_regime=line.kv_seed_regime, fpms=[fpms[dp_rank]]))
        groups.append(
            IterationGroup(
                benchmark_id=index + 1,
                point=point,
                expected_dp_ranks=world,
                complete=True,
                wall_time=max(fpm.wall_time for fpm in fpms),
                rank_results=[RankResult(dp_rank=rank, fpms=[fpm]) for rank, fpm in enumerate(fpms)],
            )
        )
    is_decode = cell.identity.phase == "decode"
    asked = all(point.device_state for line in journal.points for point in line.ranks)
    return RankArtifact(
        schema_version=SCHEMA_VERSION,
        kvwarm=_kvwarm(cell, len(rows)) if is_decode else UNSET,
        artifact_type="rank",
        status="complete",
        valid=True,
        usable=True,
        stop_reason=None,
        timing_valid=True,
        run_id=session.run_id,
        grid_digest=grid,
        timing=ArtifactTiming(
            started_at=session.started_at,
            completed_at=max(line.completed_at for line in journal.points),
            benchmark_elapsed_seconds=sum(line.ranks[dp_rank].seconds["wall"] for line in journal.points),
            measured_iteration_seconds=sum(group.wall_time for group in groups),
        ),
        dp=DpRank(rank=dp_rank, size=len(world)),
        synchronization={"enabled": len(world) > 1, "coordinator_rank": 0, "port": None},
        coverage=Coverage(expected_points=len(points), completed_points=len(rows), skipped_points=0),
        config=_config(cell),
        limits=own.limits,
        recurrent_state={"initialization": "unchanged", "policy": None, "uniform_bound": None},
        measurement_protocol=measurement_protocol(session, cell, asked),
        warmup_evidence={"status": "recorded", "records": ledgers[dp_rank]},
        measurement_policy={"decode": "steady_state_second_step", "prefill": "single_step"},
        synthetic_prompts={"mode": "seeded_tokens", "vocab_size": cell.vocab_size},
        capacity={"common": _common_capacity(last.ranks)},
        cudagraph=cudagraph,
        engine=own.engine | {"device_name": own.device_name},
        results=rows,
        iteration_groups=groups,
        skipped_points=[],
        missing_phases=[],
        error=None,
        sessions=sessions_of(journal),
    )


def sessions_of(journal: Journal) -> list[Session]:
    """The engine starts of a journal, as rank 0 saw them."""
    sessions = []
    for session in journal.sessions:
        ends = [line.completed_at for line in journal.points if line.session == session.session]
        sessions.append(
            Session(
                session=session.session,
                started_at=session.started_at,
                engine_start_seconds=session.ranks[0].engine_start_seconds,
                points=len(ends),
                last_point_at=max(ends, default=None),
            )
        )
    return sessions


def _kvwarm(cell: FrozenCell, points: int) -> dict[str, Any]:
    return {
        "enabled": True,
        "warm_eligible": True,
        "skip_reason": None,
        "dataset": None,
        "stages": [],
        "points_real_kv": points,
        "points_fake_fallback": 0,
        "points_gate_skipped": 0,
        "giant_kv_threshold": 0,
        "giant_kv_repeats": cell.identity.measurement.measurement_repeats,
        "initialization_strategy": "native_exact_context",
    }


def _config(cell: FrozenCell) -> dict[str, Any]:
    return {
        "mode": cell.identity.phase,
        "randomize_kda_state": False,
        "hybrid_live_state": False,
        "warmup_iterations": 0,
        "output_path": "benchmark.json",
        "max_batch_size": cell.identity.limits.max_batch_size,
        "collect_imbalanced": False,
    }


def receipt(cell: FrozenCell, journal: Journal, files: dict[str, str]) -> CellReceipt:
    """Where the seconds of a finished cell went, and how much of its seeding was needed."""
    first: list[RankPoint] = [line.ranks[0] for line in journal.points]
    measuring = sum(point.seconds["wall"] for point in first)
    kinds = ("measured", "warmup", "scaffolding", "seeding", "rejected")
    breakdown = {kind: sum(point.seconds[kind] for point in first) for kind in kinds}
    breakdown["idle"] = measuring - sum(breakdown.values())
    # A seed's last token is its own: the prefix tokens among the computed ones are one fewer.
    computed = sum(seed.computed_tokens - 1 for line in journal.points for point in line.ranks for seed in point.seeds)
    distinct = journal.ranks * distinct_prefix_tokens(cell.points.points(), cell.cache_hit_alignment_tokens)
    overhead, forwards = sum(point.seconds["overhead"] for point in first), sum(point.steps for point in first)
    sessions = sessions_of(journal)
    return CellReceipt(
        schema_version=2,
        cell_digest=cell.digest,
        files=files,
        sessions=sessions,
        engine_start_seconds=sum(session.engine_start_seconds for session in sessions),
        measuring_seconds=measuring,
        writing_seconds=sum(point.seconds["writing"] for point in first),
        breakdown=breakdown,
        idle_fraction=breakdown["idle"] / measuring,
        seeding={
            "prefix_tokens_computed": computed,
            "distinct_prefix_tokens": distinct,
            "ratio": computed / distinct if distinct else 1.0,
        },
        rejected_repetitions=sum(len(point.rejections) for point in first),
        overhead={"seconds": overhead, "forwards": forwards, "us_per_forward": 1e6 * overhead / forwards},
    )


def contract_of(cell: FrozenCell, file: Path) -> Contract:
    """The contract that the frozen cell chooses; an artifact's own words never do.

    Raises:
        Refusal: this checkout has no such contract, or another protocol or measurement of it.
    """
    identity, contract = cell.identity, CONTRACTS.get(cell.identity.contract)
    if contract is None:
        raise Refusal("contract", f"one of {', '.join(CONTRACTS)}", identity.contract, file)
    for field, expected, found in (
        ("producer_protocol", contract.protocol, identity.producer_protocol),
        ("measurement", contract.measurement, identity.measurement),
    ):
        if expected != found:
            raise Refusal(f"{field} of the {contract.name} contract", expected, found, file)
    return contract
