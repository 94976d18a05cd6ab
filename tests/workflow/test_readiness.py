"""Readiness on cells that the real engine measured: every state, and every blocker in its words."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Workspace
from native_samples import sample

from profiles import group, profile
from schemas.canonical import sha256
from schemas.evidence import CellReadiness, Readiness

from plan_readiness import assess
from runtime_compatibility import compare

CAMPAIGN = "config/campaigns/cpu-demo.yaml"
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def cells(smoke: Path, tmp_path: Path) -> Path:
    shutil.copytree(smoke, tmp_path / "smoke")
    return tmp_path / "smoke" / "cells"


@pytest.fixture
def decode(cells: Path) -> Path:
    (folder,) = cells.glob("decode-dense-*")
    return folder


def plan_file(cells: Path) -> Path:
    (file,) = cells.parent.glob("plan-*/plan.json")
    return file


def rewrite(file: Path, change: Change) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def rewrite_merged(folder: Path, change: Change) -> None:
    """Change the merged file, and have the verdict be of it."""
    rewrite(folder / "merged.json", change)
    found = sha256((folder / "merged.json").read_bytes())
    rewrite(folder / "evidence.json", lambda evidence: evidence.update(merged_sha256=found))


def assessed(folder: Path) -> CellReadiness:
    """One cell, from the readiness of its whole plan."""
    (cell,) = [cell for cell in assess(plan_file(folder.parent)).cells if cell.name == folder.name]
    return cell


def blockers(folder: Path) -> list[str]:
    """What blocks one cell, without its name."""
    cell = assessed(folder)
    assert cell.status == "blocked"
    assert all(line.startswith(folder.name) for line in cell.blockers)
    return [line.removeprefix(folder.name).lstrip(": ") for line in cell.blockers]


# A cell as it was measured.


@pytest.mark.demo
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("deployment", ["dense", "sliding", "hybrid"])
def test_a_measured_cell_is_ready_and_says_what_it_is(cells: Path, deployment: str, phase: str):
    (folder,) = cells.glob(f"{phase}-{deployment}-*")
    points = json.loads((folder / "cell.json").read_text())["points"][phase]
    artifact = json.loads((folder / "benchmark.json").read_text())
    attempts = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    accepted = json.loads((plan_file(cells).parent / "profiles" / f"{deployment}.json").read_text())
    cached = sum(point["total_kv_read_tokens"] > 0 for point in points)
    native = {"real_prefix": cached, "not_applicable": len(points) - cached}
    cell = assessed(folder)
    assert (cell.status, cell.blockers, cell.gaps) == ("ready", (), ())
    assert cell.native_regime_counts == ({"real_kv": len(points)} if phase == "decode" else native)
    assert cell.formal_regime_counts == {"real_kv" if phase == "decode" else "n/a": len(points)}
    assert (cell.direct_eligible_points, cell.coverage) == (len(points), "sampled_points_only")
    assert cell.kvwarm == artifact.get("kvwarm")
    assert (cell.kvwarm is None) == (phase == "prefill")
    assert (cell.run_id, cell.grid_digest) == (artifact["run_id"], artifact["grid_digest"])
    assert cell.observed_backend_version == "0.32.0"
    assert cell.attempt is not None
    assert (cell.attempt.attempts, cell.attempt.started_at) == (1, attempts[0]["started_at"])
    assert (cell.attempt.code, cell.attempt.ended_at) == (0, attempts[1]["ended_at"])
    runtime = cell.runtime_compatibility
    assert runtime is not None
    assert (runtime.status, runtime.mismatches, runtime.unestablished) == ("compatible", (), ())
    assert runtime.accepted_free_blocks == accepted["free_blocks"] == runtime.observed_free_blocks


@pytest.mark.demo
def test_both_scopes_of_the_demo_are_ready(smoke: Path, demo: Path):
    for file in (plan_file(smoke / "cells"), demo / "current" / "plan.json"):
        readiness = assess(file)
        assert (readiness.status, readiness.blockers, len(readiness.cells)) == ("ready", (), 6)
        assert {name: found.status for name, found in readiness.runtime_compatibility.items()} == dict.fromkeys(
            ("dense", "hybrid", "sliding"), "compatible"
        )


@pytest.mark.demo
def test_a_point_counts_once_however_many_ranks_ran_it(parallel: Path, tmp_path: Path):
    shutil.copytree(parallel, tmp_path / "parallel", symlinks=True)
    plan = (tmp_path / "parallel" / "current").resolve() / "plan.json"
    readiness = assess(plan)
    assert (readiness.status, readiness.blockers) == ("ready", ())
    points = {cell["name"]: cell["points"] for cell in json.loads(plan.read_text())["cells"]}
    assert {cell.name: cell.direct_eligible_points for cell in readiness.cells} == points
    (folder,) = (tmp_path / "parallel" / "cells").glob("decode-data-*")
    rewrite(folder / "evidence.json", lambda evidence: evidence["formal_regimes"].pop())
    ranks, name = 2, folder.name
    (line, _) = assess(plan).blockers
    assert line == f"{name} formal_regimes: expected {ranks * points[name]}, found {ranks * points[name] - 1}"


# The verdict.


@pytest.mark.demo
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda e: e.update(state="failed", failures=["too good", "too fast"]), ["too good", "too fast"]),
        (lambda e: e.update(state="failed"), ["state: expected recorded or unestablished, found failed"]),
        (lambda e: e.update(failures=["odd"]), ["odd", "state: expected failed, found recorded or unestablished"]),
        (lambda e: e.update(points=3), ["points: expected 2, found 3"]),
        (lambda e: e.update(phase="prefill"), ["phase: expected decode, found prefill"]),
        (lambda e: e.update(run_id="r"), [lambda line: line.endswith(", found r") and line.startswith("run_id: ")]),
        (lambda e: e.update(grid_digest="g"), [lambda line: line.startswith("grid_digest: expected ")]),
        (
            lambda e: e["formal_regimes"].pop(),
            [
                "formal_regimes: expected 2, found 1",
                "formal_regime_counts: expected {'real_kv': 1}, found {'real_kv': 2}",
            ],
        ),
        (
            lambda e: e.update(formal_regime_counts={"real_kv": 1, "legacy": 1}),
            ["formal_regime_counts: expected {'real_kv': 2}, found {'legacy': 1, 'real_kv': 1}"],
        ),
        (lambda e: e.update(native_regime_counts={"real_kv": 1}), ["native_regime_counts: expected 2, found 1"]),
        (lambda e: e.update(cell_digest="0" * 64), [lambda line: line.endswith(f", found {'0' * 64}")]),
    ],
)
def test_a_verdict_that_is_not_the_cells_blocks(decode: Path, change: Change, expected: list[Any]):
    rewrite(decode / "evidence.json", change)
    found = blockers(decode)
    assert len(found) == len(expected)
    for line, want in zip(found, expected, strict=True):
        assert want(line) if callable(want) else want == line
    assert assessed(decode).coverage == "unverified"


@pytest.mark.demo
def test_a_merged_file_that_changed_after_its_verdict_blocks(decode: Path):
    rewrite(decode / "merged.json", lambda merged: merged.update(valid=False))
    (line,) = blockers(decode)
    assert line.startswith("merged_sha256: expected ")


@pytest.mark.demo
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: m.update(cell_digest="0" * 64), "cell_digest of merged.json: expected "),
        (lambda m: m["iteration_groups"].pop(), "points of merged.json: expected 2, found 1"),
        (lambda m: m["results"].pop(), "rows of merged.json: expected 2, found 1"),
    ],
)
def test_a_merged_file_of_something_else_blocks(decode: Path, change: Change, expected: str):
    rewrite_merged(decode, change)
    (line,) = blockers(decode)
    assert line.startswith(expected)


@pytest.mark.demo
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: c["identity"].update(token_seed="54"), ["cell_digest of cell.json: expected "]),
        (lambda c: c.update(deployment="sparse"), ["deployment of cell.json: expected dense, found sparse"]),
        (lambda c: c["points"]["decode"].pop(), ["points of cell.json: expected 2, found 1"]),
    ],
)
def test_a_frozen_cell_of_another_plan_blocks(decode: Path, change: Change, expected: list[str]):
    rewrite(decode / "cell.json", change)
    assert [line[: len(want)] for line, want in zip(blockers(decode), expected, strict=True)] == expected


@pytest.mark.demo
def test_gaps_are_reported_and_block_nothing(decode: Path):
    rewrite(decode / "evidence.json", lambda e: e.update(state="unestablished", gaps=["graph dispatch unobserved"]))
    cell = assessed(decode)
    assert (cell.status, cell.gaps, cell.coverage) == (
        "ready",
        ("graph dispatch unobserved",),
        "sampled_points_only",
    )


# Seed regimes.


def label(*regimes: str) -> Change:
    counts = {regime: regimes.count(regime) for regime in regimes}
    return lambda evidence: evidence.update(formal_regimes=regimes, formal_regime_counts=counts)


@pytest.mark.demo
def test_one_fake_point_leaves_the_coverage_partial(decode: Path):
    rewrite(decode / "evidence.json", label("fake_fallback", "real_kv"))
    cell = assessed(decode)
    assert (cell.status, cell.direct_eligible_points, cell.coverage) == ("ready", 1, "partial")


@pytest.mark.demo
def test_points_that_were_skipped_for_a_good_reason_are_eligible(decode: Path):
    """Reference 004: a dense skip that qualified is no fake content."""
    rewrite(decode / "evidence.json", label(*["skip:dense_model_content_insensitive"] * 2))
    cell = assessed(decode)
    assert (cell.status, cell.direct_eligible_points, cell.coverage) == ("ready", 2, "sampled_points_only")


@pytest.mark.demo
def test_no_eligible_point_blocks(decode: Path):
    rewrite(decode / "evidence.json", label("fake_fallback", "fake_fallback"))
    assert blockers(decode) == ["no point is eligible for direct use"]
    cell = assessed(decode)
    assert (cell.direct_eligible_points, cell.coverage) == (0, "partial")


@pytest.mark.demo
@pytest.mark.parametrize("change", [lambda m: m.pop("kvwarm"), lambda m: m.update(kvwarm=None)], ids=["absent", "null"])
def test_decode_without_a_kvwarm_block_blocks(decode: Path, change: Change):
    rewrite_merged(decode, change)
    assert blockers(decode) == ["decode without a kvwarm block"]


# Files that are missing, or cannot be read.


@pytest.mark.demo
@pytest.mark.parametrize("name", ["cell.json", "evidence.json", "merged.json"])
def test_a_cell_without_one_of_its_files_is_incomplete(decode: Path, name: str):
    (decode / name).unlink()
    cell = assessed(decode)
    assert (cell.status, cell.blockers) == ("incomplete", (f"{decode.name}: {name} missing",))
    assert cell.coverage == "unverified"


DAMAGE = {
    "empty": b"",
    "no UTF-8": b"\xff\xfe",
    "NaN": b'{"points": NaN}',
    "an object without fields": b"{}",
    "a list": b"[]",
    "deeply nested": b"[" * 200_000 + b"]" * 200_000,
}


@pytest.mark.demo
@pytest.mark.parametrize("name", ["cell.json", "evidence.json", "merged.json"])
@pytest.mark.parametrize("damage", [*DAMAGE, "truncated", "a folder"])
@pytest.mark.parametrize("rank", ["readable", "damaged", "missing"])
def test_a_file_that_cannot_be_read_is_a_blocker_in_words(decode: Path, name: str, damage: str, rank: str):
    """Blocked if some rank artifact can be read, else incomplete."""
    file = decode / name
    whole = file.read_bytes()
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    else:
        file.write_bytes(DAMAGE.get(damage, whole[: len(whole) // 2]))
    if rank == "damaged":
        (decode / "benchmark.json").write_bytes(b"{")
    elif rank == "missing":
        (decode / "benchmark.json").unlink()
    readiness = assess(plan_file(decode.parent))
    assert readiness.status == ("blocked" if rank == "readable" else "incomplete")
    (line,) = readiness.blockers
    assert line.startswith(f"{decode.name}: cannot be read: ")
    assert str(file) in line or name in line
    assert "\n" not in line


@pytest.mark.demo
@pytest.mark.parametrize(
    "content", [b"\xff\n", b"null\n", b'{"started_at": 5}\n', b'{"started_at": "x"}\n{"code": "y"}\n']
)
def test_attempts_that_cannot_be_read_block(decode: Path, content: bytes):
    (decode / "attempts.jsonl").write_bytes(content)
    (line,) = blockers(decode)
    assert line.startswith("cannot be read: ")
    assert "attempts.jsonl" in line


@pytest.mark.demo
def test_a_torn_line_of_attempts_is_none(decode: Path):
    with (decode / "attempts.jsonl").open("ab") as lines:
        lines.write(b'{"attempt":2,"sta')
    cell = assessed(decode)
    assert (cell.status, cell.attempt and cell.attempt.attempts) == ("ready", 1)


# Attempts.

BEGIN = {"attempt": 1, "host": "h", "pid": 1, "started_at": "2026-11-30T12:00:00Z"}
FAILED = {"code": 1, "ended_at": "2026-11-30T12:01:00Z", "reason": "the engine died"}
STOPPED = {"code": 143, "ended_at": "2026-11-30T12:01:00Z", "reason": "stopped by SIGTERM"}
AGAIN = {"attempt": 2, "host": "h", "pid": 2, "started_at": "2026-11-30T12:02:00Z"}
NOTHING = "evidence.json, merged.json missing"


def attempted(folder: Path, *lines: dict[str, Any]) -> None:
    """A cell that was tried as `lines` say, and of which nothing was measured."""
    cell = (folder / "cell.json").read_bytes() if folder.exists() else None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if cell is not None:
        (folder / "cell.json").write_bytes(cell)
    (folder / "attempts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.demo
@pytest.mark.parametrize(
    ("lines", "status", "words"),
    [
        (
            [BEGIN, FAILED],
            "blocked",
            "attempt 1, begun 2026-11-30T12:00:00Z, ended with exit code 1, and nothing is measured: the engine died",
        ),
        (
            [BEGIN, FAILED | {"code": 2, "reason": "expected vllm"}],
            "blocked",
            "attempt 1, begun 2026-11-30T12:00:00Z, ended with exit code 2, and nothing is measured: expected vllm",
        ),
        (
            [BEGIN, STOPPED],
            "incomplete",
            "attempt 1, begun 2026-11-30T12:00:00Z, was stopped, and nothing is measured: stopped by SIGTERM",
        ),
        ([BEGIN], "incomplete", "attempt 1, begun 2026-11-30T12:00:00Z, has not ended: it runs, or was killed"),
        (
            [BEGIN, FAILED, AGAIN],
            "incomplete",
            "attempt 2, begun 2026-11-30T12:02:00Z, has not ended: it runs, or was killed",
        ),
        (
            [BEGIN, AGAIN, FAILED],
            "blocked",
            "attempt 2, begun 2026-11-30T12:02:00Z, ended with exit code 1, and nothing is measured: the engine died",
        ),
    ],
    ids=["failed", "refused", "stopped", "killed", "runs again", "failed again"],
)
def test_the_last_attempt_counts_when_nothing_is_measured(decode: Path, lines: list[Any], status: str, words: str):
    attempted(decode, *lines)
    cell = assessed(decode)
    assert cell.status == status
    assert cell.blockers == (f"{decode.name}: {NOTHING}", f"{decode.name}: {words}")


@pytest.mark.demo
def test_a_failed_attempt_after_a_measured_cell_blocks_nothing(decode: Path):
    """What is measured stands: a journal is never measured again."""
    with (decode / "attempts.jsonl").open("a") as lines:
        lines.write(f"{json.dumps(AGAIN)}\n{json.dumps(FAILED)}\n")
    cell = assessed(decode)
    assert (cell.status, cell.attempt and cell.attempt.reason) == ("ready", "the engine died")


@pytest.mark.demo
def test_an_artifact_that_is_not_judged_yet_is_incomplete_whatever_its_attempts(decode: Path):
    (decode / "evidence.json").unlink()
    (decode / "attempts.jsonl").write_text(f"{json.dumps(BEGIN)}\n{json.dumps(FAILED)}\n")
    cell = assessed(decode)
    assert (cell.status, cell.blockers) == ("incomplete", (f"{decode.name}: evidence.json missing",))


@pytest.mark.demo
def test_a_blocked_cell_outweighs_one_that_is_incomplete(cells: Path, decode: Path):
    (hybrid,) = cells.glob("decode-hybrid-*")
    (hybrid / "evidence.json").unlink()
    assert assess(plan_file(cells)).status == "incomplete"
    rewrite(decode / "evidence.json", lambda evidence: evidence.update(state="failed", failures=["too good"]))
    assert assess(plan_file(cells)).status == "blocked"


# The plan.


def tampered(cells: Path, change: Change) -> Readiness:
    rewrite(plan_file(cells), change)
    readiness = assess(plan_file(cells))
    assert readiness.status == "blocked"
    return readiness


def drop(prefix: str) -> Change:
    def change(plan: dict[str, Any]) -> None:
        plan["cells"] = [cell for cell in plan["cells"] if not cell["name"].startswith(prefix)]

    return change


@pytest.mark.demo
@pytest.mark.parametrize(
    ("change", "line"),
    [
        (drop("decode-hybrid-"), "plan cells of hybrid, phase decode: expected 1, found 0"),
        (lambda p: p["cells"].append(p["cells"][0]), "plan cells of dense, phase prefill: expected 1, found 2"),
        (
            lambda p: p["deployments"]["dense"].update(decode_points=3),
            "plan points of dense, phase decode: expected 3, found 2",
        ),
        (
            lambda p: p["cells"][0].update(digest="0" * 64),
            f"plan cells name: expected prefill-dense-{'0' * 16}, found prefill-dense-",
        ),
        (
            lambda p: p["deployments"].pop("hybrid"),
            "plan cells deployment: expected one of dense, sliding, found hybrid",
        ),
    ],
)
def test_a_plan_that_is_not_whole_blocks(cells: Path, change: Change, line: str):
    assert any(found.startswith(line) for found in tampered(cells, change).plan_blockers)


@pytest.mark.demo
def test_a_plan_that_is_not_its_folders_blocks(cells: Path):
    name = plan_file(cells).parent.name.removeprefix("plan-")
    (line,) = tampered(cells, lambda plan: plan.update(backend_version="lab")).plan_blockers
    assert line.startswith(f"digest of plan.json: expected {name}, found ")


def judge(workspace: Workspace, scope: str) -> tuple[int, dict[str, Any]]:
    (plan,) = (workspace.root / "results/cpu-demo" / scope).glob("plan-*/plan.json")
    output = workspace.root / "verdict.json"
    done = workspace.script("assess_readiness", "--campaign", CAMPAIGN, "--plan", str(plan), "--output", str(output))
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(output.read_text())
    return done.returncode, found


@pytest.fixture
def campaign(smoke: Path, finished: Workspace) -> Workspace:
    """The project with the demo's smoke and formal cells."""
    return finished


