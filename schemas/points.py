"""Points: totals of one engine iteration, and the manifest that freezes them."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.canonical import Strict, digest

MANIFEST_VERSION: Literal[3] = 3
"""Dynamo's point manifest (`--benchmark-points-file`); 2 added partitions, 3 added rows."""

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")


class PrefillPoint(Strict):
    """One forward pass over `batch_size` requests; totals are tokens summed over the batch, split evenly."""

    batch_size: Positive
    total_prefill_tokens: Positive
    total_kv_read_tokens: NonNegative

    @model_validator(mode="after")
    def _even(self) -> Self:
        for name in ("total_prefill_tokens", "total_kv_read_tokens"):
            if getattr(self, name) % self.batch_size:
                raise ValueError(f"{name} a multiple of batch_size {self.batch_size}")
        return self

    @property
    def new_tokens(self) -> int:
        """New tokens of one request."""
        return self.total_prefill_tokens // self.batch_size

    @property
    def prefix_tokens(self) -> int:
        """Cached tokens of one request."""
        return self.total_kv_read_tokens // self.batch_size


class DecodePoint(Strict):
    """One decode step of `batch_size` requests; `total_kv_read_tokens` is the sum of their contexts."""

    batch_size: Positive
    total_kv_read_tokens: Positive

    @model_validator(mode="after")
    def _even(self) -> Self:
        if self.total_kv_read_tokens % self.batch_size:
            raise ValueError(f"total_kv_read_tokens a multiple of batch_size {self.batch_size}")
        return self

    @property
    def context(self) -> int:
        """Computed tokens of one request when the measured step is scheduled."""
        return self.total_kv_read_tokens // self.batch_size


Point = PrefillPoint | DecodePoint


class PointManifest(Strict):
    """A frozen point list. Its digest is the sha256 of its canonical bytes."""

    schema_version: Literal[3] = MANIFEST_VERSION
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]

    def of(self, phase: Phase) -> "PointManifest":
        """The same manifest with the points of one phase only: what a cell of that phase measures."""
        if phase == "prefill":
            return PointManifest(prefill=self.prefill, decode=())
        return PointManifest(prefill=(), decode=self.decode)

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
            "partition": None,
            "rows": None,
        }
    )
