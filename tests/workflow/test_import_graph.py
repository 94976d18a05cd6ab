"""A campaign whose cells Dynamo measured, from its artifacts to a table that the simulators load."""

import json
import shutil

import polars as pl
import pytest
from conftest import ROOT, Workspace, load
from native_samples import FIXTURES

pytestmark = pytest.mark.demo
CAMPAIGN = ("--config", "campaign=cpu-dynamo")


@pytest.fixture
def imported(finished: Workspace) -> Workspace:
    """The campaign with the accepted profile of the demo's dense deployment, which is the same launch."""
    root = finished.root
    shutil.copy(ROOT / "tests/campaigns/campaigns/cpu-dynamo.yaml", root / "config/campaigns")
    shutil.copytree(ROOT / "tests/campaigns/points", root / "config/points")
    for kind in ("probe", "profile"):
        shutil.copytree(root / "results/cpu-demo" / kind, root / "results/cpu-dynamo" / kind)
    return finished


def put(workspace: Workspace, release: str) -> None:
    shutil.copytree(FIXTURES.parent / "dynamo" / release, workspace.root / "artifacts")


def values(release: str) -> dict[tuple[str, int, int, int], float]:
    found = {}
    for phase in ("prefill", "decode"):
        for row in json.loads((FIXTURES.parent / "dynamo" / release / f"{phase}.json").read_text())["results"]:
            point = row["point"]
            key = phase, point["batch_size"], point["total_prefill_tokens"], point["total_kv_read_tokens"]
            found[key] = row["fpms"][0]["wall_time"] * 1000
    return found


@pytest.mark.parametrize("release", ["1.6.1", "1.7"])
def test_a_folder_of_artifacts_becomes_a_published_table(imported: Workspace, release: str):
    put(imported, release)
    jobs = {job.rule for job in imported.dry_run(*CAMPAIGN)}
    assert "import_native" in jobs
    assert not jobs & {"collect_cell", "probe"}
    done = imported.snakemake(*CAMPAIGN)
    assert done.returncode == 0, done.stdout + done.stderr
    results = imported.root / "results/cpu-dynamo"
    plan = (results / "current").resolve()
    table = pl.read_parquet(next(plan.rglob("*.parquet")))
    columns = ("workload_kind", "batch_size", "total_prefill_tokens", "total_kv_read_tokens")
    assert dict(zip(table.select(columns).rows(), table["latency_ms"], strict=True)) == values(release)
    assert set(table["measurement_policy"]) == {"dynamo_native_single_sample_v1"}
    assert set(table["global_warmup_iterations"]) == {5}
    labels = dict(table.select("workload_kind", "kv_seed_regime").unique().rows())
    assert labels == {"prefill": "n/a", "decode": "skip:dense_model_content_insensitive"}
    sidecar = json.loads(next(plan.rglob("*.metadata.json")).read_text())
    assert (sidecar["warmup_repeats"], sidecar["measurement_repeats"]) == (0, 1)
    loaded = load(plan / "systems")
    assert loaded.returncode == 0, loaded.stderr
    assert (plan / "report.html").stat().st_size > 100_000
    assert imported.dry_run(*CAMPAIGN) == []


def test_a_status_says_where_cells_are_imported_from(imported: Workspace):
    done = imported.script("status", "--campaign", "config/campaigns/cpu-dynamo.yaml")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.endswith("0/4 points  to be imported from artifacts") for line in lines[1:3]] == [True, True]
    assert lines[3] == "2 cells: 2 missing; 2 to collect; GPU hours left: 0.00"


def test_without_artifacts_the_import_says_where_they_are_expected(imported: Workspace):
    done = imported.snakemake(*CAMPAIGN)
    assert done.returncode != 0
    assert "refused: artifacts: expected a folder, found none: artifacts" in done.stdout + done.stderr
    assert not list((imported.root / "results/cpu-dynamo").rglob("receipt.json"))


def test_artifacts_of_other_points_are_refused_by_name(imported: Workspace):
    put(imported, "1.7")
    points = imported.root / "config/points/dynamo.json"
    points.write_text(points.read_text().replace("4096", "4104"))
    done = imported.snakemake(*CAMPAIGN)
    assert "points: 1 missing: decode, batch 8, 0 new tokens, 4104 read" in done.stdout + done.stderr