def smoke_alone(workspace: Workspace) -> None:
    """As it is when the smoke run is over, and nothing has been measured in full."""
    shutil.rmtree(workspace.root / "results/cpu-demo/cells")


@pytest.mark.demo
@pytest.mark.parametrize("scope", ["", "smoke"])
def test_a_plan_is_what_its_campaign_gives_now(campaign: Workspace, scope: str):
    assert judge(campaign, scope)[1]["blockers"] == []
    campaign.edit(CAMPAIGN, 'backend_version: "0.32.0"', 'backend_version: lab\nruntime_backend_version: "0.32.0"')
    code, found = judge(campaign, scope)
    assert (code, found["status"]) == (0, "blocked")
    assert found["blockers"] == ["plan backend_version: expected lab of the campaign as it is now, found 0.32.0"]


@pytest.mark.demo
def test_a_plan_of_another_role_blocks(campaign: Workspace):
    campaign.edit(CAMPAIGN, "  dense: # full attention, like Qwen3\n", "  dense:\n    worker_type: decode\n")
    done = campaign.snakemake("plan")  # the profile of one phase is another one, imported from the same probe
    assert done.returncode == 0, done.stderr
    _, found = judge(campaign, "smoke")
    assert "plan cells of dense, phase prefill: expected 0, found 1" in found["blockers"]
    assert any(
        line.startswith("plan deployments.dense.prefill_points: expected 0 of the campaign as it is now, found ")
        for line in found["blockers"]
    )


