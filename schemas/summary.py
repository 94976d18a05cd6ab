"""What the build graph needs of a campaign, small enough to be read at each parse."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from schemas.points import Phase


class Job(msgspec.Struct, frozen=True):
    """What a job that starts an engine asks of a cluster; absent values are not asked for."""

    cpus_per_task: int
    mem_mb: int
    runtime_minutes: int
    nodes: int
    start_timeout_seconds: int
    step_timeout_seconds: int
    partition: str | None = None
    account: str | None = None
    gres: str | None = None
    tasks: int | None = None


class DeploymentSummary(msgspec.Struct, frozen=True):
    """`probe_digest` names the probe records, `profile_digest` what is imported from them, or the declared profile in
    `profile`. `gpus` are those of one job, `points` tells whether it measures a list of its own instead of a grid,
    `artifacts` is the folder that its cells are imported from instead of measured."""

    model: str
    phases: tuple[Phase, ...]
    dp: int
    gpus: int
    probe_digest: str
    profile_digest: str
    job: Job
    profile: str | None = None
    points: bool = False
    artifacts: str | None = None


class CampaignSummary(msgspec.Struct, frozen=True):
    """A resolved campaign."""

    request_digest: str
    system: str
    embedded: bool
    backend: str
    backend_version: str
    acceptance: Literal["auto"] | dict[str, str]
    deployments: dict[str, DeploymentSummary]


class CellSummary(msgspec.Struct, frozen=True):
    """A planned cell; `identity` is the JSON that its digest covers, `axes` the values of its points."""

    name: str
    deployment: str
    phase: Phase
    points: int
    axes: dict[str, list[int]]
    identity: msgspec.Raw

    def identity_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.json.decode(self.identity)
        return fields


class PlanSummary(msgspec.Struct, frozen=True):
    """A plan by its digest; `profiles` are the digests of the profiles that it was made with."""

    digest: str
    profiles: dict[str, str]
    cells: list[CellSummary]


def axes_of(phase: Phase, points: Iterable[Any]) -> dict[str, list[int]]:
    """Axis in the words of a campaign's grid -> its values over the points of a cell, increasing.

    Tokens are those of one request, in the mean over an uneven point.
    """
    axes: dict[str, set[int]] = defaultdict(set)
    for point in points:
        axes["batch_sizes"].add(point.batch_size)
        cached = point.total_kv_read_tokens // point.batch_size
        if phase == "prefill":
            axes["new_tokens"].add(point.total_prefill_tokens // point.batch_size)
            axes["prefix_tokens"].add(cached)
        else:
            axes["contexts"].add(cached)
    return {name: sorted(values) for name, values in sorted(axes.items())}
