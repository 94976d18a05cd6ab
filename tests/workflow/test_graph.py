"""The graph is honest: digests decide what is measured, and nothing else does. Dry runs of the real workflow."""

import json
import os
import random
import shutil
from pathlib import Path

import polars as pl
import pytest
from conftest import Workspace

pytestmark = pytest.mark.demo
CAMPAIGN = "config/campaigns/cpu-demo.yaml"


def shuffle_times(root: Path, seed: int) -> None:
    """Give every file a time of its own, in no order."""
    choose = random.Random(seed)
    for path in sorted(root.rglob("*")):
        if not path.is_symlink():
            os.utime(path, (when := 1.7e9 + choose.randrange(10_000_000), when))


def test_a_fresh_clone_measures_everything(project: Workspace):
    jobs = project.dry_run()
    assert sorted(job.rule for job in jobs) == ["import_profile"] * 3 + ["probe"] * 6 + ["profiles", "resolve_request"]


def test_a_second_run_has_nothing_to_do(finished: Workspace):
    assert finished.dry_run() == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("description: Three tiny models", "description: Other words for three tiny models"),
        ("campaign: cpu-demo\n", "# a comment\n\ncampaign:    cpu-demo   # another\n"),
        ("{max_num_tokens: 2048, max_batch_size: 8, max_model_len: 4096}",
         "{max_model_len: 4096,   max_batch_size: 8,\n      max_num_tokens: 2048}"),
        ('system: cpu-2core\nbackend_version: "0.32.0"', "backend_version: '0.32.0'\nsystem: cpu-2core"),
    ],
    ids=["description", "comment", "key order", "quotes and order"],
)  # fmt: skip
def test_words_and_formatting_measure_nothing(finished: Workspace, old: str, new: str):
    finished.edit(CAMPAIGN, old, new)
    assert finished.dry_run() == []


def test_one_more_batch_size_measures_that_deployments_cell_and_reverting_measures_nothing(finished: Workspace):
    before = {folder.name for folder in (finished.root / "results/cpu-demo/cells").iterdir()}
    hybrid_only = "        batch_sizes: [1, 2, 4, 8]\n        prefix_blocks: [0, 1, 2, 4, 8]"
    more = hybrid_only.replace("[1, 2, 4, 8]", "[1, 2, 3, 4, 8]", 1)
    finished.edit(CAMPAIGN, hybrid_only, more)
    (measured,) = finished.measured_by()
    assert measured.startswith("prefill-hybrid-")
    assert measured not in before
    rules = {job.rule for job in finished.dry_run()}
    judged = {"merge_ranks", "verify_cell", "assess_readiness", "publish", "finalize", "report"}
    assert judged < rules <= judged | {"resolve_request", "plan_campaign", "collect_cell"}
    finished.edit(CAMPAIGN, more, hybrid_only)
    assert finished.dry_run() == []


def test_a_decode_axis_measures_decode_cells_alone(finished: Workspace):
    # The anchor serves the three deployments.
    finished.edit(CAMPAIGN, "contexts: [64, 256, 512, 1024, 2048]", "contexts: [64, 256, 512, 1024]")
    assert [name.rsplit("-", 1)[0] for name in finished.measured_by()] == [
        "decode-dense",
        "decode-hybrid",
        "decode-sliding",
    ]


def test_an_engine_setting_probes_and_measures_its_deployment_again(finished: Workspace):
    finished.edit(CAMPAIGN, "268435456, mamba_cache_mode", "134217728, mamba_cache_mode")
    assert {name.rsplit("-", 1)[0] for name in finished.measured_by()} == {"hybrid"}


def test_a_label_publishes_anew_and_measures_nothing(finished: Workspace):
    finished.edit(CAMPAIGN, 'backend_version: "0.32.0"', 'backend_version: lab\nruntime_backend_version: "0.32.0"')
    assert finished.measured_by() == []
    assert {"publish", "finalize"} <= {job.rule for job in finished.dry_run()}