# The runtime against the accepted profile.


def runtime(folder: Path) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    found = assessed(folder).runtime_compatibility
    assert found is not None
    return found.status, found.mismatches, found.unestablished


@pytest.mark.demo
@pytest.mark.parametrize(
    ("change", "mismatch"),
    [
        (
            lambda m: m["capacity"]["common"].update(usable_blocks_without_watermark=1022),
            "runtime free blocks: expected at least 1023 of the accepted profile, found 1022",
        ),
        (
            lambda m: m["engine"]["versions"].update(vllm="0.32.1"),
            "runtime engine.versions.vllm: expected 0.32.0 of the accepted profile, found 0.32.1",
        ),
        (
            lambda m: m["engine"].update(device_name="gpu"),
            "runtime engine.device_name: expected cpu of the accepted profile, found gpu",
        ),
        (
            lambda m: m["limits"].update(block_size=64),
            "runtime limits.block_size: expected 128 of the accepted profile, found 64",
        ),
        (
            lambda m: m["limits"].update(max_model_len=8192),
            "runtime limits.max_model_len: expected 4096 of the accepted profile, found 8192",
        ),
        (
            lambda m: m["limits"].update(max_num_scheduled_tokens=1024),
            "runtime limits.max_num_scheduled_tokens: expected 2048 of the accepted profile, found 1024",
        ),
        (
            lambda m: m["limits"].update(max_num_running_reqs=16),
            "runtime limits.max_num_running_reqs: expected 8 of the accepted profile, found 16",
        ),
        (
            lambda m: m["engine"]["serving_config"]["launch"].update(hash_block_size=16),
            "runtime engine.serving_config.launch.hash_block_size: expected 128 of the accepted profile, found 16",
        ),
        (
            lambda m: m["engine"]["kv_cache"].update(enable_prefix_caching=1),
            "runtime engine.kv_cache.enable_prefix_caching: expected True of the accepted profile, found 1",
        ),
        (
            lambda m: m["engine"]["kv_cache"]["groups"].append({}),
            "runtime number of engine.kv_cache.groups: expected 1 of the accepted profile, found 2",
        ),
        (
            lambda m: m["engine"]["kv_cache"]["groups"][0].update(type="SlidingWindowSpec"),
            "runtime engine.kv_cache.groups[0].type: expected FullAttentionSpec of the accepted profile, "
            "found SlidingWindowSpec",
        ),
        (
            lambda m: m["engine"]["kv_cache"]["groups"][0].update(block_size=64),
            "runtime engine.kv_cache.groups[0].block_size: expected 128 of the accepted profile, found 64",
        ),
        (
            lambda m: m["engine"]["kv_cache"]["groups"][0].update(sliding_window=512),
            "runtime engine.kv_cache.groups[0].sliding_window: expected None of the accepted profile, found 512",
        ),
    ],
)
def test_a_runtime_that_is_not_the_accepted_one_blocks(decode: Path, change: Change, mismatch: str):
    rewrite_merged(decode, change)
    assert blockers(decode) == [mismatch]
    assert runtime(decode) == ("mismatch", (mismatch,), ())
    of_deployment = assess(plan_file(decode.parent)).runtime_compatibility["dense"]
    assert (of_deployment.status, of_deployment.mismatches) == ("mismatch", (mismatch,))


