"""Judges on cells that the real engine measured: whole they pass, and each way of tampering is found."""

import json
import re
import shutil
from pathlib import Path

import pytest
from tampering import accepted_of, failures, merged, renew, rewrite, rewrite_line

from schemas.canonical import read_model
from schemas.errors import Refusal
from schemas.plan import Plan

from plan_readiness import assess
from verify_cell import read_cell, verify

pytestmark = pytest.mark.demo


@pytest.fixture
def cells(smoke: Path, tmp_path: Path) -> Path:
    shutil.copytree(smoke, tmp_path / "smoke")
    return tmp_path / "smoke" / "cells"


@pytest.fixture
def prefill(cells: Path) -> Path:
    (folder,) = cells.glob("prefill-hybrid-*")
    return folder


@pytest.fixture
def decode(cells: Path) -> Path:
    (folder,) = cells.glob("decode-hybrid-*")
    return folder


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("deployment", ["dense", "sliding", "hybrid"])
def test_what_the_engine_measured_is_recorded(cells: Path, phase: str, deployment: str):
    (folder,) = cells.glob(f"{phase}-{deployment}-*")
    evidence = verify(read_cell(folder, accepted_of(folder)))
    assert (evidence.state, evidence.failures, evidence.gaps) == ("recorded", (), ())
    expected = {"n/a": evidence.points} if phase == "prefill" else {"real_kv": evidence.points}
    assert evidence.formal_regime_counts == expected


def test_a_file_changed_after_its_receipt_is_found(prefill: Path):
    rewrite(prefill / "benchmark.json", lambda data: data.update(run_id="0" * 32))
    found = failures(prefill)
    assert "sha256 of benchmark.json: expected" in found
    assert "benchmark.json run_id: expected what repetitions.jsonl holds" in found


def test_a_faster_time_is_found_even_with_a_forged_receipt(prefill: Path):
    def faster(data):
        for group in data["iteration_groups"]:
            group["wall_time"] /= 2
        data["timing"]["measured_iteration_seconds"] /= 2

    rewrite(prefill / "benchmark.json", faster, whole=True)
    assert "benchmark.json iteration_groups: expected what repetitions.jsonl holds" in failures(prefill)


def test_a_line_of_the_journal_that_moved_with_its_receipt_is_found(prefill: Path):
    rewrite_line(prefill, 1, lambda line: line["ranks"][0]["repetitions"][3].update(end_monotonic=0.5))
    assert "benchmark.json results: expected what repetitions.jsonl holds" in failures(prefill)


@pytest.mark.parametrize("index", [0, 1, 5, 9])
@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda r: r["scheduled_requests"].update(sum_decode_kv_tokens=1), "sum_decode_kv_tokens expected"),
        (lambda r: r["scheduled_requests"].update(num_decode_requests=9), "num_decode_requests expected"),
        (lambda r: r.update(basis="schedule_to_output"), "basis: expected inter_output, found schedule_to_output"),
        (lambda r: r.update(start_monotonic=-5.0), "interval: expected to rise from"),
        (lambda r: r.update(forward_index=0), "forward_index: expected"),
        (
            lambda r: r["scheduled_requests"].update(var_decode_kv_tokens=9.0),
            "var_decode_kv_tokens expected 0.0, found 9",
        ),
        (lambda r: r.update(overhead_seconds=99.0), "overhead_seconds: expected a part of the interval, found 99.0"),
    ],
)
def test_each_sample_is_checked_not_only_the_kept_one(decode: Path, index, change, finding):
    """Everything is derived anew from a journal in which one sample of ten is not what the point says."""
    try:
        rewrite_line(decode, 1, lambda line: change(line["ranks"][0]["repetitions"][index]), derive=True)
    except Refusal:
        return  # the merge already refuses: the sample contradicts the retained one
    found = failures(decode)
    assert finding in found


def test_samples_that_are_one_interval_ten_times_are_found(decode: Path):
    def copy(line):
        first = line["ranks"][0]["repetitions"][0]
        for r in line["ranks"][0]["repetitions"]:
            r.update(start_monotonic=first["start_monotonic"], end_monotonic=first["end_monotonic"])

    rewrite_line(decode, 1, copy, derive=True)
    assert failures(decode).count("interval: expected to rise from") == 9


