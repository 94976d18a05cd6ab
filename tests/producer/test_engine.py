"""The producer on the real CPU engine: claims, kills, resumption, and what an engine must refuse to measure."""

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import ROOT, cell_folder
from jobs import copy_of, run, start, wait_for_points
from tampering import accepted_of

from producer.contracts import GLM53FLASH
from schemas.canonical import digest, parse, read_model, write_model
from schemas.errors import HELD
from schemas.launch import ExecutionIdentity
from schemas.observation import EngineRecords
from schemas.plan import FrozenCell
from schemas.points import DecodePoint, PointManifest, PrefillPoint

from verify_cell import read_cell, verify

pytestmark = [pytest.mark.engine, pytest.mark.demo]


def merge(folder: Path) -> None:
    script = ROOT / "workflow" / "scripts" / "merge_ranks.py"
    names = ["--cell", "cell.json", "--receipt", "receipt.json", "--output", "merged.json", "benchmark.json"]
    subprocess.run([sys.executable, str(script), *names], cwd=folder, check=True)


def test_a_second_process_leaves_a_killed_one_is_resumed_and_nothing_is_lost(demo: Path, tmp_path: Path):
    cell = copy_of(demo, "decode-dense", tmp_path)
    journal = cell.parent / "repetitions.jsonl"
    first = start(cell)
    wait_for_points(cell, first, 3)
    second = run(cell)
    assert second.returncode == HELD
    assert f'"pid":{first.pid}' in second.stderr
    assert second.stderr.count("\n") == 1

    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not (cell.parent / "benchmark.json").exists()
    survived = journal.read_bytes()
    survived = survived[: survived.rfind(b"\n") + 1]
    assert run(cell).returncode == 0
    assert journal.read_bytes().startswith(survived)

    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    sessions = [line for line in lines if line["kind"] == "session"]
    assert [line["session"] for line in sessions] == [1, 2]
    attempts = {rank["runtime"]["scheduler"]["attempt_id"] for line in sessions for rank in line["ranks"]}
    assert len(attempts) == 2
    points = [line["benchmark_id"] for line in lines if line["kind"] == "point"]
    assert sorted(points) == list(range(1, 21))
    merge(cell.parent)
    evidence = verify(read_cell(cell.parent, accepted_of(cell.parent)))
    assert (evidence.state, evidence.failures) == ("recorded", ())
    assert not (cell.parent / "claim.json").exists()


def test_a_finished_cell_starts_no_engine(demo: Path, tmp_path: Path):
    (source,) = (demo / "cells").glob("decode-dense-*")
    cell = copy_of(demo, "decode-dense", tmp_path)
    (cell.parent / "repetitions.jsonl").write_bytes((source / "repetitions.jsonl").read_bytes())
    assert run(cell).returncode == 0
    # An engine start would have opened a session.
    for name in ("repetitions.jsonl", "benchmark.json", "receipt.json"):
        assert (cell.parent / name).read_bytes() == (source / name).read_bytes()


def test_an_artifact_that_is_there_is_never_overwritten(demo: Path, tmp_path: Path):
    (source,) = (demo / "cells").glob("decode-dense-*")
    cell = copy_of(demo, "decode-dense", tmp_path)
    (cell.parent / "repetitions.jsonl").write_bytes((source / "repetitions.jsonl").read_bytes())
    (cell.parent / "benchmark.json").write_text("{}")
    done = run(cell)
    assert done.returncode == 2
    assert done.stderr.startswith("refused: sha256 of benchmark.json: expected ")
    assert (cell.parent / "benchmark.json").read_text() == "{}"


def test_a_cell_that_is_not_its_digests_is_refused_before_the_engine(demo: Path, tmp_path: Path):
    cell = copy_of(demo, "decode-dense", tmp_path)
    data = json.loads(cell.read_text())
    data["points"]["decode"].pop()
    cell.write_text(json.dumps(data))
    done = run(cell)
    assert done.returncode == 2
    assert done.stderr.startswith("refused: frozen cell points_sha256: expected ")