@pytest.mark.demo
def test_the_mode_of_the_recurrent_cache_is_the_accepted_one(cells: Path):
    (folder,) = cells.glob("prefill-hybrid-*")
    rewrite_merged(folder, lambda m: m["engine"]["kv_cache"]["groups"][0].update(mamba_cache_mode="all"))
    place = "engine.kv_cache.groups[0].mamba_cache_mode"
    assert blockers(folder) == [f"runtime {place}: expected align of the accepted profile, found all"]


@pytest.mark.demo
def test_more_capacity_than_was_accepted_is_no_blocker_and_the_smaller_phase_counts(cells: Path, decode: Path):
    for phase, blocks in (("decode", 2000), ("prefill", 1500)):
        (folder,) = cells.glob(f"{phase}-dense-*")

        def more(merged: dict[str, Any], blocks: int = blocks) -> None:
            merged["capacity"]["common"]["usable_blocks_without_watermark"] = blocks

        rewrite_merged(folder, more)
    readiness = assess(plan_file(cells))
    found = readiness.runtime_compatibility["dense"]
    assert (readiness.status, found.status) == ("ready", "compatible")
    assert (found.accepted_free_blocks, found.observed_free_blocks) == (1023, 1500)


@pytest.mark.demo
@pytest.mark.parametrize(
    ("change", "unestablished"),
    [
        (lambda m: m["engine"].pop("device_name"), ("engine.device_name",)),
        (lambda m: m["engine"]["kv_cache"].pop("groups"), ("engine.kv_cache.groups",)),
        (
            lambda m: m["engine"]["kv_cache"]["groups"][0].update(type="UniformTypeKVCacheSpecs"),
            ("engine.kv_cache.groups[0].type",),
        ),
        (
            lambda m: (m["capacity"].clear(), m["limits"].pop("num_gpu_blocks")),
            ("capacity.common.usable_blocks_without_watermark",),
        ),
        (
            lambda m: m.pop("engine"),
            (
                "engine.versions.vllm",
                "engine.device_name",
                "engine.serving_config.launch.hash_block_size",
                "engine.kv_cache.enable_prefix_caching",
                "engine.kv_cache.groups",
            ),
        ),
    ],
    ids=["device", "groups", "uniform group", "capacity", "engine"],
)
def test_what_cannot_be_compared_is_named_and_blocks_nothing(decode: Path, change: Change, unestablished: tuple[str]):
    rewrite_merged(decode, change)
    assert assessed(decode).status == "ready"
    assert runtime(decode) == ("unestablished", (), unestablished)


