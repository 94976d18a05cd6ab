"""What the values of repeats say of the published ones: only comparable evidence counts."""

import subprocess
import sys
from fractions import Fraction
from itertools import pairwise
from math import isclose
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from native_samples import cell_of
from repeats import document, measured_cell, part_of, run_of, with_walls, write_plan, write_run

from producer.planning import bounded
from schemas.canonical import read_model, write_model
from schemas.errors import Refusal
from schemas.plan import FrozenCell, Plan
from schemas.points import DecodePoint, PointManifest
from schemas.policy import CollectionPolicy, RepeatabilityPolicy, read_policy
from schemas.repeatability import Repeatability

from compare_cells import ComparedPoint
from repeatability import Sample, assess, judge_point, spread, verdict_lines, worst


def samples(*values: float) -> list[Sample]:
    return [Sample(number, "comparable", (), value) for number, value in enumerate(values, 1)]


def policy(**fields) -> RepeatabilityPolicy:
    return RepeatabilityPolicy(**{"samples": 4} | fields)


# Statistics


def test_the_spread_is_the_one_over_n_minus_1():
    """(10 + 12 + 14) / 3 = 12; ((-2)^2 + 0 + 2^2) / (3 - 1) = 4, and its root is 2."""
    assert spread([10.0, 12.0, 14.0]) == (12.0, 2.0, 1 / 6)
    # Mean 3; (4 + 1 + 1 + 4) / 3 = 10 / 3; over n it would be 2.5.
    found = spread([1.0, 2.0, 4.0, 5.0])
    assert (found.mean, found.stdev) == (3.0, pytest.approx(1.8257418583505538))
    assert found.cv == pytest.approx(0.6085806194501846)


def test_one_value_has_no_spread_and_none_has_nothing():
    assert spread([7.0]) == (7.0, None, None)
    assert spread([]) is None


TIMES = st.lists(st.floats(min_value=1e-3, max_value=1e5), min_size=2, max_size=30)


@given(TIMES)
def test_the_spread_is_that_of_exact_arithmetic(values: list[float]):
    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    variance = sum((value - mean) ** 2 for value in exact) / (len(exact) - 1)
    found = spread(values)
    assert isclose(found.mean, float(mean), rel_tol=1e-12)
    assert isclose(found.stdev, float(variance) ** 0.5, rel_tol=1e-9, abs_tol=1e-12)
    assert isclose(found.cv, float(variance) ** 0.5 / float(mean), rel_tol=1e-9, abs_tol=1e-12)


@given(TIMES, st.randoms())
def test_order_and_unit_of_the_values_do_not_matter_to_the_cv(values: list[float], choose):
    mixed = [value * 1024 for value in values]
    choose.shuffle(mixed)
    assert isclose(spread(mixed).cv, spread(values).cv, rel_tol=1e-9, abs_tol=1e-15)


# One point


def test_values_that_come_out_again_pass():
    point = judge_point(policy(), 7, 100.0, samples(99.0, 100.0, 101.0, 102.0))
    assert (point.benchmark_id, point.outcome, point.reasons) == (7, "passed", ())
    assert point.samples_ms == {"1": 99.0, "2": 100.0, "3": 101.0, "4": 102.0}
    assert (point.comparable_samples, point.mean_ms) == (4, 100.5)
    assert point.stdev_ms == pytest.approx((5 / 3) ** 0.5)  # (2.25 + 0.25 + 0.25 + 2.25) / 3
    assert point.cv == pytest.approx((5 / 3) ** 0.5 / 100.5)
    assert point.source_relative_difference == pytest.approx(0.005)


def test_values_far_apart_are_unstable():
    point = judge_point(policy(), 1, 100.0, samples(90.0, 110.0, 90.0, 110.0))
    assert point.outcome == "unstable"
    assert point.reasons == ("cv 0.1155 of 4 samples, above 0.05",)  # (4 x 10^2 / 3)^0.5 / 100


@pytest.mark.parametrize("value", [94.0, 106.0])
def test_values_far_from_the_source_are_unstable_on_both_sides(value: float):
    point = judge_point(policy(), 1, 100.0, samples(value, value, value, value))
    assert point.outcome == "unstable"
    away = f"{(value - 100) / 100:+.4f} (mean {value:.4f} ms, source 100.0000 ms)"
    assert point.reasons == (f"source relative difference {away}, beyond 0.05",)


