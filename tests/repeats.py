"""Runs of one cell by hand: a real artifact of Dynamo as its source, and changed copies of it as its repeats."""

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
from native_samples import cell_of, sample

from producer.contracts import GENERIC
from schemas.canonical import sha256, write_atomic, write_model
from schemas.evidence import CellEvidence
from schemas.merged import MergedArtifact, merged_bytes
from schemas.plan import CellEntry, DeploymentPlan, FrozenCell, Plan

from compare_cells import CellRun

SAMPLE = "d17_dense_decode_median_clamped"
"""Three decode points of four samples each; prompts, graph dispatch and warm-ups are recorded."""

Document = dict[str, Any]


def document(run: int = 0, change=None) -> Document:
    """The sample as launch `run` would have written it; `change` edits it."""
    made = copy.deepcopy(sample(SAMPLE))
    made["run_id"] = f"{run:032x}"
    if change is not None:
        change(made)
    return made


def fpms(made: Document, point: int) -> list[Document]:
    """Both copies of the retained value of a point, from 0: its row's and its group's."""
    return [made["results"][point]["fpms"][0], made["iteration_groups"][point]["rank_results"][0]["fpms"][0]]


def measurements(made: Document, point: int) -> list[Document]:
    return [fpm["benchmark_measurement"] for fpm in fpms(made, point)]


def with_walls(*seconds: float):
    """A change that gives the points these times."""

    def change(made: Document) -> None:
        for point, wall in enumerate(seconds):
            made["iteration_groups"][point]["wall_time"] = wall
            for fpm in fpms(made, point):
                fpm["wall_time"] = wall

    return change


def part_of(made: Document, *points: int) -> Document:
    """The run of a cell that has only some of the points, from 0."""
    part = copy.deepcopy(made)
    for key in ("results", "iteration_groups"):
        part[key] = [part[key][point] for point in points]
        for number, each in enumerate(part[key], 1):
            each["point"]["benchmark_id"] = number
    for position, group in enumerate(part["iteration_groups"]):
        group["benchmark_id"] = position + 1
        for measurement in measurements(part, position):
            measurement["preparation"] |= {"completed_points_before": position, "grid_digest": "e" * 64}
    return part


def measured_cell(made: Document, **identity: Any) -> FrozenCell:
    """The cell of a document, as if we had measured it."""
    own = {"contract": GENERIC.name, "measurement": GENERIC.measurement.model_dump()}
    return cell_of(made, **own | {"producer_protocol": GENERIC.protocol} | identity)


def run_of(made: Document, cell: FrozenCell | None = None) -> CellRun:
    """The run of a cell whose one rank wrote the document."""
    cell = measured_cell(made) if cell is None else cell
    merged = {key: value for key, value in copy.deepcopy(made).items() if key != "warmup_evidence"}
    merged |= {
        "artifact_type": "merged",
        "dp": {"ranks": [0], "source_ranks": [0], "managed_size": 1, "global_size": 1},
        "rank_files": ["benchmark.json"],
        "merged_output_path": "merged.json",
        "cell_digest": cell.digest,
        "source_sha256": {},
    }
    if "warmup_evidence" in made:
        merged["rank_warmup_evidence"] = {"0": made["warmup_evidence"]}
    return CellRun(cell, msgspec.json.decode(json.dumps(merged), type=MergedArtifact))


def write_run(cells: Path, run: CellRun, failures: tuple[str, ...] = ()) -> Path:
    """`cell.json`, `merged.json` and `evidence.json` of a run, in its cell's folder below `cells`."""
    folder = cells / run.cell.name
    write_model(folder / "cell.json", run.cell)
    write_atomic(folder / "merged.json", merged_bytes(run.merged))
    points = len(run.merged.iteration_groups)
    evidence = CellEvidence(
        cell_digest=run.cell.digest,
        phase=run.cell.identity.phase,
        state="failed" if failures else "recorded",
        failures=failures,
        gaps=(),
        points=points,
        native_regime_counts={"real_kv": points},
        formal_regime_counts={"real_kv": points},
        formal_regimes=("real_kv",) * points,
        merged_sha256=sha256((folder / "merged.json").read_bytes()),
        run_id=run.merged.run_id,
        grid_digest=run.merged.grid_digest,
    )
    write_model(folder / "evidence.json", evidence)
    return folder


def write_plan(root: Path, cell: FrozenCell) -> Path:
    """A plan of one cell below `results/<campaign>/`; returns its file."""
    points = len(cell.points.points())
    deployment = DeploymentPlan(
        model=cell.model,
        probe_digest=cell.identity.probe_digest,
        profile_sha256="f" * 64,
        points_sha256=cell.identity.points_sha256,
        origin="frozen_explicit_manifest",
        prefill_points=0,
        decode_points=points,
        dropped={},
        contract=cell.identity.contract,
        peak_blocks=1,
        estimated_blocks=1,
        free_blocks=cell.free_blocks,
    )
    entry = CellEntry(
        name=cell.name,
        deployment=cell.deployment,
        phase=cell.identity.phase,
        digest=cell.digest,
        points_sha256=cell.identity.points_sha256,
        points=points,
    )
    plan = Plan(
        scope="formal",
        system=cell.identity.system,
        system_sha256="a" * 64,
        backend="vllm",
        backend_version="0.32.0",
        runtime_backend_version="0.32.0",
        deployments={cell.deployment: deployment},
        cells=(entry,),
    )
    file = root / "plan-0123456789abcdef" / "plan.json"
    write_model(file, plan)
    return file
