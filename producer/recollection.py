"""Why a cell has to be measured: what differs from the newest measured cell of the same deployment and phase."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from schemas.canonical import read_bytes
from schemas.errors import Refusal
from schemas.points import Phase
from schemas.summary import CellSummary, DeploymentSummary, axes_of

NEVER = "never measured"
SHOWN_VALUES = 8
"""Values of an axis that a line names; of a longer one it names the changes."""

COLLECTED = ("benchmark.json", "receipt.json")
"""What rule collect_cell leaves in a cell's folder. Where one is missing, the cell is collected (again)."""

DERIVED = {"schema_version", "points_sha256", "parallel_strategy", "probe_digest", "model_revision"}
"""Fields of an identity that follow from others; they are named only when nothing else differs."""


class MeasuredPoint(msgspec.Struct, frozen=True):
    batch_size: int
    total_kv_read_tokens: int
    total_prefill_tokens: int = 0


class MeasuredIdentity(msgspec.Struct, frozen=True):
    """`cell.json`, as far as it tells what was measured."""

    identity: dict[str, Any]


class MeasuredPoints(msgspec.Struct, frozen=True):
    """`cell.json`, as far as it tells at which points."""

    points: dict[str, Any]

    def of(self, phase: Phase) -> list[MeasuredPoint]:
        return msgspec.convert(self.points[phase], list[MeasuredPoint])


class Difference(NamedTuple):
    """A field in the campaign's words, with the value that was measured and the one that is asked for."""

    field: str
    measured: str
    asked: str

    def __str__(self) -> str:
        return f"{self.field}: {self.measured} -> {self.asked}"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path, value


def _shown(value: Any) -> str:
    if value is None:
        return "absent"
    if isinstance(value, str):
        return value[:16] if len(value) == 64 else value
    return msgspec.json.encode(value).decode()


def _field(name: str, deployment: DeploymentSummary) -> str:
    """A field of an identity as the campaign file, or its reader, calls it."""
    if name in ("model_config_sha256", "model_sidecar_sha256"):
        return f"config of {deployment.model}"
    return {"pins_sha256": "engine sources", "probe_digest": "profile"}.get(name, name)


def differences(measured: dict[str, Any], cell: CellSummary, deployment: DeploymentSummary) -> list[Difference]:
    """What differs between two identities, points apart."""
    old, new = dict(_leaves(measured, "")), dict(_leaves(cell.identity_fields(), ""))
    changed = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    told = [name for name in changed if name not in DERIVED] or [name for name in changed if name != "points_sha256"]
    return [Difference(_field(name, deployment), _shown(old.get(name)), _shown(new.get(name))) for name in told]


def _axis(before: list[int], after: list[int]) -> tuple[str, str]:
    """An axis then and now: its values, or of a long one those that came (+) and went (-)."""
    if max(len(before), len(after)) <= SHOWN_VALUES:
        return ", ".join(map(str, before)) or "none", ", ".join(map(str, after)) or "none"
    changes = [f"+{value}" for value in after if value not in set(before)]
    changes += [f"-{value}" for value in before if value not in set(after)]
    more = f" and {len(changes) - SHOWN_VALUES} more" if len(changes) > SHOWN_VALUES else ""
    return f"{len(before)} values", f"{len(after)} values ({', '.join(changes[:SHOWN_VALUES])}{more})"


def point_differences(
    measured: list[MeasuredPoint], cell: CellSummary, deployment: DeploymentSummary
) -> list[Difference]:
    """What differs between two point lists: each axis whose values do."""
    old, where = axes_of(cell.phase, measured), "points" if deployment.points else "grid"
    axes = [(axis, old.get(axis, []), cell.axes.get(axis, [])) for axis in sorted(old.keys() | cell.axes.keys())]
    found = [Difference(f"{where}.{cell.phase}.{axis}", *_axis(a, b)) for axis, a, b in axes if a != b]
    return found or [Difference(f"{where}.{cell.phase}", f"{len(measured)} points", f"{cell.points} others")]


class MeasuredCells:
    """The cells below one folder, looked through once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.begun = {entry.name for entry in os.scandir(folder)}
        except FileNotFoundError:
            self.begun = set()
        self._newest = self._index()

    def files(self, cell: str) -> set[str]:
        """Names of the files in a cell's folder."""
        if cell not in self.begun:
            return set()
        return {entry.name for entry in os.scandir(f"{self.folder}/{cell}")}

    def _index(self) -> dict[str, str]:
        """`<phase>-<deployment>` -> name of its newest measured cell."""
        newest: dict[str, tuple[int, str]] = {}
        for name in self.begun:
            try:
                when = os.stat(f"{self.folder}/{name}/receipt.json").st_mtime_ns  # noqa: PTH116 (thousands of files)
            except OSError:
                continue
            kind = name.rsplit("-", 1)[0]
            newest[kind] = max(newest.get(kind, (0, "")), (when, name))
        return {kind: name for kind, (_, name) in newest.items()}

    def differences(self, cell: CellSummary, deployment: DeploymentSummary) -> list[Difference]:
        """What differs from the newest measured cell of the same deployment and phase; nothing when there is none."""
        newest = self._newest.get(f"{cell.phase}-{cell.deployment}")
        if newest is None or newest == cell.name:
            return []
        try:
            data = read_bytes(self.folder / newest / "cell.json", "frozen cell")
            measured = msgspec.json.decode(data, type=MeasuredIdentity).identity
            found = differences(measured, cell, deployment)
            if measured.get("points_sha256") != cell.identity_fields()["points_sha256"]:
                points = msgspec.json.decode(data, type=MeasuredPoints).of(cell.phase)
                found += point_differences(points, cell, deployment)
            return found
        except (Refusal, msgspec.MsgspecError, KeyError):
            return []

    def reason(self, cell: CellSummary, deployment: DeploymentSummary) -> str:
        """Why `cell` is collected, in one line."""
        files = self.files(cell.name)
        if "receipt.json" in files:
            return f"{', '.join(name for name in COLLECTED if name not in files) or 'nothing'} is missing"
        if deployment.artifacts is not None:
            return f"to be imported from {deployment.artifacts}"
        if "repetitions.jsonl" in files:
            return "goes on with its journal"
        return "; ".join(map(str, self.differences(cell, deployment))) or NEVER