def test_a_value_at_a_limit_is_within_it():
    # Exact in binary: mean 8, stdev (2 x 2^2 / 2)^0.5 = 2, cv 0.25; source 6.4 -> 0.25 of it is 1.6.
    at = {"samples": 3, "max_cv": 0.25, "max_source_relative_difference": 0.25}
    assert judge_point(policy(**at), 1, 8.0, samples(6.0, 8.0, 10.0)).outcome == "passed"
    assert judge_point(policy(**at), 1, 4.0, samples(5.0, 5.0, 5.0)).outcome == "passed"
    assert judge_point(policy(**at), 1, 8.0, samples(5.9, 8.0, 10.1)).outcome == "unstable"
    assert judge_point(policy(**at), 1, 4.0, samples(5.1, 5.1, 5.1)).outcome == "unstable"


@pytest.mark.parametrize("result", ["mismatch", "unestablished", "incomplete"])
def test_a_sample_that_is_no_evidence_is_the_points_outcome_and_no_value(result):
    broken = [*samples(90.0, 110.0, 90.0), Sample(4, result, ("engine: another",), 1e6)]
    point = judge_point(policy(), 1, 100.0, broken)
    # Three of four values say nothing yet of the spread, however far apart.
    assert (point.outcome, point.reasons) == (result, ("repeat 4 engine: another",))
    assert (point.comparable_samples, point.mean_ms) == (3, pytest.approx(290 / 3))
    assert "4" not in point.samples_ms


def test_without_a_comparable_sample_there_are_no_figures():
    point = judge_point(policy(), 1, 100.0, [Sample(number, "incomplete", ("x",)) for number in range(1, 5)])
    assert (point.outcome, point.comparable_samples) == ("incomplete", 0)
    assert (point.mean_ms, point.stdev_ms, point.cv, point.source_relative_difference) == (None,) * 4


def test_the_worst_outcome_is_the_wholes():
    order = ["mismatch", "unstable", "unestablished", "incomplete", "passed"]
    for place, outcome in enumerate(order):
        assert worst(order[place:]) == worst(reversed(order[place:])) == outcome
    assert worst([]) == "incomplete"


def test_a_source_of_another_cell_is_not_established_by_equal_values():
    equal, other_cell = samples(100.0, 100.0, 100.0, 100.0), ComparedPoint("unestablished", ("cell digest: another",))
    point = judge_point(policy(), 1, 100.0, equal, other_cell)
    assert (point.outcome, point.reasons) == ("unestablished", ("source: cell digest: another",))
    assert judge_point(policy(max_source_relative_difference=None), 1, 100.0, equal, other_cell).outcome == "passed"
    # Nor does a distance to it count; that the repeats contradict it does, and so does their own spread.
    far = samples(200.0, 200.0, 200.0, 200.0)
    assert judge_point(policy(), 1, 100.0, far, other_cell).outcome == "unestablished"
    contradiction = ComparedPoint("mismatch", ("engine: another",))
    for limit in (None, 0.05):
        asked = policy(max_source_relative_difference=limit)
        assert judge_point(asked, 1, 100.0, equal, contradiction).outcome == "mismatch"
    apart = judge_point(policy(), 1, 100.0, samples(90.0, 110.0, 90.0, 110.0), other_cell)
    assert apart.outcome == "unstable"


# The policy


def policy_file(folder: Path, **repeatability) -> Path:
    file = folder / "policy.yaml"
    content = {"schema_name": "passgrid-collection-policy/v1", "repeatability": repeatability}
    file.write_text(yaml.safe_dump(content))
    return file


def test_the_shipped_policy_says_its_defaults():
    shipped = read_policy(ROOT / "config/policies/collection.yaml")
    assert shipped == CollectionPolicy(schema_name="passgrid-collection-policy/v1")
    assert shipped.repeatability.model_dump() == {
        "comparison_mode": "full_grid",
        "samples": 5,
        "max_points_per_cell": 12,
        "max_cv": 0.05,
        "max_source_relative_difference": 0.05,
    }


@pytest.mark.parametrize(
    ("field", "value", "refusal"),
    [
        ("samples", 1, "repeatability.samples: expected greater than or equal to 2, found 1"),
        ("samples", True, "repeatability.samples: expected a valid integer, found True"),
        ("samples", 5.0, "repeatability.samples: expected a valid integer, found 5.0"),
        ("max_points_per_cell", 1, "repeatability.max_points_per_cell: expected greater than or equal to 2, found 1"),
        ("max_cv", 0, "repeatability.max_cv: expected greater than 0, found 0"),
        ("max_cv", 5, "repeatability.max_cv: expected less than 1, found 5"),
        ("max_cv", None, "repeatability.max_cv: expected a valid number, found None"),
        ("max_cv", "0.05", "repeatability.max_cv: expected a valid number, found '0.05'"),
        ("max_source_relative_difference", float("nan"), "CollectionPolicy: expected JSON values"),
        ("comparison_mode", "smoke", "repeatability.comparison_mode: expected 'full_grid' or 'bounded'"),
        ("max_attempts_per_sample", 2, "repeatability.max_attempts_per_sample: expected no such key, found 2"),
    ],
)
def test_a_policy_that_says_something_else_is_refused(tmp_path: Path, field: str, value, refusal: str):
    file = policy_file(tmp_path, **{field: value})
    with pytest.raises(Refusal) as found:
        read_policy(file)
    assert str(found.value).startswith(refusal)
    assert str(found.value).endswith(f": {file}")