def test_a_prefix_that_nobody_seeded_is_found(cells: Path):
    (folder,) = cells.glob("prefill-dense-*")
    lines = [json.loads(line) for line in (folder / "repetitions.jsonl").read_text().splitlines()]
    (number,) = [index for index, line in enumerate(lines) if line["kind"] == "point" and line["ranks"][0]["seeds"]][:1]
    rewrite_line(folder, number, lambda line: line["ranks"][0].update(seeds=[]), derive=True)
    assert "expected a seed of 128 tokens before it, found none" in failures(folder)


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda rank: rank["warmups"][1].update(forward_index_end=99), "warm-up: expected 3 forwards, found"),
        (
            lambda rank: rank["warmups"][-1]["first"].update(sum_prefill_tokens=1),
            "warm-up first step: sum_prefill_tokens expected",
        ),
        (
            lambda rank: rank["warmups"][-1]["last"].update(num_decode_requests=7),
            "warm-up last step: num_decode_requests expected 1, found 7",
        ),
        (
            lambda rank: rank["warmups"][-1].update(
                {key: rank["warmups"][-2][key] for key in ("forward_index_start", "forward_index_end")}
            ),
            "to end before eager_shape span at",
        ),
    ],
)
def test_warm_ups_that_are_only_labels_are_found(decode: Path, change, finding):
    rewrite_line(decode, 1, lambda line: change(line["ranks"][0]), derive=True)
    assert finding in failures(decode)


def test_a_seed_that_did_not_run_its_prefix_is_found(cells: Path):
    (folder,) = cells.glob("prefill-dense-*")
    lines = [json.loads(line) for line in (folder / "repetitions.jsonl").read_text().splitlines()]
    (number,) = [n for n, line in enumerate(lines) if line["kind"] == "point" and line["ranks"][0]["seeds"]][:1]
    rewrite_line(folder, number, lambda line: line["ranks"][0]["seeds"][0].update(computed_tokens=1), derive=True)
    assert "seed of slot 0: expected 128 tokens and one more, found 0 cached and 1 computed" in failures(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [("idle_fraction", 0.0), ("rejected_repetitions", 1), ("sessions", []), ("measuring_seconds", 1.0)],
)
def test_a_receipt_that_the_journal_does_not_give_is_found(decode: Path, field: str, value):
    rewrite(decode / "receipt.json", lambda data: data.update({field: value}))
    assert f"receipt.json {field}: expected what repetitions.jsonl holds" in failures(decode)


def test_a_receipt_without_the_journal_is_found(decode: Path):
    rewrite(decode / "receipt.json", lambda data: data["files"].pop("repetitions.jsonl"))
    assert "receipt.json files: expected what repetitions.jsonl holds" in failures(decode)


def test_another_device_is_found(decode: Path):
    rewrite_line(decode, 0, lambda s: s["ranks"][0].update(device_name="another"), derive=True)
    assert "rank 0 device: expected cpu of the accepted profile, found another" in failures(decode)


def test_warm_ups_without_a_span_are_found(decode: Path):
    rewrite_line(decode, 1, lambda line: line["ranks"][0].update(warmups=[]), derive=True)
    assert "recorded warm-up spans: expected 5, found 0" in failures(decode)


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (
            lambda s: s["ranks"][0]["engine"]["kv_cache"].update(enable_prefix_caching=False),
            "kv_cache.enable_prefix_caching",
        ),
        (lambda s: s["ranks"][0]["engine"]["scheduler"].update(async_scheduling=True), "scheduler.async_scheduling"),
        (
            lambda s: s["ranks"][0]["engine"]["scheduler"].update(max_num_seqs=99),
            "scheduler.max_num_seqs: expected 8, found 99",
        ),
        (
            lambda s: s["ranks"][0]["engine"]["graph"].update(cudagraph_mode="FULL"),
            "graph.cudagraph_mode: expected NONE",
        ),
        (lambda s: s["ranks"][0]["engine"].pop("versions"), "engine.versions: expected a mapping, found nothing"),
        (
            lambda s: s["ranks"][0]["engine"]["collectors"][1].update(enabled=True),
            "collectors: expected [{'enabled': False, 'frozen': True}, {'enabled': False, 'frozen': True}], found "
            "[{'enabled': False, 'frozen': True}, {'enabled': True, 'frozen': True}]",
        ),
        (lambda s: s["producer"].update(gc_policy="default"), "producer.gc_policy"),
        (lambda s: s["producer"].update(token_seed="54"), "producer.token_seed: expected 53, found 54"),
        (lambda s: s["producer"].update(surprise=1), "producer.surprise: expected no such field, found 1"),
    ],
)
def test_an_engine_that_is_not_the_cells_is_found(decode: Path, change, finding):
    rewrite_line(decode, 0, change, derive=True)
    assert finding in failures(decode)


