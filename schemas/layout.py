"""Where everything lies: the paths are a contract (docs/artifacts.md)."""

import re
from pathlib import Path

from schemas.canonical import short
from schemas.errors import Refusal
from schemas.plan import Scope

CAMPAIGNS = Path("config/campaigns")
SYSTEMS = Path("config/systems")
POLICIES = Path("config/policies")
RESULTS = Path("results")


def campaign_file(campaign: str) -> Path:
    return CAMPAIGNS / f"{campaign}.yaml"


def system_file(system: str) -> Path:
    return SYSTEMS / f"{system}.yaml"


def policy_file(policy: str) -> Path:
    return POLICIES / f"{policy}.yaml"


SCOPE_PREFIX: dict[Scope, str] = {"formal": "", "smoke": "smoke/"}
"""Scope -> where its plans and cells lie below `results/<campaign>/`."""


REPEAT_PREFIX = re.compile(r"repeat[1-9][0-9]*(?:-points([2-9]|[1-9][0-9]+))?/")
"""Where a repeat's cells lie: those of the formal plan, or of a bounded one with at most so many points a cell."""


def repeat_prefix(repeat: int, max_points: int | None) -> str:
    """The path's prefix of repeat `repeat`, from 1."""
    return f"repeat{repeat}/" if max_points is None else f"repeat{repeat}-points{max_points}/"


def scope_of(prefix: str) -> Scope:
    """The scope whose plan holds the cells below a path's prefix; a repeat's are the formal one's, whole or bounded."""
    for scope, known in SCOPE_PREFIX.items():
        if prefix == known:
            return scope
    _repeat(prefix)
    return "formal"


def max_points_of(prefix: str) -> int | None:
    """How many points a cell below a path's prefix has at most; None for all of its plan's."""
    if prefix in SCOPE_PREFIX.values():
        return None
    points: str | None = _repeat(prefix)[1]
    return None if points is None else int(points)


def _repeat(prefix: str) -> re.Match[str]:
    found = REPEAT_PREFIX.fullmatch(prefix)
    if found is None:
        raise Refusal("scope", "'', 'smoke/', 'repeat<k>/' or 'repeat<k>-points<n>/'", repr(prefix), "command line")
    return found


def cells_folder(plan_file: Path) -> Path:
    """`<scope>/plan-<digest>/plan.json` and `<scope>/cells/` stand side by side."""
    return plan_file.parent.parent / "cells"


def pair_folder(plan_folder: Path | str, system: str, backend: str, backend_version: str) -> Path:
    """Where consumers look for a pair, below the systems root of a plan."""
    return Path(plan_folder) / "systems" / "data" / system / backend / backend_version


class Layout:
    """Paths below `results/<campaign>/`. Smoke runs and repeats have its shape below a prefix, and share its probes."""

    def __init__(self, campaign: str, results: Path = RESULTS) -> None:
        self.root = results / campaign

    def request(self, digest: str) -> Path:
        return self.root / f"request-{short(digest)}.json"

    def probe(self, deployment: str, digest: str, phase: str) -> Path:
        return self.root / "probe" / f"{deployment}-{short(digest)}" / f"{phase}.json"

    def profile(self, deployment: str, digest: str) -> Path:
        return self.root / "profile" / f"{deployment}-{short(digest)}.json"

    def plan(self, scope: Scope, digest: str) -> Path:
        return self.root / SCOPE_PREFIX[scope] / f"plan-{short(digest)}"

    def cells(self, prefix: str) -> Path:
        """The cells below a path's prefix."""
        return self.root / prefix / "cells"


def rank_file(dp_rank: int) -> str:
    """Name of the artifact of a data-parallel rank in its cell's folder (Dynamo's rule)."""
    return f"benchmark_dp{dp_rank}.json" if dp_rank else "benchmark.json"


def rank_files(folder: Path, ranks: int) -> list[Path]:
    """The artifacts of all data-parallel ranks of a cell, in rank order."""
    return [folder / rank_file(rank) for rank in range(ranks)]