def test_a_policy_of_another_schema_is_refused(tmp_path: Path):
    file = tmp_path / "policy.yaml"
    file.write_text("schema_name: passgrid-collection-policy/v2\n")
    with pytest.raises(Refusal, match="schema_name: expected 'passgrid-collection-policy/v1'"):
        read_policy(file)


# What a bounded repeat measures


def test_a_bounded_cell_has_points_from_all_over_its_list():
    points = tuple(DecodePoint(batch_size=1, total_kv_read_tokens=tokens) for tokens in range(1, 101))
    manifest = PointManifest(prefill=(), decode=points)
    cell = measured_cell(document()).model_copy(update={"points": manifest})
    few = bounded(cell, 12)
    places = [point.total_kv_read_tokens for point in few.points.decode]
    assert (places[0], places[-1], len(places)) == (1, 100, 12)
    assert {after - before for before, after in pairwise(places)} == {9}  # 99 / 11
    assert few == bounded(cell, 12)
    assert bounded(cell, 2).points.decode == (points[0], points[-1])


def test_a_bounded_cell_is_another_cell_and_says_so_by_its_digest():
    cell = measured_cell(document())
    few = bounded(cell, 2)
    assert few.digest != cell.digest
    differing = {
        field
        for field in type(cell.identity).model_fields
        if getattr(few.identity, field) != getattr(cell.identity, field)
    }
    assert differing == {"points_sha256"}
    assert bounded(cell, 3) == bounded(cell, 99) == cell  # it has three points


# A campaign's folder


class Campaign:
    """A campaign of one cell, below a folder, with three repeats that agree."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cell = measured_cell(document())
        self.plan = write_plan(root, self.cell)
        write_run(root / "cells", run_of(document(100, with_walls(0.010, 0.020, 0.030)), self.cell))
        for number in (1, 2, 3):
            self.repeat(number)

    def repeat(self, number: int, change=None, failures: tuple[str, ...] = (), run: int | None = None) -> Path:
        """Write repeat `number`: its times are `number` part in a thousand longer than the source's."""

        def changed(made) -> None:
            with_walls(*(wall * (1 + number / 1000) for wall in (0.010, 0.020, 0.030)))(made)
            if change is not None:
                change(made)

        made = document(number if run is None else run, changed)
        return write_run(self.root / f"repeat{number}" / "cells", run_of(made, self.cell), failures)

    def verdict(self, **policy_fields) -> Repeatability:
        return assess(self.plan, policy_file(self.root, **{"samples": 3} | policy_fields))


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    return Campaign(tmp_path)


def test_repeats_that_agree_pass(campaign: Campaign):
    verdict = campaign.verdict()
    assert (verdict.outcome, verdict.counts) == ("passed", {"passed": 3})
    (cell,) = verdict.cells
    assert (cell.outcome, cell.counts, cell.repeated_cell) == ("passed", {"passed": 3}, campaign.cell.name)
    for number, point in enumerate(cell.points, 1):
        source = number * 10.0
        assert (point.benchmark_id, point.source_ms) == (number, pytest.approx(source))
        assert point.mean_ms == pytest.approx(source * 1.002)
        assert point.stdev_ms == pytest.approx(source * 0.001)  # 0.001, 0, 0.001 around the mean, over 2
        assert point.source_relative_difference == pytest.approx(0.002)
    assert list(verdict_lines(verdict)) == [
        f"repeatability of plan {verdict.plan_sha256[:16]}: passed (full_grid, 3 samples)",
        f"  {campaign.cell.name}: passed (3 passed)",
    ]


def test_a_verdict_reads_back_as_it_was(campaign: Campaign):
    file = campaign.root / "repeatability.json"
    write_model(file, campaign.verdict())
    assert read_model(Repeatability, file, "verdict") == campaign.verdict()


