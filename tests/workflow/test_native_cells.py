"""The cells that figures are taken of: we and the original take them, and publish the same of them."""

import json
import subprocess
import sys

import pytest
from conftest import CONSUMER, ROOT
from native_cells import SAMPLES, documents, write_campaign

POINTS = 9


def last_line(*command: object) -> dict:
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_original_reader_publishes_the_same_latencies(tmp_path, ranks):
    plan = write_campaign(tmp_path, 2, POINTS, ranks)
    ours = last_line(sys.executable, "tests/judge_once.py", plan)
    original = last_line(CONSUMER, "tests/original_reader.py", tmp_path / "artifacts", tmp_path / "model", "0.32.0")
    assert (ours["rows"], original["rows"]) == (2 * POINTS, POINTS)
    assert ours["latencies"] == original["latencies"]
    assert len(ours["latencies"]) == POINTS


def test_a_value_is_the_fifth_smallest_of_the_last_nine_and_a_point_takes_its_slowest_rank():
    first, *_ = documents(POINTS, 4, "model")
    for group in first["iteration_groups"]:
        walls = []
        for result in group["rank_results"]:
            raw = result["fpms"][0]["benchmark_measurement"]["raw_fpms"]
            assert len(raw) == SAMPLES
            walls.append(sorted(sample["wall_time"] for sample in raw[1:])[4])
        assert group["wall_time"] == max(walls)