@pytest.mark.demo
def test_without_the_usable_blocks_all_but_the_null_block_count(decode: Path):
    rewrite_merged(decode, lambda m: (m["capacity"].clear(), m["limits"].update(num_gpu_blocks=1024)))
    assert runtime(decode) == ("compatible", (), ())
    rewrite_merged(decode, lambda m: m["limits"].update(num_gpu_blocks=1023))
    assert blockers(decode) == ["runtime free blocks: expected at least 1023 of the accepted profile, found 1022"]


@pytest.mark.demo
@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda file: file.unlink(), "accepted profile of dense cannot be read: profile: expected a readable file"),
        (lambda file: file.write_text("{"), "accepted profile of dense cannot be read: profile: expected JSON"),
        (lambda file: file.write_text("{}"), "accepted profile of dense cannot be read: "),
        (lambda file: file.write_text(file.read_text() + "\n"), "sha256 of the accepted profile of dense: expected "),
    ],
    ids=["missing", "truncated", "empty", "changed"],
)
def test_a_profile_that_is_not_the_plans_blocks(cells: Path, damage: Callable[[Path], Any], line: str):
    damage(plan_file(cells).parent / "profiles" / "dense.json")
    readiness = assess(plan_file(cells))
    assert readiness.status == "blocked"
    (found,) = readiness.blockers
    assert found.startswith(line)
    assert "dense" not in readiness.runtime_compatibility


