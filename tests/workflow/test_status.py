"""`status`, the dry run and the JSON say the same of every cell, and say why in the campaign's words."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Workspace

pytestmark = pytest.mark.demo
CAMPAIGN = "config/campaigns/cpu-demo.yaml"
GRID = "        batch_sizes: [1, 2, 4, 8]\n        prefix_blocks: [0, 1, 2, 4, 8]"
CONTEXTS = "contexts: [64, 256, 512, 1024, 2048]"
LIMITS = "{max_num_tokens: 2048, max_batch_size: 8, max_model_len: 4096}"


def status(workspace: Workspace, *arguments: str) -> dict[str, Any]:
    done = workspace.script("status", "--campaign", CAMPAIGN, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def cell(found: dict[str, Any], prefix: str) -> dict[str, Any]:
    (one,) = [cell for cell in found["cells"] if cell["name"].startswith(prefix)]
    return one


def to_collect(found: dict[str, Any]) -> dict[str, str]:
    return {cell["name"]: cell.get("why", "") for cell in found["cells"] if cell["collect"]}


def dry_run_cells(workspace: Workspace) -> dict[str, str]:
    """Cells that Snakemake would collect, with the reason that the dry run prints."""
    done = workspace.snakemake("-n")
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(re.findall(r"^Job \d+: measure (\S+): (.*)$", done.stdout, re.M))


def printed_cells(workspace: Workspace) -> dict[str, str]:
    """Cells that `status` lists for a person, with their reason."""
    done = workspace.script("status", "--campaign", CAMPAIGN)
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^missing +(\S+)  \d+/\d+ points  (.*)$", done.stdout, re.M))


def remove(*files: str) -> Any:
    def edit(workspace: Workspace) -> None:
        for file in files:
            prefix, name = file.split("/")
            (workspace.cell(prefix) / name).unlink()

    return edit


def replace(old: str, new: str, file: str = CAMPAIGN) -> Any:
    return lambda workspace: workspace.edit(file, old, new)


def drop_hybrid(workspace: Workspace) -> None:
    path = workspace.root / CAMPAIGN
    path.write_text(path.read_text()[: path.read_text().index("  hybrid:")])


def forget_cells(workspace: Workspace) -> None:
    shutil.rmtree(workspace.root / "results/cpu-demo/cells")


def forget_snakemake(workspace: Workspace) -> None:
    shutil.rmtree(workspace.root / ".snakemake")


ALL = {f"{phase}-{deployment}" for phase in ("prefill", "decode") for deployment in ("dense", "sliding", "hybrid")}
EDITS = {
    "nothing": (lambda workspace: None, {}),
    "words": (replace("description: Three tiny models", "description: Other words"), {}),
    "one more batch size": (
        replace(GRID, GRID.replace("[1, 2, 4, 8]", "[1, 2, 3, 4, 8]", 1)),
        {"prefill-hybrid": "grid.prefill.batch_sizes: 1, 2, 4, 8 -> 1, 2, 3, 4, 8"},
    ),
    "a shorter decode axis": (
        replace(CONTEXTS, "contexts: [64, 256, 512, 1024]"),
        {
            f"decode-{name}": "grid.decode.contexts: 64, 256, 512, 1024, 2048 -> 64, 256, 512, 1024"
            for name in ("dense", "sliding", "hybrid")
        },
    ),
    "two axes of two phases": (
        lambda workspace: (
            workspace.edit(CAMPAIGN, GRID, GRID.replace("[1, 2, 4, 8]", "[1, 2, 4]", 1)),
            workspace.edit(CAMPAIGN, CONTEXTS, "contexts: [64, 256, 512, 1024, 3000]"),
        ),
        {"prefill-hybrid": "grid.prefill.batch_sizes: 1, 2, 4, 8 -> 1, 2, 4"}
        | {
            f"decode-{name}": "grid.decode.contexts: 64, 256, 512, 1024, 2048 -> 64, 256, 512, 1024, 3000"
            for name in ("dense", "sliding", "hybrid")
        },
    ),
    "a removed deployment": (drop_hybrid, {}),
    "a new name": (
        replace("  sliding: #", "  windowed: #"),
        None,  # its probe comes first
    ),
    "another limit": (replace(LIMITS, LIMITS.replace("4096", "3500")), None),
    "a lost artifact": (remove("decode-dense/benchmark.json"), {"decode-dense": "benchmark.json is missing"}),
    "a lost receipt": (remove("decode-dense/receipt.json"), {"decode-dense": "goes on with its journal"}),
    "a lost verdict": (remove("decode-dense/evidence.json", "decode-dense/merged.json"), {}),
    "no cells": (forget_cells, dict.fromkeys(ALL, "never measured")),
    "no records of Snakemake": (forget_snakemake, {}),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "expected"), EDITS.values(), ids=EDITS)
def test_status_and_the_dry_run_agree(finished: Workspace, edit: Any, expected: dict[str, str] | None):
    edit(finished)
    found, dry = status(finished), dry_run_cells(finished)
    assert to_collect(found) == dry == printed_cells(finished)
    if expected is None:
        assert found["probes"]
        assert not found["cells"]
        assert {job.rule for job in finished.dry_run()} >= {"probe", "import_profile", "profiles"}
    else:
        assert {name.rsplit("-", 1)[0]: why for name, why in dry.items()} == expected


def test_edits_one_after_the_other_agree_and_their_reverts_collect_nothing(finished: Workspace):
    """What is kept from one parse to the next never answers for another campaign."""
    text = (finished.root / CAMPAIGN).read_text()
    for old, new in ((GRID, GRID.replace("[1, 2, 4, 8]", "[1, 2]", 1)), (CONTEXTS, "contexts: [64]")):
        (finished.root / CAMPAIGN).write_text(text.replace(old, new))
        changed = to_collect(status(finished))
        assert changed
        assert changed == dry_run_cells(finished)
        (finished.root / CAMPAIGN).write_text(text)
        assert to_collect(status(finished)) == dry_run_cells(finished) == {}


def test_a_changed_model_or_system_is_noticed_behind_an_unchanged_campaign(finished: Workspace):
    assert to_collect(status(finished)) == {}
    finished.edit("config/models/qwen3-tiny/config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')
    assert status(finished)["probes"] == ["dense"]
    finished.edit("config/models/qwen3-tiny/config.json", '"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06')
    assert status(finished)["probes"] == []
    (finished.root / "config/models/qwen3-tiny/hf_quant_config.json").write_text("{}")
    done = finished.script("status", "--campaign", CAMPAIGN)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "hf_quant_config.json" in done.stderr


def test_a_profile_that_changes_plans_anew(finished: Workspace):
    before = status(finished)["plan"]
    (profile,) = (finished.root / "results/cpu-demo/profile").glob("dense-*.json")
    profile.write_text(profile.read_text().replace('"free_blocks":', '"free_blocks": '))
    assert status(finished)["plan"] != before


def test_a_profile_that_nobody_accepted_is_named(finished: Workspace):
    finished.edit("config/systems/cpu-2core.yaml", "embedded: true", "embedded: false")
    finished.edit(CAMPAIGN, "acceptance: auto # only an embedded system may say so", "acceptance: {}")
    found = status(finished)
    assert found["plan"] is None
    assert [Path(file).name.split("-")[0] for file in found["accept"]] == ["dense", "hybrid", "sliding"]


def lost_cell(workspace: Workspace) -> Path:
    """The folder of a cell of which nothing is left."""
    folder = workspace.cell("decode-dense")
    shutil.rmtree(folder)
    return folder


def test_the_states_of_a_cell_while_it_is_measured_killed_and_finished(finished: Workspace):
    """A real job: claimed while its engine starts, running, interrupted by SIGKILL, and measured after another go."""
    folder = lost_cell(finished)
    files = ["--campaign", CAMPAIGN, "--cell", folder.name, "--output", str(folder / "cell.json")]
    assert finished.script("freeze_cell", *files).returncode == 0
    command = [
        sys.executable,
        "-m",
        "producer.run_cell",
        "--cell",
        str(folder.relative_to(finished.root) / "cell.json"),
    ]
    seen: list[str] = []
    with subprocess.Popen(command, cwd=finished.root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            now = cell(status(finished), "decode-dense")
            if not seen or seen[-1] != now["state"]:
                seen.append(now["state"])
            if now["state"] == "running" and now["points_done"] >= 2:
                break
            time.sleep(0.2)
        os.kill(job.pid, signal.SIGKILL)
    assert seen[-2:] == ["claimed", "running"]
    assert {"host", "current_point"} <= now.keys()
    dead = cell(status(finished), "decode-dense")
    assert (dead["state"], dead["collect"]) == ("interrupted", True)
    assert dead["points_done"] >= now["points_done"]
    assert "ended without a word" in dead["why"]
    done = subprocess.run(command, cwd=finished.root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert cell(status(finished), "decode-dense")["state"] == "measured"


def test_a_failed_cell_shows_the_last_lines_of_its_log(finished: Workspace):
    folder = lost_cell(finished)
    finished.edit("config/models/qwen3-tiny/config.json", '"Qwen3ForCausalLM"', '"NoSuchModel"')
    done = finished.snakemake(
        "--rerun-triggers", "params", "--", str((folder / "receipt.json").relative_to(finished.root))
    )
    assert done.returncode != 0
    finished.edit("config/models/qwen3-tiny/config.json", '"NoSuchModel"', '"Qwen3ForCausalLM"')
    failed = cell(status(finished), "decode-dense")
    assert failed["state"] == "failed"
    assert failed["last_lines"][-1].startswith("refused: ")
    assert failed["why"] == failed["last_lines"][-1]


def test_gpu_hours_left_are_those_of_the_receipts(finished: Workspace):
    """One of two deployments' decode cells is lost: it is estimated at its own phase's rates, a second a point."""
    hours = []
    for name in ("decode-sliding", "decode-hybrid"):
        receipt = json.loads((finished.cell(name) / "receipt.json").read_text())
        points = len(json.loads((finished.cell(name) / "cell.json").read_text())["points"]["decode"])
        hours.append((receipt["engine_start_seconds"], receipt["measuring_seconds"] / points))
    points = len(json.loads((finished.cell("decode-dense") / "cell.json").read_text())["points"]["decode"])
    lost_cell(finished)
    start = (hours[0][0] + hours[1][0]) / 2
    rate = (hours[0][1] + hours[1][1]) / 2
    found = status(finished)
    assert found["counts"] == {"judged": 5, "missing": 1}
    assert found["gpu_hours_left"] == pytest.approx((start + rate * points) / 3600)
    forget_cells(finished)
    assert status(finished)["gpu_hours_left"] is None
