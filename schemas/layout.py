"""Where everything lies: the paths are a contract (docs/artifacts.md)."""

from pathlib import Path

from schemas.canonical import short
from schemas.plan import Scope

CAMPAIGNS = Path("config/campaigns")
SYSTEMS = Path("config/systems")
RESULTS = Path("results")


def campaign_file(campaign: str) -> Path:
    return CAMPAIGNS / f"{campaign}.yaml"


def system_file(system: str) -> Path:
    return SYSTEMS / f"{system}.yaml"


SCOPE_PREFIX: dict[Scope, str] = {"formal": "", "smoke": "smoke/"}
"""Scope -> where its plans and cells lie below `results/<campaign>/`."""


def scope_of(prefix: str) -> Scope:
    """The scope of a path's prefix."""
    return "smoke" if prefix else "formal"


def cells_folder(plan_file: Path) -> Path:
    """`<scope>/plan-<digest>/plan.json` and `<scope>/cells/` stand side by side."""
    return plan_file.parent.parent / "cells"


def pair_folder(plan_folder: Path | str, system: str, backend: str, backend_version: str) -> Path:
    """Where consumers look for a pair, below the systems root of a plan."""
    return Path(plan_folder) / "systems" / "data" / system / backend / backend_version


class Layout:
    """Paths below `results/<campaign>/`. Smoke runs have the same shape below `smoke/` and share its probes."""

    def __init__(self, campaign: str, results: Path = RESULTS) -> None:
        self.root = results / campaign

    def request(self, digest: str) -> Path:
        return self.root / f"request-{short(digest)}.json"

    def probe(self, deployment: str, digest: str, phase: str) -> Path:
        return self.root / "probe" / f"{deployment}-{short(digest)}" / f"{phase}.json"

    def profile(self, deployment: str, digest: str) -> Path:
        return self.root / "profile" / f"{deployment}-{short(digest)}.json"

    def scope(self, scope: Scope) -> Path:
        return self.root / SCOPE_PREFIX[scope]

    def plan(self, scope: Scope, digest: str) -> Path:
        return self.scope(scope) / f"plan-{short(digest)}"

    def cells(self, scope: Scope) -> Path:
        return self.scope(scope) / "cells"

    def cell(self, scope: Scope, name: str) -> Path:
        return self.cells(scope) / name


def rank_file(dp_rank: int) -> str:
    """Name of the artifact of a data-parallel rank in its cell's folder (Dynamo's rule)."""
    return f"benchmark_dp{dp_rank}.json" if dp_rank else "benchmark.json"


def rank_files(folder: Path, ranks: int) -> list[Path]:
    """The artifacts of all data-parallel ranks of a cell, in rank order."""
    return [folder / rank_file(rank) for rank in range(ranks)]