@pytest.mark.parametrize("name", ["d161_dense_agg", "d17_dense_agg", "d161_moe_realkv_agg"])
def test_dynamos_artifacts_say_all_but_device_and_hash_block(name: str):
    """The declared profile of an imported cell: 16,384 blocks of 128 tokens, of which one is the null block."""
    declared = profile(free_blocks=16383, max_batch_size=16, max_model_len=1024)
    found = compare(declared, sample(name))
    assert (found.status, found.mismatches) == ("unestablished", ())
    assert found.unestablished == ("engine.device_name", "engine.serving_config.launch.hash_block_size")
    assert found.observed_free_blocks == 16383
    (mismatch,) = compare(profile(free_blocks=16384, max_batch_size=16, max_model_len=1024), sample(name)).mismatches
    assert mismatch == "runtime free blocks: expected at least 16384 of the accepted profile, found 16383"


def test_dynamos_sliding_window_is_compared():
    windows = {256: (), 512: ("runtime engine.kv_cache.groups[0].sliding_window",)}
    for window, mismatches in windows.items():
        declared = profile(
            group("SlidingWindowSpec", 128, sliding_window=window),
            free_blocks=16383,
            max_batch_size=16,
            max_model_len=1024,
        )
        found = compare(declared, sample("d17_moe_swa_native_decode")).mismatches
        assert tuple(line.split(":")[0] for line in found) == mismatches


