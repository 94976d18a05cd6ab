"""Two runs are comparable by what ran, on what and after what, point by point; how long it took says nothing."""

from pathlib import Path

import msgspec
import pytest
from conftest import cell_folder
from repeats import document, measured_cell, measurements, part_of, run_of, with_walls

from producer.planning import bounded
from schemas.canonical import read_model
from schemas.plan import FrozenCell

from compare_cells import POINT_FIELDS, RUN_FIELDS, CellRun, compare
from repeatability import read_run

POINTS = 3


def compared(change=None, point: int = 0, reference=None, **identity):
    """Result and reasons of a point of a second launch, changed, against a first one."""
    first, second = document(1, reference), document(2, change)
    cell = measured_cell(document())
    candidate = run_of(second, measured_cell(document(), **identity))
    found = compare(run_of(first, cell), candidate)
    assert len(found) == POINTS
    return found[point]


def at_point(point: int, edit):
    """A change of both copies of a point's measurement."""

    def change(made) -> None:
        for measurement in measurements(made, point):
            edit(measurement)

    return change


def graph(**fields):
    def edit(measurement) -> None:
        measurement["raw_fpms"][2]["benchmark_sample"]["cudagraph"] |= fields

    return edit


def test_the_table_is_the_one_of_the_specification():
    assert [field.name for field in (*RUN_FIELDS, *POINT_FIELDS)] == [
        "run id",
        "cell digest",
        "backend version",
        "async_scheduling",
        "engine",
        "measurement protocol",
        "ranks",
        "point",
        "point_key",
        "kv_seed_regime",
        "prompts",
        "expected samples",
        "estimate",
        "graph dispatch",
        "preparation",
        "warm-up records before",
    ]


def test_a_second_launch_of_the_same_cell_is_comparable_at_every_point():
    for point in range(POINTS):
        assert compared(point=point) == ("comparable", ())


def test_the_same_launch_is_no_second_one():
    run = run_of(document(1))
    assert [found.result for found in compare(run, run)] == ["mismatch"] * POINTS
    assert compare(run, run)[0].reasons == (f"run id: {1:032x} in both",)


def slower(made) -> None:
    with_walls(9.0, 8.0, 7.0)(made)
    for point in range(POINTS):
        for measurement in measurements(made, point):
            for raw in measurement["raw_fpms"]:
                raw["wall_time"] *= 100
                raw["benchmark_sample"]["timing"] |= {"start_monotonic": 1.0, "end_monotonic": 2.0}
    made["timing"] |= {"started_at": "2030-01-01T00:00:00Z", "benchmark_elapsed_seconds": 1e6}


def test_latency_is_never_looked_at():
    assert compared(slower) == ("comparable", ())


def words_about_evidence(made) -> None:
    made["measurement_protocol"]["unobserved"] = ["power_state"]
    made["measurement_protocol"]["execution_evidence"]["warmup_scope"] = "another"


def test_what_an_artifact_says_of_its_evidence_does_not_matter():
    assert compared(words_about_evidence) == ("comparable", ())


def engine(block: str, **values):
    return lambda made: made["engine"][block].update(values)


RUN_MISMATCHES = {
    "backend version": (engine("versions", vllm="0.33.0"), "backend version: reference 0.32.0, candidate 0.33.0"),
    "asynchronous": (engine("scheduler", async_scheduling=True), "async_scheduling: reference false, candidate true"),
    "engine": (engine("scheduler", max_num_seqs=17), "engine.scheduler.max_num_seqs: reference 16, candidate 17"),
    "an integer for a flag": (
        engine("parallel", enable_eplb=0),
        "engine.parallel.enable_eplb: reference false, candidate 0",
    ),
    "a setting that is not there": (
        lambda made: made["engine"]["kv_cache"].pop("cache_dtype"),
        "engine.kv_cache.cache_dtype: reference auto, candidate absent",
    ),
    "protocol": (
        lambda made: made["measurement_protocol"].update(content_seed="7"),
        "measurement protocol.content_seed: reference 0, candidate 7",
    ),
}


@pytest.mark.parametrize("name", RUN_MISMATCHES)
def test_what_the_run_must_agree_in_holds_for_every_point(name: str):
    change, reason = RUN_MISMATCHES[name]
    for point in range(POINTS):
        found = compared(change, point)
        assert found.result == "mismatch"
        assert reason in found.reasons


def test_ranks_must_be_the_same():
    run = run_of(document(1))
    other = run_of(document(2))
    ranks = msgspec.structs.replace(other.merged, dp=other.merged.dp | {"ranks": [0, 1]})
    found = compare(run, other._replace(merged=ranks))[0]
    assert found == ("mismatch", ("ranks: reference [0], candidate [0,1]",))


def other_point(made) -> None:
    for each in (made["results"][1], made["iteration_groups"][1]):
        each["point"]["batch_size"] += 1


