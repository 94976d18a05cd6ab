"""The merged artifact of a cell: all its data-parallel ranks as one file, as Dynamo's launcher merges them."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from schemas.native import ArtifactTiming, Coverage, Int, IterationGroup, NativePoint, Row, Struct


class MergedArtifact(Struct, frozen=True, kw_only=True):
    """`merged.json`: rank 0's artifact, with the rows of all ranks by id, then rank.

    `coverage` counts rank-points, `timing` is the slowest rank's, `config`, `limits`, `capacity` and `kvwarm` are
    rank 0's. Ours are `cell_digest` and `source_sha256`; all else is the original's.
    """

    schema_version: Int
    kvwarm: dict[str, Any] | UnsetType = UNSET
    artifact_type: Literal["merged"]
    status: Literal["complete"]
    valid: bool
    usable: bool
    stop_reason: None
    timing_valid: bool
    run_id: str
    grid_digest: str
    timing: ArtifactTiming
    dp: dict[str, Any]
    synchronization: dict[str, Any]
    coverage: Coverage
    config: dict[str, Any]
    limits: dict[str, Int]
    recurrent_state: dict[str, Any]
    measurement_protocol: dict[str, Any] | UnsetType = UNSET
    measurement_policy: dict[str, str]
    synthetic_prompts: dict[str, Any]
    capacity: dict[str, Any]
    cudagraph: dict[str, Any]
    engine: dict[str, Any] | UnsetType = UNSET
    results: list[Row]
    iteration_groups: list[IterationGroup]
    skipped_points: list[Any]
    missing_phases: list[str]
    error: None
    rank_files: list[str]
    merged_output_path: str
    worker_probe_path: str | UnsetType = UNSET
    rank_warmup_evidence: dict[str, Any] | UnsetType = UNSET
    cell_digest: str
    source_sha256: dict[str, str]


def merged_bytes(merged: MergedArtifact) -> bytes:
    """The file of a merged artifact: JSON without white space, half of what it would be with it."""
    return msgspec.json.encode(merged)


class PublishedFpm(msgspec.Struct, frozen=True, gc=False):
    kvwarm_giant_median_of: Int | None = None


class PublishedRank(msgspec.Struct, frozen=True, gc=False):
    fpms: list[PublishedFpm]


class PublishedGroup(msgspec.Struct, frozen=True, gc=False):
    """A point, its value in seconds, and of how many samples that is."""

    benchmark_id: Int
    point: NativePoint
    wall_time: float
    rank_results: list[PublishedRank]


class PublishedValues(msgspec.Struct, frozen=True, gc=False):
    """`merged.json`, as far as a table needs it: its bulk, the raw samples, is skipped. Its digest is the verdict's."""

    run_id: str
    grid_digest: str
    cell_digest: str
    iteration_groups: list[PublishedGroup]
