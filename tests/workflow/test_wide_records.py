"""The wide records of the figures are sound: what is timed is an import to its end."""

from pathlib import Path

import pytest
from wide_records import BLOCKS, GROUPS, LAYERS, Pools, write_records

from schemas.canonical import read_model
from schemas.observation import ProbeRecord
from schemas.points import PHASES

from import_profile import build_profile
from probe_checks import diagnose

RANKS = 3


def records_of(folder: Path) -> list[ProbeRecord]:
    return [read_model(ProbeRecord, folder / f"{phase}.json", "probe record") for phase in PHASES]


@pytest.mark.parametrize(("pools", "smallest"), [("equal", BLOCKS), ("other", BLOCKS - RANKS + 1)])
def test_wide_records_import_complete(tmp_path: Path, pools: Pools, smallest: int):
    request, deployment = write_records(tmp_path, pools, RANKS)
    records = records_of(tmp_path)
    assert diagnose(request, deployment, records) == []
    assert sum(len(worker.cache.layer_tensors) for worker in records[0].workers) == RANKS * GROUPS * LAYERS
    profile = build_profile(request, deployment, records, {})
    assert profile.free_blocks == smallest - 1
    assert [group.num_layers for group in profile.groups] == [LAYERS] * GROUPS


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_doubt_about_any_rank_is_found_beside_ranks_that_leave_none(tmp_path: Path, rank: int):
    """Ranks that say the same are examined once: one that differs is not taken for another."""
    request, deployment = write_records(tmp_path, "equal", RANKS)
    prefill, decode = records_of(tmp_path)
    workers = list(prefill.workers)
    settings = workers[rank].settings.model_copy(update={"enforce_eager": False})
    workers[rank] = workers[rank].model_copy(update={"settings": settings})
    found = diagnose(request, deployment, [prefill.model_copy(update={"workers": tuple(workers)}), decode])
    line = f"prefill: worker dp{rank} tp0 pp0: settings.enforce_eager: expected True, found False"
    assert [each for each in found if each == line] == [line]


def test_a_doubt_about_every_rank_is_said_of_every_rank(tmp_path: Path):
    request, deployment = write_records(tmp_path, "equal", RANKS)
    prefill, decode = records_of(tmp_path)
    schedulers = [scheduler.model_copy(update={"watermark_blocks": 1}) for scheduler in prefill.schedulers]
    found = diagnose(request, deployment, [prefill.model_copy(update={"schedulers": tuple(schedulers)}), decode])
    lines = [f"prefill: scheduler dp{rank}: watermark_blocks: expected 0, found 1" for rank in range(RANKS)]
    assert [line for line in found if line.endswith("watermark_blocks: expected 0, found 1")] == lines