def other_regime(made) -> None:
    made["results"][1]["kv_seed_regime"] = "real_kv"


def one_warmup_more_tokens(made) -> None:
    made["warmup_evidence"]["records"][0]["first_scheduled_requests"]["sum_prefill_tokens"] += 1


def moved_warmups(made) -> None:
    for record in made["warmup_evidence"]["records"]:
        record["forward_index_start"] += 3
        record["forward_index_end"] += 3


POINT_MISMATCHES = {
    "point": (other_point, "point.batch_size: reference "),
    "point key": (at_point(1, lambda found: found.update(point_key="0" * 64)), "point_key[0]: reference "),
    "regime": (other_regime, "kv_seed_regime[0]: reference skip:dense_model_content_insensitive, candidate real_kv"),
    "prompts": (
        at_point(1, lambda found: found["prompts"]["requests"][0].update(sha256="0" * 64)),
        "prompts[0].requests[0].sha256: reference ",
    ),
    "expected samples": (
        at_point(1, lambda found: found.update(expected_internal_samples=5)),
        "expected samples[0]: reference 4, candidate 5",
    ),
    "method": (
        at_point(1, lambda found: found["estimate"].update(method="last_step")),
        "estimate[0].method: reference adjacent_upper_median, candidate last_step",
    ),
    "samples of the estimate": (
        at_point(1, lambda found: found["estimate"].update(raw_sample_indices=[1, 2])),
        "estimate[0].raw_sample_indices: reference [1,2,3], candidate [1,2]",
    ),
    "graph mode": (at_point(1, graph(runtime_mode="FULL")), "graph dispatch[0][2].runtime_mode: reference NONE, "),
    "padding": (at_point(1, graph(num_paddings=3)), "graph dispatch[0][2].num_paddings: reference 0, candidate 3"),
    "points before": (
        at_point(1, lambda found: found["preparation"].update(completed_points_before=2)),
        "preparation[0].completed_points_before: reference 1, candidate 2",
    ),
    "warm-ups before": (
        at_point(1, lambda found: found["preparation"].update(warmup_records_before=0)),
        "warm-up records before[0]: reference ",
    ),
}


@pytest.mark.parametrize("name", POINT_MISMATCHES)
def test_what_a_point_must_agree_in_holds_for_that_point_alone(name: str):
    change, reason = POINT_MISMATCHES[name]
    found = compared(change, 1)
    assert found.result == "mismatch"
    assert [each.startswith(reason) for each in found.reasons] == [True], found.reasons
    assert compared(change, 0) == compared(change, 2) == ("comparable", ())


def test_a_warm_up_that_ran_otherwise_is_part_of_every_later_point():
    for point in range(POINTS):
        found = compared(one_warmup_more_tokens, point)
        assert found.result == "mismatch"
        assert found.reasons[0].startswith("warm-up records before[0]: reference ")


def test_where_the_warm_ups_stand_among_the_forwards_does_not_matter():
    assert compared(moved_warmups, 2) == ("comparable", ())


def repetitions(*numbers: int):
    """The samples of point 1 as these repetitions."""

    def edit(measurement) -> None:
        for raw, number in zip(measurement["raw_fpms"], numbers, strict=True):
            raw["benchmark_sample"]["repetition"] = number

    return at_point(1, edit)


def test_a_rejected_repetition_gives_all_later_ones_other_prompts():
    """The recorded prompts are those of the second sample: the places tell of the others."""
    found = compared(repetitions(5, 6, 7, 9), 1, reference=repetitions(5, 6, 7, 8))
    assert found == ("mismatch", ("prompts[0].repetitions[3]: reference 8, candidate 9",))


def without(*path: str):
    def change(made) -> None:
        inner = made
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]

    return change


def unavailable_prompts(measurement) -> None:
    measurement["prompts"] = {"status": "unavailable", "requests": [], "sha256": None}


def no_measurement(made) -> None:
    for each in (made["results"][0], made["iteration_groups"][0]["rank_results"][0]):
        del each["fpms"][0]["benchmark_measurement"]


UNOBSERVED = {
    "status": "unavailable",
    "runtime_mode": None,
    "num_unpadded_tokens": None,
    "num_padded_tokens": None,
    "num_paddings": None,
}