def test_a_removed_deployment_publishes_anew_and_measures_nothing(finished: Workspace):
    path = finished.root / CAMPAIGN
    text = path.read_text()
    path.write_text(text[: text.index("  hybrid:")])
    assert finished.measured_by() == []
    assert "publish" in {job.rule for job in finished.dry_run()}


def test_touching_everything_measures_nothing(finished: Workspace):
    for path in finished.root.rglob("*"):
        if not path.is_symlink():
            path.touch()
    assert finished.measured_by() == []


@pytest.mark.parametrize("seed", range(3))
def test_times_in_any_order_measure_nothing(finished: Workspace, seed: int):
    shuffle_times(finished.root, seed)
    assert finished.measured_by() == []


@pytest.mark.parametrize("seed", range(3))
def test_a_fresh_clone_with_old_results_measures_nothing(finished: Workspace, seed: int):
    shutil.rmtree(finished.root / ".snakemake")
    shuffle_times(finished.root, seed)
    assert finished.measured_by() == []


def test_deleting_one_cell_measures_that_cell(finished: Workspace):
    folder = finished.cell("decode-dense")
    shutil.rmtree(folder)
    assert finished.measured_by() == [folder.name]


def test_a_lost_probe_record_is_missed_only_when_a_cell_is_verified_again(finished: Workspace):
    (record,) = (finished.root / "results/cpu-demo/probe").glob("dense-*/decode.json")
    record.unlink()
    assert finished.dry_run() == []
    (finished.cell("decode-dense") / "evidence.json").unlink()
    assert finished.measured_by() == [record.parent.name]
    assert {"probe", "import_profile", "verify_cell"} <= {job.rule for job in finished.dry_run()}


def test_a_forced_run_of_a_cell_measures_no_point_again(finished: Workspace):
    """Snakemake removes a rule's outputs before it runs it; the journal is none, and the artifact comes from it."""
    folder = finished.cell("decode-dense")
    files = ("benchmark.json", "repetitions.jsonl", "receipt.json", "merged.json")
    before = {name: (folder / name).read_bytes() for name in files}
    done = finished.snakemake(
        "--forcerun", "collect_cell", "--", str((folder / "merged.json").relative_to(finished.root))
    )
    assert done.returncode == 0, done.stderr
    assert f"measure {folder.name}: nothing is missing" in done.stdout + done.stderr
    assert {name: (folder / name).read_bytes() for name in files} == before


def test_a_published_table_that_was_edited_is_not_finalized(finished: Workspace):
    current = finished.root / "results/cpu-demo/current"
    (current / "final/finalization.json").unlink()
    parquet = next((current / "systems").rglob("*.parquet"))
    data = bytearray(parquet.read_bytes())
    data[100] ^= 1
    parquet.write_bytes(bytes(data))
    done = finished.snakemake("--rerun-triggers", "params")
    assert done.returncode != 0
    assert "refused: published file: expected sha256" in done.stdout + done.stderr


def unembed(workspace: Workspace, acceptance: str) -> None:
    """Make the demo's system one whose profiles a person must accept."""
    workspace.edit("config/systems/cpu-2core.yaml", "embedded: true", "embedded: false")
    workspace.edit(CAMPAIGN, "acceptance: auto # only an embedded system may say so", acceptance)


def test_without_acceptance_a_run_stops_after_import_and_says_what_to_accept(finished: Workspace):
    unembed(finished, "acceptance: {}")
    assert {job.rule for job in finished.dry_run()} == {"accept", "resolve_request"}
    done = finished.snakemake()
    assert done.returncode != 0
    (profile,) = (finished.root / "results/cpu-demo/profile").glob("dense-*.json")
    from schemas.canonical import sha256

    accepted = sha256(profile.read_bytes())
    assert f"acceptance:\n  dense: {accepted}\n" in done.stdout + done.stderr
    assert (
        f"refused: acceptance.dense: expected the digest of the imported profile {accepted}"
        in done.stdout + done.stderr
    )


