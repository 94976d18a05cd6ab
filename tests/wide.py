"""A campaign of very many cells, for figures and for the golden dry run."""

import contextlib
import shutil
from pathlib import Path

import yaml
from conftest import Workspace, copy_project

from producer.graph import CampaignGraph


def wide_campaign(folder: Path, profile: Path, cells: int) -> Workspace:
    """`cells` cells of cpu-demo's dense model under half as many names, each with `profile` as its imported one, and
    the records beside it."""
    workspace = copy_project(folder)
    file = folder / "config/campaigns/cpu-demo.yaml"
    campaign = yaml.safe_load(file.read_text())
    dense = campaign["deployments"]["dense"]
    deployments = {}
    for number in range(cells // 2):
        model = f"config/models/wide/{number:05}"
        shutil.copytree(folder / dense["model"], folder / model)
        deployments[f"dense{number:05}"] = dense | {"model": model}
    file.write_text(yaml.safe_dump(campaign | {"deployments": deployments}, sort_keys=False))
    records = shutil.copytree(profile.parent.parent / "probe" / profile.stem, folder / "records")  # once on the disk
    with contextlib.chdir(folder):
        graph = CampaignGraph("cpu-demo")
        for name in graph.deployments:
            target = graph.profile_file(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            for record in map(Path, graph.probe_files(name)):
                record.parent.mkdir(parents=True, exist_ok=True)
                record.hardlink_to(records / record.name)
            shutil.copy(profile, target)
    return workspace