ENGINE_FIELDS = {"backend version", "async_scheduling", "engine"}
WARMUPS = "warm-up records before"
RUN_GAPS = {
    "no engine": (without("engine"), ENGINE_FIELDS),
    "a broken engine block": (lambda made: made["engine"].update(capture_error="x"), ENGINE_FIELDS),
    "no protocol": (without("measurement_protocol"), {"measurement protocol"}),
    "no warm-up records": (
        lambda made: made.update(warmup_evidence={"status": "unavailable", "records": []}),
        {WARMUPS},
    ),
    "no warm-up evidence": (without("warmup_evidence"), {WARMUPS}),
}
POINT_GAPS = {
    "no prompts": (at_point(0, unavailable_prompts), {"prompts"}),
    "no dispatch": (at_point(0, graph(**UNOBSERVED)), {"graph dispatch"}),
    "no regime": (lambda made: made["results"][0].update(kv_seed_regime=None), {"kv_seed_regime"}),
    "no number of warm-ups": (
        at_point(0, lambda found: found["preparation"].update(warmup_records_before=None)),
        {WARMUPS},
    ),
    "more warm-ups than recorded": (
        at_point(0, lambda found: found["preparation"].update(warmup_records_before=999)),
        {WARMUPS},
    ),
    "no measurement": (
        no_measurement,
        {"point_key", "prompts", "expected samples", "estimate", "graph dispatch", "preparation", WARMUPS},
    ),
}


@pytest.mark.parametrize("name", RUN_GAPS | POINT_GAPS)
def test_what_one_run_does_not_record_is_not_established(name: str):
    change, fields = (RUN_GAPS | POINT_GAPS)[name]
    for silent, found in (("candidate", compared(change)), ("reference", compared(None, 0, change))):
        assert found.result == "unestablished"
        assert sorted(found.reasons) == sorted(f"{field}: not recorded in {silent}" for field in fields)
    assert compared(change, 1).result == ("unestablished" if name in RUN_GAPS else "comparable")


def test_an_engine_without_its_version_is_another_one_than_with_it():
    found = compared(without("engine", "versions"))
    assert found.result == "mismatch"
    assert "backend version: not recorded in candidate" in found.reasons
    neither = compared(without("engine", "versions"), 0, without("engine", "versions"))
    assert neither == ("unestablished", ("backend version: not recorded in reference and candidate",))


def test_what_neither_records_is_not_established_either():
    found = compared(without("measurement_protocol"), 0, without("measurement_protocol"))
    assert found == ("unestablished", ("measurement protocol: not recorded in reference and candidate",))


def test_a_mismatch_beats_a_gap():
    def both(made) -> None:
        del made["measurement_protocol"]
        made["engine"]["scheduler"]["max_num_seqs"] = 17

    found = compared(both)
    assert found.result == "mismatch"
    assert len(found.reasons) == 2


def test_runs_of_two_cells_are_never_comparable():
    found = compared(environment={"OMP_NUM_THREADS": "2"})
    assert found.result == "unestablished"
    (reason,) = found.reasons
    assert reason.startswith("cell digest: reference ")


def test_two_cells_that_contradict_each_other_are_a_mismatch():
    found = compared(engine("scheduler", max_num_seqs=17), environment={"OMP_NUM_THREADS": "2"})
    assert found.result == "mismatch"


def test_a_part_of_a_cell_is_compared_by_what_its_points_are():
    whole = run_of(document(1))
    part = run_of(part_of(document(2), 0, 2), bounded(whole.cell, 2))
    assert part.cell.points.decode == (whole.cell.points.decode[0], whole.cell.points.decode[2])
    first, last = compare(whole, part)
    assert (first.result, last.result) == ("unestablished", "unestablished")
    assert any(reason.startswith("preparation[0].completed_points_before: reference 2") for reason in last.reasons)
    assert not [reason for reason in last.reasons if reason.startswith(("point", "prompts"))]
    missing = compare(part, whole)[1]
    assert missing.result == "unestablished"
    assert "point: not in reference" in missing.reasons


def real_run(folder: Path) -> CellRun:
    found = read_run(folder, read_model(FrozenCell, folder / "cell.json", "frozen cell").digest)
    assert isinstance(found, CellRun)
    return found


@pytest.mark.demo
def test_cells_that_the_engine_measured_record_every_field(demo: Path, parallel: Path):
    folders = [folder for campaign in (demo, parallel) for folder in sorted((campaign / "cells").iterdir())]
    assert len(folders) == 10
    for folder in folders:
        run = real_run(folder)
        again = run._replace(merged=msgspec.structs.replace(run.merged, run_id="0" * 32))
        assert set(compare(run, again)) == {("comparable", ())}


@pytest.mark.demo
@pytest.mark.parametrize("prefix", ["prefill-dense", "decode-sliding", "prefill-hybrid"])
def test_a_smoke_run_and_a_whole_one_agree_in_all_but_their_cell(demo: Path, smoke: Path, prefix: str):
    """Two launches of the engine: what is the same in both is what it says of itself, not what we copied."""
    (few,) = (smoke / "cells").glob(f"{prefix}-*")
    of_cell = ("cell digest: ", "preparation[0]", "warm-up records before[0]: ")
    found = compare(real_run(cell_folder(demo, prefix)), real_run(few))
    assert len(found) >= 2
    for point in found:
        assert point.result == "unestablished"
        assert all(reason.startswith(of_cell) for reason in point.reasons), point.reasons