def test_with_every_profile_accepted_nothing_is_measured_again(finished: Workspace):
    from schemas.canonical import sha256

    profiles = sorted((finished.root / "results/cpu-demo/profile").glob("*.json"))
    lines = [f"  {file.stem.rsplit('-', 1)[0]}: {sha256(file.read_bytes())}" for file in profiles]
    unembed(finished, "acceptance:\n" + "\n".join(lines))
    assert finished.measured_by() == []
    assert "accept" not in {job.rule for job in finished.dry_run()}


def test_auto_is_for_embedded_systems(finished: Workspace):
    unembed(finished, "acceptance: auto")
    done = finished.snakemake("-n")
    assert done.returncode == 2
    assert "refused: acceptance: expected a profile digest for each deployment" in done.stderr


def test_no_target_goes_round_the_acceptance(finished: Workspace):
    unembed(finished, "acceptance: {}")
    current = (finished.root / "results/cpu-demo/current").resolve()
    target = current / "final" / "finalization.json"
    target.unlink()
    done = finished.snakemake(str(target.relative_to(finished.root.resolve())))
    assert done.returncode != 0
    assert "refused: acceptance.dense: expected the digest of its profile" in done.stdout + done.stderr
    assert not target.exists()


def test_a_moved_model_is_published_under_its_new_path_and_not_measured_again(finished: Workspace):
    (finished.root / "config/models/qwen3-tiny").rename(finished.root / "config/models/qwen3-small")
    finished.edit(CAMPAIGN, "config/models/qwen3-tiny", "config/models/qwen3-small")
    assert finished.measured_by() == []
    done = finished.snakemake()
    assert done.returncode == 0, done.stdout + done.stderr
    parquet = next((finished.root / "results/cpu-demo/current/systems").rglob("*.parquet"))
    models = set(pl.read_parquet(parquet)["model_path"])
    assert models == {f"config/models/{name}" for name in ("qwen3-small", "gemma3-tiny", "qwen3-next-tiny")}


def test_a_role_with_one_phase_plans_that_phase_alone(finished: Workspace):
    finished.edit(CAMPAIGN, "  dense: # full attention, like Qwen3\n", "  dense:\n    worker_type: decode\n")
    assert finished.measured_by() == []
    done = finished.snakemake("plan")
    assert done.returncode == 0, done.stderr
    plans = [json.loads(file.read_text()) for file in (finished.root / "results/cpu-demo").glob("plan-*/plan.json")]
    (plan,) = [plan for plan in plans if plan["deployments"]["dense"]["prefill_points"] == 0]
    assert [cell["phase"] for cell in plan["cells"] if cell["deployment"] == "dense"] == ["decode"]
    assert plan["deployments"]["dense"]["dropped"] == {}


def test_a_smoke_run_that_is_blocked_fails_and_keeps_its_verdict(finished: Workspace, smoke: Path):
    folder = finished.cell("decode-dense", "smoke")
    journal = folder / "repetitions.jsonl"
    journal.write_bytes(journal.read_bytes()[:-1] + b" \n")
    for name in ("merged.json", "evidence.json"):
        (folder / name).unlink()
    done = finished.snakemake("smoke")
    assert done.returncode != 0
    assert "refused: readiness: expected ready, found blocked" in done.stdout + done.stderr
    readiness = next((finished.root / "results/cpu-demo/smoke").glob("plan-*/readiness.json"))
    assert json.loads(readiness.read_text())["status"] == "blocked"


@pytest.mark.parametrize("target", ["plan", "smoke"])
def test_the_other_targets_stand_by_themselves(finished: Workspace, target: str):
    shutil.rmtree(finished.root / "results/cpu-demo/smoke", ignore_errors=True)
    rules = {job.rule for job in finished.dry_run(target)}
    assert rules == (
        set() if target == "plan"
        else {
            "plan_smoke",
            "collect_cell",
            "merge_ranks",
            "verify_cell",
            "assess_readiness",
            "require_ready",
        }
    )  # fmt: skip