def test_one_slow_point_of_one_repeat_is_unstable_at_that_point(campaign: Campaign):
    campaign.repeat(2, with_walls(0.010, 0.040, 0.030))
    (cell,) = campaign.verdict().cells
    assert [point.outcome for point in cell.points] == ["passed", "unstable", "passed"]
    assert (cell.outcome, cell.counts) == ("unstable", {"unstable": 1, "passed": 2})
    assert campaign.verdict(max_cv=0.9, max_source_relative_difference=0.9).outcome == "passed"


def test_a_repeat_that_ran_otherwise_is_a_mismatch_and_its_value_does_not_count(campaign: Campaign):
    campaign.repeat(3, lambda made: made["engine"]["scheduler"].update(max_num_seqs=17))
    (cell,) = campaign.verdict().cells
    assert cell.counts == {"mismatch": 3}
    assert cell.points[0].reasons == ("repeat 3 engine.scheduler.max_num_seqs: reference 16, candidate 17",)
    assert cell.points[0].samples_ms.keys() == {"1", "2"}


def test_a_repeat_that_does_not_say_what_it_ran_is_not_established(campaign: Campaign):
    campaign.repeat(1, lambda made: made.pop("measurement_protocol"))
    verdict = campaign.verdict()
    assert (verdict.outcome, verdict.counts) == ("unestablished", {"unestablished": 3})


@pytest.mark.parametrize("name", ["cell.json", "merged.json", "evidence.json"])
def test_a_repeat_without_all_of_its_files_is_incomplete(campaign: Campaign, name: str):
    (campaign.root / "repeat2" / "cells" / campaign.cell.name / name).unlink()
    verdict = campaign.verdict()
    assert (verdict.outcome, verdict.counts) == ("incomplete", {"incomplete": 3})
    assert verdict.cells[0].points[0].reasons == (f"repeat 2 {name} missing",)


def test_more_samples_than_repeats_are_incomplete_and_fewer_are_enough(campaign: Campaign):
    assert campaign.verdict(samples=4).outcome == "incomplete"
    assert campaign.verdict(samples=2).outcome == "passed"


def test_a_copied_repeat_is_no_launch_of_its_own(campaign: Campaign):
    campaign.repeat(3, run=2)
    (cell,) = campaign.verdict().cells
    assert cell.outcome == "mismatch"
    assert cell.points[0].reasons == (f"repeat 3 run id: {2:032x} is the launch of repeat 2",)
    campaign.repeat(3, run=100)
    assert campaign.verdict().cells[0].points[0].reasons == (
        f"repeat 3 run id: {100:032x} is the launch of the source",
    )


def test_a_repeat_whose_own_evidence_failed_contradicts(campaign: Campaign):
    campaign.repeat(1, failures=("sha256 of benchmark.json: another", "and more"))
    verdict = campaign.verdict()
    assert verdict.outcome == "mismatch"
    reason = "repeat 1 evidence: failed: sha256 of benchmark.json: another"
    assert verdict.cells[0].points[0].reasons == (reason,)


def test_a_repeat_that_was_edited_after_its_evidence_contradicts(campaign: Campaign):
    folder = campaign.root / "repeat1" / "cells" / campaign.cell.name
    edited = (folder / "merged.json").read_text().replace('"wall_time":0.01001', '"wall_time":0.00901')
    assert edited != (folder / "merged.json").read_text()
    (folder / "merged.json").write_text(edited)
    reason = campaign.verdict().cells[0].points[0].reasons[0]
    assert reason.startswith("repeat 1 merged_sha256: expected ")


def test_a_repeat_of_another_cell_contradicts(campaign: Campaign):
    other = measured_cell(document(), environment={"OMP_NUM_THREADS": "2"})
    folder = write_run(campaign.root / "elsewhere", run_of(document(9), other))
    target = campaign.root / "repeat1" / "cells" / campaign.cell.name
    for file in target.iterdir():
        file.write_bytes((folder / file.name).read_bytes())
    reason = campaign.verdict().cells[0].points[0].reasons[0]
    assert reason.startswith(f"repeat 1 cell digest: expected {campaign.cell.digest[:16]}, found {other.digest[:16]}")


def test_a_source_that_is_not_there_is_incomplete(campaign: Campaign):
    (campaign.root / "cells" / campaign.cell.name / "merged.json").unlink()
    verdict = campaign.verdict()
    assert (verdict.outcome, verdict.counts) == ("incomplete", {})
    assert verdict.cells[0].reasons == ("source merged.json missing",)


