"""Repeats in the graph: which cells they measure, where, and that nothing else is touched."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import yaml
from conftest import Job, Workspace
from goldens import CAMPAIGNS, with_profiles
from native_samples import FIXTURES

from producer.artifact import assemble, receipt
from producer.journal import read_journal
from schemas.canonical import read_model, sha256
from schemas.native import write_struct
from schemas.plan import FrozenCell
from schemas.repeatability import Repeatability

GLM = "glm-5.3-flash-gb300-tp4"


def collected(jobs: list[Job]) -> list[Path]:
    """Folders of the cells that a run would measure, below `results/<campaign>/`."""
    found = [Path(job.output.split(", ")[0]).parent for job in jobs if job.rule == "collect_cell"]
    return sorted(Path(*folder.parts[2:]) for folder in found)


def write_policy(workspace: Workspace, name: str, **repeatability) -> str:
    content = {"schema_name": "passgrid-collection-policy/v1", "repeatability": repeatability}
    (workspace.root / f"config/policies/{name}.yaml").write_text(yaml.safe_dump(content))
    return f"policy={name}"


def test_a_planned_campaign_is_measured_and_then_as_often_again_as_the_policy_says(tmp_path: Path):
    workspace = with_profiles(tmp_path)
    jobs = workspace.dry_run("repeatability")
    folders = collected(jobs)
    source = [folder for folder in folders if folder.parts[0] == "cells"]
    names = {folder.name for folder in source}
    assert len(names) == len(source) == 6
    assert folders == sorted(
        [*source, *(Path(f"repeat{number}/cells/{name}") for number in range(1, 6) for name in names)]
    )
    rules = Counter(job.rule for job in jobs)
    assert rules == {
        "resolve_request": 1,
        "plan_campaign": 1,
        "collect_cell": 36,
        "merge_ranks": 36,
        "verify_cell": 36,
        "assess_repeatability": 1,
    }


def test_a_fresh_clone_is_probed_first(project: Workspace):
    rules = Counter(job.rule for job in project.dry_run("repeatability"))
    assert rules == {"probe": 6, "import_profile": 3, "profiles": 1, "resolve_request": 1}


def test_bounded_repeats_have_places_of_their_own_and_freeze_a_part_of_each_cell(project: Workspace):
    few = write_policy(project, "few", comparison_mode="bounded", samples=2, max_points_per_cell=5)
    config = ("--config", f"campaign={GLM}", few)
    folders = collected(project.dry_run("repeatability", *config))
    source = {folder.name.rsplit("-", 1)[0]: folder.name for folder in folders if folder.parts[0] == "cells"}
    repeats = [folder for folder in folders if folder.parts[0] != "cells"]
    assert [folder.parts[0] for folder in repeats] == ["repeat1-points5"] * 2 + ["repeat2-points5"] * 2
    campaign = f"config/campaigns/{GLM}.yaml"
    for folder in repeats[:2]:
        kind = folder.name.rsplit("-", 1)[0]
        frozen = {}
        for scope, name in (("", source[kind]), ("repeat1-points5/", folder.name)):
            output = f"{kind}{len(scope)}.json"
            arguments = ["--campaign", campaign, "--cell", name, "--scope", scope, "--output", output]
            done = project.script("freeze_cell", *arguments)
            assert done.returncode == 0, done.stderr
            frozen[scope] = read_model(FrozenCell, project.root / output, "frozen cell")
            assert frozen[scope].name == name
        whole, part = (cell.points.points() for cell in frozen.values())
        assert len(part) == 5
        assert (part[0], part[-1]) == (whole[0], whole[-1])
        assert set(part) <= set(whole)
    # One cell of a repeat is no cell of the campaign itself, nor of a whole repeat.
    for scope in ("", "repeat1/", "smoke/"):
        arguments = ["--campaign", campaign, "--cell", repeats[0].name, "--scope", scope, "--output", "x.json"]
        done = project.script("freeze_cell", *arguments)
        assert (done.returncode, done.stderr.split(":")[0:2]) == (2, ["refused", " cell"])


@pytest.mark.parametrize("scope", ["repeat0/", "repeat1", "repeat1-points1/", "repeat01/", "holdout/", "repeat1/../"])
def test_a_scope_that_there_is_not_is_refused(project: Workspace, scope: str):
    arguments = ["--campaign", f"config/campaigns/{GLM}.yaml", "--cell", "decode-tp4-0123456789abcdef"]
    done = project.script("freeze_cell", *arguments, "--scope", scope, "--output", "x.json")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "refused: scope: expected '', 'smoke/', 'repeat<k>/' or 'repeat<k>-points<n>/', found"
    )


def test_a_bad_policy_is_refused_before_anything_starts_and_by_nobody_else(project: Workspace):
    bad = write_policy(project, "bad", samples=1)
    done = project.snakemake("-n", "repeatability", "--config", f"campaign={GLM}", bad)
    assert done.returncode == 2
    refusal = "refused: repeatability.samples: expected greater than or equal to 2, found 1: config/policies/bad.yaml"
    assert refusal in done.stderr
    assert project.snakemake("-n", "--config", f"campaign={GLM}", bad).returncode == 0


def test_an_imported_campaign_is_not_measured(tmp_path: Path):
    workspace = with_profiles(tmp_path)
    root = workspace.root
    shutil.copy(CAMPAIGNS / "campaigns/cpu-dynamo.yaml", root / "config/campaigns")
    shutil.copytree(CAMPAIGNS / "points", root / "config/points")
    for kind in ("probe", "profile"):  # of the same launch
        shutil.copytree(root / "results/cpu-demo" / kind, root / "results/cpu-dynamo" / kind)
    shutil.copytree(FIXTURES.parent / "dynamo" / "1.7", root / "artifacts")
    rules = Counter(job.rule for job in workspace.dry_run("repeatability", "--config", "campaign=cpu-dynamo"))
    assert rules == {
        "resolve_request": 1,
        "plan_campaign": 1,
        "import_native": 2,
        "merge_ranks": 2,
        "verify_cell": 2,
        "assess_repeatability": 1,
    }


def test_status_knows_the_cells_of_a_repeat(project: Workspace):
    arguments = ["--campaign", f"config/campaigns/{GLM}.yaml", "--json", "--scope"]
    states = {}
    for scope in ("formal", "repeat2", "repeat2-points5"):
        done = project.script("status", *arguments, scope)
        assert done.returncode == 0, done.stderr
        states[scope] = json.loads(done.stdout)
    assert states["repeat2"]["cells"] == states["formal"]["cells"]
    assert [cell["points"] for cell in states["repeat2-points5"]["cells"]] == [5, 5]
    assert project.script("status", *arguments, "repeat").returncode == 2


@pytest.mark.demo
def test_a_finished_campaign_is_measured_again_and_nothing_else(finished: Workspace):
    cells = {folder.name for folder in (finished.root / "results/cpu-demo/cells").iterdir()}
    two = write_policy(finished, "two", samples=2)
    jobs = finished.dry_run("repeatability", "--config", two)
    assert collected(jobs) == sorted(Path(f"repeat{number}/cells/{name}") for number in (1, 2) for name in cells)
    judged = {"collect_cell", "merge_ranks", "verify_cell", "assess_repeatability"}
    assert {job.rule for job in jobs} == judged
    assert finished.dry_run() == []


def relaunch(source: Path, target: Path, run_id: str) -> None:
    """A measured cell as another launch would have left it: another run id in its journal, all else made from that."""
    cell = read_model(FrozenCell, source / "cell.json", "frozen cell")
    previous, data = sha256(b""), b""
    for line in map(json.loads, (source / "repetitions.jsonl").read_text().splitlines()):
        line |= {"run_id": run_id} if line["kind"] == "session" else {}
        encoded = json.dumps(line | {"previous_sha256": previous}, separators=(",", ":")).encode()
        previous, data = sha256(encoded), data + encoded + b"\n"
    target.mkdir(parents=True)
    (target / "cell.json").write_bytes((source / "cell.json").read_bytes())
    (target / "repetitions.jsonl").write_bytes(data)
    journal = read_journal(target / "repetitions.jsonl", cell.digest)
    artifact = write_struct(target / "benchmark.json", assemble(cell, journal, 0))
    files = {"repetitions.jsonl": sha256(data), "benchmark.json": artifact}
    write_struct(target / "receipt.json", receipt(cell, journal, files))


@pytest.mark.demo
def test_measured_repeats_are_judged_by_the_whole_chain_and_measured_no_more(finished: Workspace):
    results = finished.root / "results/cpu-demo"
    two = write_policy(finished, "two", samples=2)
    for number in (1, 2):
        for folder in (results / "cells").iterdir():
            relaunch(folder, results / f"repeat{number}" / "cells" / folder.name, f"{number:032x}")
    jobs = finished.dry_run("repeatability", "--config", two)
    assert Counter(job.rule for job in jobs) == {"merge_ranks": 12, "verify_cell": 12, "assess_repeatability": 1}
    done = finished.snakemake("repeatability", "--config", two)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": passed (full_grid, 2 samples)" in done.stdout + done.stderr
    (file,) = results.glob("plan-*/repeatability.json")
    verdict = read_model(Repeatability, file, "verdict")
    assert verdict.counts == {"passed": sum(cell.counts["passed"] for cell in verdict.cells)}
    assert len(verdict.cells) == 6
    assert {point.cv for cell in verdict.cells for point in cell.points} == {0.0}  # the very same times
    assert finished.dry_run("repeatability", "--config", two) == []
    # A lost file of a repeat is missed, and a stricter policy judges anew and measures nothing.
    next(results.glob("repeat2/cells/decode-dense-*/merged.json")).unlink()
    again = {job.rule for job in finished.dry_run("repeatability", "--config", two)}
    assert again == {"merge_ranks", "verify_cell", "assess_repeatability"}
