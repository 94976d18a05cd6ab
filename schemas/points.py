"""Points: totals of one engine iteration, and the manifest that freezes them."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.canonical import Strict, digest

MANIFEST_VERSION: Literal[3] = 3
"""Dynamo's point manifest (`--benchmark-points-file`). 1: totals; 2 added partitions; 3 added rows."""

MAX_INTEGER = 2**53
"""Largest integer that every reader of JSON keeps."""

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Count = Annotated[NonNegative, Field(le=MAX_INTEGER)]
Size = Annotated[Positive, Field(le=MAX_INTEGER)]
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")


class Partition(Strict):
    """How an imbalanced point splits its totals: the first `high_count` requests get `fraction` more than the mean."""

    axis: Literal["new", "kv", "both"]
    high_count: Positive
    fraction: Annotated[float, Field(gt=0, lt=1)]


class PrefillPoint(Strict):
    """One forward pass over `batch_size` requests; totals are tokens summed over the batch.

    Without `rows` ([new, cached] of each request) or `partition`, the totals are split evenly: new tokens by ones,
    cached tokens by hash blocks, longer requests first.
    """

    batch_size: Positive
    total_prefill_tokens: Positive
    total_kv_read_tokens: NonNegative
    partition: Partition | None = None
    rows: tuple[tuple[Positive, NonNegative], ...] | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.total_prefill_tokens < self.batch_size:
            raise ValueError(f"total_prefill_tokens of at least batch_size {self.batch_size}")
        if self.rows is not None:
            if self.partition is not None:
                raise ValueError("rows or a partition, not both")
            totals = (sum(new for new, _ in self.rows), sum(kv for _, kv in self.rows))
            if len(self.rows) != self.batch_size or totals != (self.total_prefill_tokens, self.total_kv_read_tokens):
                raise ValueError(f"{self.batch_size} rows that sum to the totals, not {len(self.rows)} of {totals}")
        elif 0 < self.total_kv_read_tokens < self.batch_size:
            raise ValueError(f"total_kv_read_tokens 0 or at least batch_size {self.batch_size}")
        if self.partition is not None:
            if self.batch_size < 2 or self.partition.high_count >= self.batch_size:
                raise ValueError("a partition of at least 2 requests with high_count below batch_size")
            if self.partition.axis != "new" and not self.total_kv_read_tokens:
                raise ValueError("total_kv_read_tokens above 0 for a partition over kv")
        return self

    @property
    def is_balanced(self) -> bool:
        """Whether the published coordinates (totals, split evenly) describe the point."""
        return self.partition is None and (self.rows is None or len(set(self.rows)) == 1)


class DecodePoint(Strict):
    """One decode step of `batch_size` requests; `total_kv_read_tokens` is the sum of their contexts."""

    batch_size: Positive
    total_kv_read_tokens: Positive

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.total_kv_read_tokens < self.batch_size:
            raise ValueError(f"total_kv_read_tokens of at least batch_size {self.batch_size}")
        return self

    @property
    def is_balanced(self) -> bool:
        return True


Point = PrefillPoint | DecodePoint


class PointManifest(Strict):
    """A frozen point list. Its digest is the sha256 of its canonical bytes."""

    schema_version: Literal[1, 2, 3] = MANIFEST_VERSION
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]

    @model_validator(mode="after")
    def _version(self) -> Self:
        for field, since in (("partition", 2), ("rows", 3)):
            used = any(getattr(point, field) is not None for point in self.prefill)
            if used and self.schema_version < since:
                raise ValueError(f"schema_version >= {since}: {field} requires schema_version >= {since}")
        return self

    def of(self, phase: Phase) -> "PointManifest":
        """The same manifest with the points of one phase only: what a cell of that phase measures."""
        if phase == "prefill":
            return PointManifest(schema_version=self.schema_version, prefill=self.prefill, decode=())
        return PointManifest(schema_version=self.schema_version, prefill=(), decode=self.decode)

    def points(self) -> tuple[Point, ...]:
        return (*self.prefill, *self.decode)


def point_key(phase: Phase, point: Point) -> str:
    """Dynamo's identity of a point: sha256 of its content without the id (`benchmark_measurement.point_key`)."""
    return digest(
        {
            "point_type": phase,
            "batch_size": point.batch_size,
            "total_prefill_tokens": point.total_prefill_tokens if isinstance(point, PrefillPoint) else 0,
            "total_kv_read_tokens": point.total_kv_read_tokens,
            "partition": partition_block(point),
            "rows": rows_block(point),
        }
    )


def partition_block(point: Point) -> dict[str, object] | None:
    """The point's partition as the native artifact writes it."""
    partition = point.partition if isinstance(point, PrefillPoint) else None
    return None if partition is None else partition.model_dump()


def rows_block(point: Point) -> list[list[int]] | None:
    """The point's rows as the native artifact writes them."""
    rows = point.rows if isinstance(point, PrefillPoint) else None
    return None if rows is None else [list(row) for row in rows]