def test_points_that_are_not_the_digests_are_found(decode: Path):
    rewrite(decode / "cell.json", lambda cell: cell["points"]["decode"].pop())
    assert "points_sha256: expected" in failures(decode)


def test_an_empty_journal_is_a_finding_and_no_traceback(decode: Path):
    (decode / "repetitions.jsonl").write_text("")
    renew(decode / "repetitions.jsonl")
    assert "the journal has no session" in failures(decode)


def test_prompts_that_the_specification_does_not_give_are_found(decode: Path):
    rewrite_line(decode, 1, lambda line: line["ranks"][0]["repetitions"][0].update(prompts_sha256="0" * 64))
    assert "repetition 5: prompts are not those of the specification" in failures(decode)


def test_a_missing_warm_up_is_found(decode: Path):
    rewrite_line(decode, 1, lambda line: line["ranks"][0]["warmup_ordinals"].pop())
    found = failures(decode)
    assert "warm-ups: expected 5, found 4" in found
    assert "ordinals: expected each of 0..13 once" in found


def test_a_point_without_a_line_is_found(decode: Path):
    journal = decode / "repetitions.jsonl"
    journal.write_text("\n".join(journal.read_text().splitlines()[:-1]) + "\n")
    renew(journal)
    assert "are not measured" in failures(decode)


def test_another_producer_is_found(decode: Path):
    rewrite_line(decode, 0, lambda s: s["producer"].update(vllm_package_version="0.32.1"), derive=True)
    assert "producer.vllm_package_version: expected 0.32.0, found 0.32.1" in failures(decode)


def test_a_stamp_that_contradicts_its_regime_is_found(decode: Path):
    def fake(data):
        for key in ("results", "iteration_groups"):
            data[key][0]["point"]["sample_reasons"] = ["explicit", "kvwarm_fake_fallback"]

    rewrite(decode / "benchmark.json", fake, whole=True)
    found = failures(decode)
    assert "expected stamps ['kvwarm_real_kv'], found ['kvwarm_fake_fallback']" in found


def test_a_merged_group_takes_the_retained_wall_time(prefill: Path):
    artifact = json.loads((prefill / "benchmark.json").read_text())
    walls = {}
    for row in artifact["results"]:
        raw = [fpm["wall_time"] for fpm in row["fpms"][0]["benchmark_measurement"]["raw_fpms"]]
        walls[row["point"]["benchmark_id"]] = sorted(raw[1:])[4]
    assert {group.benchmark_id: group.wall_time for group in merged(prefill).iteration_groups} == walls


def first_fpms(data):
    return [data["results"][0]["fpms"][0], data["iteration_groups"][0]["rank_results"][0]["fpms"][0]]