# The campaign over both scopes.


def overall(workspace: Workspace) -> tuple[int, dict[str, Any]]:
    done = workspace.script("assess_readiness", "--campaign", CAMPAIGN, "--json")
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["ready_for_full_collection"] == (done.returncode == 0) == (found["status"] == "ready")
    return done.returncode, found


def scopes(found: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """`<phase>-<deployment>` -> scope and status of the cell that counts."""
    return {
        f"{one['phase']}-{one['deployment']}": (one["scope"], one["cell"]["status"]) for one in found["selected_cells"]
    }


SLOTS = [f"{phase}-{name}" for phase in ("prefill", "decode") for name in ("dense", "hybrid", "sliding")]
SMOKE_READY = dict.fromkeys(SLOTS, ("smoke", "ready"))
FORMAL_READY = dict.fromkeys(SLOTS, ("formal", "ready"))


@pytest.mark.demo
def test_a_smoke_run_that_is_ready_lets_the_campaign_be_measured(campaign: Workspace):
    smoke_alone(campaign)
    code, found = overall(campaign)
    assert (code, found["status"], found["blockers"], scopes(found)) == (0, "ready", [], SMOKE_READY)
    root = campaign.root / "results/cpu-demo"
    for scope, folder in (("smoke", root / "smoke"), ("formal", root)):
        (plan,) = folder.glob("plan-*/plan.json")
        assert found["plans"][scope] == sha256(plan.read_bytes())


@pytest.mark.demo
def test_formal_cells_supersede_smoke(campaign: Workspace):
    code, found = overall(campaign)
    assert (code, found["status"], found["blockers"], scopes(found)) == (0, "ready", [], FORMAL_READY)


@pytest.mark.demo
@pytest.mark.parametrize(
    ("lines", "status"), [([BEGIN, FAILED], "blocked"), ([BEGIN], "incomplete"), ([BEGIN, STOPPED], "incomplete")]
)
def test_a_formal_attempt_supersedes_its_smoke_cell_even_when_it_failed(campaign: Workspace, lines, status: str):
    formal = campaign.cell("decode-hybrid")
    smoke_alone(campaign)
    attempted(formal, *lines)
    code, found = overall(campaign)
    assert (code, found["status"]) == (1, status)
    assert scopes(found) == SMOKE_READY | {"decode-hybrid": ("formal", status)}
    assert all(line.startswith(f"formal {formal.name}: ") for line in found["blockers"])
    assert ("the engine died" in found["blockers"][-1]) == (status == "blocked")


@pytest.mark.demo
def test_a_formal_cell_that_is_ready_supersedes_a_smoke_cell_that_is_not(campaign: Workspace):
    rewrite(
        campaign.cell("decode-dense", "smoke") / "evidence.json", lambda e: e.update(state="failed", failures=["odd"])
    )
    assert overall(campaign)[0] == 0
    formal = campaign.cell("decode-dense")
    smoke_cell = campaign.cell("decode-dense", "smoke").name
    shutil.rmtree(formal)
    code, found = overall(campaign)
    assert (code, found["status"], found["blockers"]) == (1, "blocked", [f"smoke {smoke_cell}: odd"])
    assert scopes(found) == FORMAL_READY | {"decode-dense": ("smoke", "blocked")}


@pytest.mark.demo
def test_every_phase_of_every_role_has_to_be_there(campaign: Workspace):
    smoke_alone(campaign)
    folder = campaign.cell("prefill-sliding", "smoke")
    shutil.rmtree(folder)
    code, found = overall(campaign)
    assert (code, found["status"]) == (1, "incomplete")
    assert found["blockers"] == [f"smoke {folder.name}: cell.json, evidence.json, merged.json missing"]


@pytest.mark.demo
def test_smoke_cells_of_another_plan_do_not_count(campaign: Workspace):
    smoke_alone(campaign)
    campaign.edit(CAMPAIGN, "268435456, mamba_cache_mode", "134217728, mamba_cache_mode")
    code, found = overall(campaign)
    assert (code, found["status"]) == (1, "incomplete")
    assert found["blockers"] == ["profile of hybrid: not imported, so no cell is known"]


@pytest.mark.demo
def test_a_changed_grid_leaves_the_phase_that_it_changes_open(campaign: Workspace):
    smoke_alone(campaign)
    campaign.edit(CAMPAIGN, "contexts: [64, 256, 512, 1024, 2048]", "contexts: [128, 256, 512, 1024, 2000]")
    code, found = overall(campaign)
    assert (code, found["status"]) == (1, "incomplete")
    assert {slot for slot, (_, status) in scopes(found).items() if status == "incomplete"} == {
        f"decode-{name}" for name in ("dense", "hybrid", "sliding")
    }


@pytest.mark.demo
def test_a_saved_plan_that_lacks_a_phase_blocks_the_campaign(campaign: Workspace):
    smoke_alone(campaign)
    (plan,) = (campaign.root / "results/cpu-demo/smoke").glob("plan-*/plan.json")
    rewrite(plan, drop("decode-hybrid-"))
    code, found = overall(campaign)
    assert (code, found["status"]) == (1, "blocked")
    assert "smoke plan cells of hybrid, phase decode: expected 1, found 0" in found["blockers"]
    assert "decode of hybrid: no cell" in found["blockers"]


@pytest.mark.demo
def test_a_saved_plan_that_cannot_be_read_blocks_the_campaign(campaign: Workspace):
    smoke_alone(campaign)
    (plan,) = (campaign.root / "results/cpu-demo/smoke").glob("plan-*/plan.json")
    plan.write_text("{")
    code, found = overall(campaign)
    assert (code, found["status"]) == (1, "blocked")
    (line,) = found["blockers"]
    assert line.startswith("smoke plan cannot be read: plan: expected JSON")


@pytest.mark.demo
def test_profiles_that_nobody_accepted_block_the_campaign(campaign: Workspace):
    campaign.edit("config/systems/cpu-2core.yaml", "embedded: true", "embedded: false")
    campaign.edit(CAMPAIGN, "acceptance: auto # only an embedded system may say so", "acceptance: {}")
    code, found = overall(campaign)
    assert (code, found["status"]) == (1, "blocked")
    names = [line.split(":")[0] for line in found["blockers"]]
    assert names == ["acceptance.dense", "acceptance.hybrid", "acceptance.sliding"]


def test_a_campaign_that_was_never_probed_is_incomplete(project: Workspace):
    code, found = overall(project)
    assert (code, found["status"]) == (1, "incomplete")
    assert found["blockers"] == [
        f"profile of {name}: not imported, so no cell is known" for name in ("dense", "hybrid", "sliding")
    ]


@pytest.mark.demo
def test_it_prints_lines_for_people(campaign: Workspace):
    smoke_alone(campaign)
    done = campaign.script("assess_readiness", "--campaign", CAMPAIGN)
    assert done.returncode == 0
    first, *lines = done.stdout.splitlines()
    assert first == "cpu-demo: ready, ready for full collection"
    cell = campaign.cell("decode-dense", "smoke").name
    assert f"ready       smoke   {cell}  2 of 2 points eligible, sampled_points_only" in lines
    assert "runtime of dense: compatible (1023 free blocks, 1023 accepted)" in lines
    rewrite(
        campaign.cell("decode-dense", "smoke") / "evidence.json", lambda e: e.update(state="failed", failures=["odd"])
    )
    done = campaign.script("assess_readiness", "--campaign", CAMPAIGN)
    assert done.returncode == 1
    assert done.stdout.startswith("cpu-demo: blocked, not ready for full collection\n")
    assert f"  smoke {cell}: odd\n" in done.stdout


@pytest.mark.demo
def test_it_writes_nothing_and_claims_nothing(campaign: Workspace):
    def state() -> dict[str, tuple[int, str]]:
        return {
            str(path): (path.lstat().st_mtime_ns, sha256(path.read_bytes()) if path.is_file() else "")
            for path in campaign.root.rglob("*")
            if "__pycache__" not in path.parts
        }

    before = state()
    assert overall(campaign)[0] == 0
    assert state() == before


@pytest.mark.parametrize("arguments", [(), ("--plan", "plan.json"), ("--campaign", CAMPAIGN, "--output", "x.json")])
def test_arguments_that_do_not_go_together_are_refused(project: Workspace, arguments: tuple[str, ...]):
    done = project.script("assess_readiness", *arguments)
    assert done.returncode == 2
    assert "expected --plan with --output, or --campaign" in done.stderr