def test_a_smoke_plan_is_no_source(campaign: Campaign):
    plan = read_model(Plan, campaign.plan, "plan")
    write_model(campaign.plan, plan.model_copy(update={"scope": "smoke"}))
    with pytest.raises(Refusal, match="scope: expected formal"):
        campaign.verdict()


def test_an_imported_cell_is_not_established(tmp_path: Path):
    cell = cell_of(document())
    assert cell.identity.contract == "dynamo"
    plan = write_plan(tmp_path, cell)
    write_run(tmp_path / "cells", run_of(document(1), cell))
    verdict = assess(plan, policy_file(tmp_path))
    assert verdict.outcome == "unestablished"
    assert verdict.cells[0].reasons == ("source imported: who measured it can measure it again",)


def bounded_repeats(campaign: Campaign, numbers=(1, 2, 3)) -> FrozenCell:
    few = bounded(campaign.cell, 2)
    for number in numbers:
        made = part_of(document(number, with_walls(0.010 + number / 1e5, 0.0, 0.030)), 0, 2)
        write_run(campaign.root / f"repeat{number}-points2" / "cells", run_of(made, few))
    return few


BOUNDED = {"comparison_mode": "bounded", "max_points_per_cell": 2}


def test_bounded_repeats_are_compared_with_one_another(campaign: Campaign):
    few = bounded_repeats(campaign)
    (cell,) = campaign.verdict(**BOUNDED).cells
    assert cell.repeated_cell == few.name
    assert [point.benchmark_id for point in cell.points] == [1, 3]  # places in the source's list
    assert [point.source_ms for point in cell.points] == pytest.approx([10.0, 30.0])
    assert [point.comparable_samples for point in cell.points] == [3, 3]
    assert cell.points[0].mean_ms == pytest.approx(10.02)
    assert cell.points[0].source_relative_difference == pytest.approx(0.002)
    # Their distance to the source is that of another cell: told, and not established.
    assert cell.counts == {"unestablished": 2}
    assert cell.points[0].reasons[0].startswith("source: cell digest: reference ")


def test_bounded_repeats_pass_when_only_their_spread_is_asked_for(campaign: Campaign):
    bounded_repeats(campaign)
    spread_alone = BOUNDED | {"max_source_relative_difference": None}
    assert campaign.verdict(**spread_alone).outcome == "passed"
    assert campaign.verdict(**spread_alone, max_cv=1e-6).outcome == "unstable"


def test_a_missing_first_bounded_repeat_leaves_the_others_comparable(campaign: Campaign):
    bounded_repeats(campaign, (2, 3))
    (cell,) = campaign.verdict(**BOUNDED, max_source_relative_difference=None).cells
    assert cell.counts == {"incomplete": 2}
    assert cell.points[0].samples_ms.keys() == {"2", "3"}


def test_without_any_bounded_repeat_all_is_incomplete(campaign: Campaign):
    verdict = campaign.verdict(**BOUNDED)
    assert (verdict.outcome, verdict.counts) == ("incomplete", {"incomplete": 2})


def test_a_bound_that_bounds_nothing_is_the_source_itself(campaign: Campaign):
    for number in (1, 2, 3):
        (campaign.root / f"repeat{number}").rename(campaign.root / f"repeat{number}-points3")
    assert campaign.verdict(**BOUNDED | {"max_points_per_cell": 3}).outcome == "passed"


# Commands


def script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / f"workflow/scripts/{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_verdict_is_written_whatever_it_is_and_required_apart(campaign: Campaign):
    asked, verdict = policy_file(campaign.root, samples=3), campaign.root / "repeatability.json"
    arguments = ["--plan", campaign.plan, "--policy", asked, "--output", verdict]
    require = ["--verdict", verdict, "--policy", asked]
    assert script("repeatability", *arguments).returncode == 0
    passed = script("require_repeatable", *require)
    assert (passed.returncode, passed.stdout.splitlines()[1]) == (0, f"  {campaign.cell.name}: passed (3 passed)")

    campaign.repeat(2, with_walls(0.010, 0.040, 0.030))
    unstable = script("repeatability", *arguments)
    assert unstable.returncode == 0
    assert "    benchmark_id=2: unstable: cv " in unstable.stdout
    refused = script("require_repeatable", *require)
    assert refused.returncode == 2
    assert refused.stdout == unstable.stdout
    assert refused.stderr.startswith(f"refused: repeatability: expected passed, found {campaign.cell.name}: unstable (")
    assert refused.stderr.endswith(f": {verdict}\n")

    policy_file(campaign.root, samples=3, max_cv=0.9)
    other = script("require_repeatable", *require)
    assert other.returncode == 2
    assert other.stderr.startswith("refused: policy_sha256: expected ")
