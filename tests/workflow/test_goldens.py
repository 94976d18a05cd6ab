"""Each campaign of the table has the rule graph and the dry run that somebody last looked at: `make goldens`."""

from pathlib import Path

import pytest
from goldens import GOLDENS, TABLE, difference, made


@pytest.mark.parametrize("name", TABLE)
def test_the_graph_and_the_dry_run_are_the_golden_ones(name: str, tmp_path: Path):
    changed = "".join(difference(file, text) for file, text in made(name, tmp_path).items())
    assert not changed, f"if this is meant, `make goldens` and look at it again:\n{changed}"


def test_no_golden_holds_a_time_or_a_path_of_a_machine():
    files = sorted(GOLDENS.iterdir())
    assert {file.stem for file in files} == TABLE.keys()
    for file in files:
        text = file.read_text()
        assert not [word for word in ('"/', "/tmp", "/home", '"time"', "jobid") if word in text], file.name