def in_both(path, value):
    def change(data):
        for fpm in first_fpms(data):
            *parents, last = path
            for key in parents:
                fpm = fpm[key]
            fpm[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda d: d.update(status="partial"), "status: expected complete, found partial"),
        (lambda d: d.update(valid=False), "valid: expected True, found False"),
        (lambda d: d.update(valid=1), "Expected `bool`, got `int`"),
        (lambda d: d.update(skipped_points=[1]), "skipped_points: expected [], found [1]"),
        (lambda d: d["coverage"].update(completed_points=1), "coverage.completed_points: expected"),
        (lambda d: d["coverage"].update(expected_points=True), "Expected `int`, got `bool`"),
        (lambda d: d["dp"].update(rank=1), "dp ranks: expected [0], found [1]"),
        (lambda d: d.update(dp={}), "Object missing required field `rank`"),
        (lambda d: d.update(config={}), "config.mode: expected prefill, found None"),
        (lambda d: d.update(warmup_evidence={}), "warmup_evidence.status: expected recorded, found None"),
        (lambda d: d["timing"].update(measured_iteration_seconds=1e-9), "measured_iteration_seconds: expected"),
        (lambda d: d["timing"].update(benchmark_elapsed_seconds=1e-9), "benchmark_elapsed_seconds: expected at least"),
        (lambda d: d.update(surprise=1), "unknown field `surprise`"),
        (lambda d: d["results"].pop(), "number of results: expected"),
        (lambda d: d["results"][0]["point"].update(batch_size=7), "local result differs from synchronized group"),
        (lambda d: d["iteration_groups"][0].update(benchmark_id=9), "benchmark_id: expected 1.."),
        (lambda d: d["iteration_groups"][0].update(complete=False), "iteration group is incomplete"),
        (in_both(["wall_time"], 1e-9), "retained wall time contradicts the raw reduction inputs: wall_time: expected"),
        (in_both(["wall_time"], -1.0), "wall_time rank=0 benchmark_id=1: expected a positive number"),
        (in_both(["counter_id"], 7), "measurement identity mismatch"),
        (
            in_both(["scheduled_requests", "sum_prefill_tokens"], 1),
            "scheduled_requests rank=0 benchmark_id=1: expected (1, ",
        ),
        (in_both(["benchmark_measurement", "estimate", "method"], "last_step"), "reduction: expected"),
        (in_both(["benchmark_measurement", "estimate", "raw_sample_indices"], [0, 1]), "reduction: expected"),
        (in_both(["benchmark_measurement", "expected_internal_samples"], 9), "raw samples: expected 1..9, found 10"),
        (
            in_both(["benchmark_measurement", "raw_fpms", 2, "benchmark_sample", "sample_index"], 5),
            "sample_index: expected 2, found 5",
        ),
        (
            in_both(["benchmark_measurement", "raw_fpms", 2, "benchmark_sample", "forward_index"], 0),
            "forward_index: expected more than",
        ),
        (
            in_both(["benchmark_measurement", "raw_fpms", 2, "wall_time"], 9.0),
            "raw sample 2 contradicts its timing interval: wall_time: expected",
        ),
        (
            in_both(["benchmark_measurement", "raw_fpms", 2, "wall_time"], -1.0),
            "raw sample 2 wall_time: expected a pos",
        ),
        (
            in_both(["benchmark_measurement", "raw_fpms", 7, "scheduled_requests", "sum_prefill_tokens"], 1),
            "raw sample 7 scheduled_requests: expected the retained ones",
        ),
        (in_both(["benchmark_measurement", "raw_fpms"], []), "raw samples: expected 1..10, found 0"),
    ],
)
def test_a_rank_artifact_that_contradicts_itself_is_not_merged(prefill: Path, change, line):
    rewrite(prefill / "benchmark.json", change, whole=True)
    with pytest.raises(Refusal) as refusal:
        merged(prefill)
    assert line in str(refusal.value)
    assert str(refusal.value).count("\n") == 0


def test_nan_is_refused(prefill: Path):
    file = prefill / "benchmark.json"
    text = re.sub(r'("measured_iteration_seconds": )[^,\n]+', r"\1NaN", file.read_text(), count=1)
    assert "NaN" in text
    file.write_text(text)
    renew(file)
    with pytest.raises(Refusal, match="rank artifact: expected a RankArtifact"):
        merged(prefill)


def plan_of(cells: Path) -> Path:
    (file,) = cells.parent.glob("plan-*/plan.json")
    return file


def test_readiness_of_the_whole(cells: Path):
    readiness = assess(plan_of(cells))
    assert (readiness.status, readiness.blockers, readiness.scope) == ("ready", (), "smoke")
    assert len(readiness.cells) == 6


def test_a_missing_cell_is_incomplete(cells: Path, decode: Path):
    (decode / "evidence.json").unlink()
    readiness = assess(plan_of(cells))
    assert readiness.status == "incomplete"
    assert readiness.blockers == (f"{decode.name}: evidence.json missing",)


def test_failed_evidence_blocks_with_its_words(cells: Path, decode: Path):
    rewrite(decode / "evidence.json", lambda data: data.update(state="failed", failures=["too good"]))
    assert assess(plan_of(cells)).blockers == (f"{decode.name}: too good",)


def test_evidence_of_another_merged_file_blocks(cells: Path, decode: Path):
    rewrite(decode / "merged.json", lambda data: data.update(run_id="0" * 32))
    readiness = assess(plan_of(cells))
    assert readiness.status == "blocked"
    assert "merged_sha256: expected" in readiness.blockers[0]


def test_evidence_of_another_cell_blocks(cells: Path, decode: Path):
    rewrite(decode / "evidence.json", lambda data: data.update(cell_digest="0" * 64))
    plan = read_model(Plan, plan_of(cells), "plan")
    expected = next(cell.digest for cell in plan.cells if cell.name == decode.name)
    assert f"{decode.name} cell_digest: expected {expected}" in assess(plan_of(cells)).blockers[0]