def test_a_model_that_changed_since_the_plan_is_refused_before_the_engine(demo: Path, tmp_path: Path):
    cell = copy_of(demo, "decode-dense", tmp_path)
    data = json.loads(cell.read_text())
    config = json.loads((ROOT / data["model"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    cell.write_text(json.dumps(data | {"model": str(tmp_path)}))
    done = run(cell)
    assert done.returncode == 2
    assert done.stderr.startswith(f"refused: config of {tmp_path}: expected ")


def test_an_engine_with_less_memory_than_the_accepted_profile_is_refused(demo: Path, tmp_path: Path):
    cell = copy_of(demo, "decode-dense", tmp_path)
    cell.write_text(json.dumps(json.loads(cell.read_text()) | {"free_blocks": 5000}))
    done = run(cell)
    assert done.returncode == 2
    assert "refused: engine free blocks: expected at least 5000 of the accepted profile, found 1023" in done.stderr
    assert not (cell.parent / "repetitions.jsonl").exists()


def test_two_engines_of_one_machine_never_overlap(demo: Path, tmp_path: Path):
    """Two cells, two drivers: the second waits for the devices, says so, and measures after the first."""
    first, second = (copy_of(demo, f"decode-{name}", tmp_path) for name in ("dense", "hybrid"))
    processes = [start(first), start(second)]
    assert [process.wait(timeout=600) for process in processes] == [0, 0]
    logs = [(cell.parent / "log").read_text() for cell in (first, second)]
    assert sum("waiting for another engine on cpu" in log for log in logs) == 1
    spans = []
    for cell in (first, second):
        lines = [json.loads(line) for line in (cell.parent / "repetitions.jsonl").read_text().splitlines()]
        spans.append((lines[0]["started_at"], lines[-1]["completed_at"]))
    spans.sort()
    assert spans[0][1] < spans[1][0]


def test_a_journal_of_another_cell_is_refused_before_the_engine(demo: Path, tmp_path: Path):
    (source,) = (demo / "cells").glob("decode-sliding-*")
    cell = copy_of(demo, "decode-dense", tmp_path)
    (cell.parent / "repetitions.jsonl").write_bytes((source / "repetitions.jsonl").read_bytes())
    done = run(cell)
    assert done.returncode == 2
    assert done.stderr.startswith("refused: journal line 1 cell_digest: expected ")
    assert done.stderr.count("\n") == 1


def test_a_point_that_the_align_rule_splits_is_rejected_with_its_chunks(demo: Path, tmp_path: Path):
    """1,300 new tokens after 1,024: the planner drops it; an engine that is given it runs 1,280 + 20."""
    (source,) = (demo / "cells").glob("prefill-hybrid-*")
    cell = read_model(FrozenCell, source / "cell.json", "cell")
    split = PrefillPoint(batch_size=1, total_prefill_tokens=1300, total_kv_read_tokens=1024)
    points = PointManifest(prefill=(split,), decode=())
    identity = cell.identity.model_copy(update={"points_sha256": digest(points)})
    cell = cell.model_copy(update={"points": points, "identity": identity})
    file = tmp_path / cell.name / "cell.json"
    write_model(file, cell)
    done = run(file)
    assert done.returncode == 1
    assert "4 rejected repetitions: expected 1 steps, found 2" in done.stderr
    assert not (file.parent / "benchmark.json").exists()


def test_sigterm_keeps_what_was_measured(demo: Path, tmp_path: Path):
    cell = copy_of(demo, "decode-dense", tmp_path)
    process = start(cell)
    wait_for_points(cell, process, 2)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=30) != 0
    journal = cell.parent / "repetitions.jsonl"
    kept = journal.read_bytes().count(b"\n")
    assert kept >= 3
    assert run(cell).returncode == 0
    assert journal.read_bytes().count(b"\n") == 20 + 2


def receipts(demo: Path) -> dict[str, dict]:
    return {f.parent.name: json.loads(f.read_text()) for f in (demo / "cells").glob("*/receipt.json")}


def test_the_demo_seeds_each_prefix_token_hardly_more_than_once(demo: Path):
    ratios = {name: receipt["seeding"]["ratio"] for name, receipt in receipts(demo).items()}
    assert len(ratios) == 6
    assert max(ratios.values()) <= 1.10, ratios


def test_the_seconds_of_a_cell_add_up(demo: Path):
    for receipt in receipts(demo).values():
        parts = receipt["breakdown"]
        assert set(parts) == {"measured", "warmup", "scaffolding", "seeding", "rejected", "idle"}
        assert sum(parts.values()) == pytest.approx(receipt["measuring_seconds"])
        assert all(seconds >= 0 for seconds in parts.values())


@pytest.mark.parametrize(("phase", "steps"), [("prefill", 1), ("decode", 3)])
def test_every_repetition_is_as_many_forwards_as_its_kind_has(demo: Path, phase: str, steps: int):
    """A prefill repetition is one step; a decode one computes its prompt's tail, then two decode steps."""
    for folder in (demo / "cells").glob(f"{phase}-*"):
        for line in (folder / "repetitions.jsonl").read_text().splitlines()[1:]:
            (record,) = json.loads(line)["ranks"]
            forwards = [repetition["forward_index"] for repetition in record["repetitions"]]
            if not record["rejections"]:
                assert [b - a for a, b in pairwise(forwards)] == [steps] * 9


@pytest.mark.parametrize(
    ("phase", "points", "regimes"),
    [
        (
            "prefill",
            (
                PrefillPoint(batch_size=1, total_prefill_tokens=64, total_kv_read_tokens=0),
                PrefillPoint(batch_size=2, total_prefill_tokens=128, total_kv_read_tokens=1024),
            ),
            {"n/a": 1, "real_kv": 1},
        ),
        ("decode", (DecodePoint(batch_size=2, total_kv_read_tokens=1200),), {"real_kv": 1}),
    ],
)
def test_the_glm_contract_runs_on_a_recurrent_model(demo: Path, tmp_path: Path, phase, points, regimes):
    """Everything of `glm53flash` but its KDA kernels: the cell chooses it, the record and the row labels follow."""
    source = cell_folder(demo, f"{phase}-hybrid")
    cell = read_model(FrozenCell, source / "cell.json", "cell")
    manifest = PointManifest.model_validate({"prefill": (), "decode": (), phase: points})
    bound = ExecutionIdentity(
        model_config_sha256="d" * 64, execution_profile="full", engram_residency="none", input_modality="text"
    )
    identity = cell.identity.model_copy(
        update={
            "contract": "glm53flash",
            "producer_protocol": GLM53FLASH.protocol,
            "execution_identity": bound,
            "points_sha256": digest(manifest),
        }
    )
    cell = cell.model_copy(update={"points": manifest, "identity": identity})
    file = tmp_path / cell.name / "cell.json"
    write_model(file, cell)
    done = run(file)
    assert done.returncode == 0, done.stderr[-2000:]
    merge(file.parent)
    files = read_cell(file.parent, accepted_of(file.parent))
    evidence = verify(files)
    assert (evidence.state, evidence.failures) == ("recorded", ())
    assert evidence.formal_regime_counts == regimes
    (artifact,) = files.ranks.artifacts
    producer = artifact.measurement_protocol["producer"]
    assert (producer["contract"], producer["execution_mode"]) == ("glm53flash", "native_graph_policy")
    assert producer["state_protocol"] == "glm53flash_prefix_cache_real_seed_v1"
    assert artifact.measurement_protocol["serving_config"]["mamba_prefill_checkpoint"] == {
        "alignment": None,
        "blocks": 0,
    }


def test_every_collector_is_at_rest_while_points_run(demo: Path, parallel: Path):
    """One process with a worker inside, and one with two workers beside it (dynamo#12020)."""
    for campaign, prefix, processes in ((demo, "decode-dense", 2), (parallel, "decode-tensor", 3)):
        journal = cell_folder(campaign, prefix) / "repetitions.jsonl"
        session = json.loads(journal.read_text().splitlines()[0])
        assert session["ranks"][0]["engine"]["collectors"] == [{"enabled": False, "frozen": True}] * processes


@pytest.mark.parametrize(
    ("prefix", "ranks"),
    [
        ("decode-tensor", [[(0, 0), (0, 1)]]),
        ("decode-data", [[(0, 0)], [(1, 0)]]),
    ],
)
def test_each_session_keeps_what_the_processes_of_its_own_launch_hold(parallel: Path, prefix: str, ranks):
    """Of each data-parallel rank the records of its workers (dp, tp) and of its scheduler, as a probe has them."""
    journal = cell_folder(parallel, prefix) / "repetitions.jsonl"
    session = json.loads(journal.read_text().splitlines()[0])
    kept = [rank["runtime"] for rank in session["ranks"]]
    workers = [worker for runtime in kept for worker in runtime["workers"]]
    found = {"workers": workers, "schedulers": [runtime["scheduler"] for runtime in kept]}
    records = parse(EngineRecords, found, journal)
    assert records.model_dump(mode="json", exclude_none=True) == found
    assert [[(worker["dp_rank"], worker["tp_rank"]) for worker in runtime["workers"]] for runtime in kept] == ranks
    assert [scheduler.dp_rank for scheduler in records.schedulers] == [rank["dp_rank"] for rank in session["ranks"]]
    (attempt,) = {each.attempt_id for each in (*records.workers, *records.schedulers)}
    assert len(attempt) == 32
    for scheduler in records.schedulers:
        assert scheduler.launch == session["ranks"][scheduler.dp_rank]["engine"]["serving_config"]["launch"] | {
            "recurrent_block_sizes": ()
        }


def test_a_torn_line_costs_its_point_and_is_said(demo: Path, tmp_path: Path):
    source = cell_folder(demo, "decode-dense") / "repetitions.jsonl"
    cell = copy_of(demo, "decode-dense", tmp_path)
    journal = cell.parent / "repetitions.jsonl"
    whole = source.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(whole[:-1]) + whole[-1][:100])
    done = run(cell)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{journal}: the last line is torn and dropped: its point is measured again" in done.stderr
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [line["kind"] for line in lines[-2:]] == ["session", "point"]
    assert lines[-1]["benchmark_id"] == json.loads(whole[-1])["benchmark_id"]
    assert journal.read_bytes().startswith(b"".join(whole[:-1]))


def test_a_journal_of_another_producer_is_refused_before_the_engine(demo: Path, tmp_path: Path):
    source = cell_folder(demo, "decode-dense") / "repetitions.jsonl"
    cell = copy_of(demo, "decode-dense", tmp_path)
    first = json.loads(source.read_text().splitlines()[0])
    first["producer"]["producer_digest"] = "0" * 64
    (cell.parent / "repetitions.jsonl").write_text(json.dumps(first) + "\n")
    done = run(cell)
    assert done.returncode == 2
    assert done.stderr.startswith(f"refused: producer.producer_digest of this journal: expected {'0' * 64}, found ")
    assert done.stderr.count("\n") == 1
