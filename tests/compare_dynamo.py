"""Our retained values beside those of Dynamo's self-benchmark: the same points, model and engine, in one run.

Needs the demo campaign's profile (`make demo`) and an environment with requirements/cpu.txt and dynamo.txt.

Dynamo takes one sample of a point, so the manifest lists every point several times and the median counts. Its scheduler
runs in three engines: in `one_process`, as ours does (the comparison), and in two or three processes, as Dynamo is
launched (`core_process`, `worker_process`): what each hop between processes adds to a forward pass.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from producer.adapters import adapter_of
from producer.engine import KV_CACHE_DTYPES
from producer.exclusive import exclusive_devices
from producer.graph import CampaignGraph, read_profile
from producer.planning import freeze_cells
from schemas.canonical import write_atomic, write_model
from schemas.errors import run
from schemas.plan import FrozenCell
from schemas.points import PHASES, DecodePoint, PointManifest, PrefillPoint

ROOT = Path(__file__).parent.parent
CAMPAIGN, DEPLOYMENT = "cpu-demo", "dense"
ENGINES = ("one_process", "core_process", "worker_process")
CLOSE = (0.9, 1.1)
LOG_TAIL = 4000
"""Characters of a failed child's output that are shown."""

NAMED_OTHERWISE = {".engine.graph.resolution"}
"""Here the workers are asked for their graphs, there the launch; on the CPU both have none."""

PREFILL = ((1, 64), (1, 256), (1, 1024), (2, 64), (2, 256), (2, 1024), (4, 64), (4, 256))
"""(batch, new tokens of each request), without prefix."""

DECODE = ((1, 64), (1, 512), (1, 2048), (2, 256), (4, 64), (4, 1024), (8, 256), (8, 2048))
"""(batch, context of each request)."""

MANIFEST = PointManifest(
    prefill=tuple(
        PrefillPoint(batch_size=batch, total_prefill_tokens=batch * new, total_kv_read_tokens=0)
        for batch, new in PREFILL
    ),
    decode=tuple(DecodePoint(batch_size=batch, total_kv_read_tokens=batch * context) for batch, context in DECODE),
)


class Shape(NamedTuple):
    """A point as the engine ran it, by the counts of its forward pass."""

    phase: str
    batch_size: int
    total_prefill_tokens: int
    total_kv_read_tokens: int


SHAPES = (
    *(Shape("prefill", batch, batch * new, 0) for batch, new in PREFILL),
    *(Shape("decode", batch, 0, batch * context) for batch, context in DECODE),
)


class Artifact(NamedTuple):
    """What a rank artifact says: milliseconds of each shape, in order of measuring, and the engine it came from."""

    values: dict[Shape, list[float]]
    engine: dict[str, Any]


def shape_of(counts: dict[str, Any]) -> Shape:
    if counts["num_decode_requests"]:
        return Shape("decode", counts["num_decode_requests"], 0, counts["sum_decode_kv_tokens"])
    totals = counts["sum_prefill_tokens"], counts["sum_prefill_kv_tokens"]
    return Shape("prefill", counts["num_prefill_requests"], *totals)


def read_artifact(file: Path, phases: tuple[str, ...]) -> Artifact:
    """The artifact of a run that measured all of `SHAPES` in these phases and nothing else."""
    document = json.loads(file.read_text())
    if not document["valid"]:
        sys.exit(f"{file}: not valid: {document['status']}: {document['error']}")
    values: dict[Shape, list[float]] = defaultdict(list)
    for row in document["results"]:
        (fpm,) = row["fpms"]
        values[shape_of(fpm["scheduled_requests"])].append(fpm["wall_time"] * 1e3)
    expected = {shape for shape in SHAPES if shape.phase in phases}
    if values.keys() != expected:
        sys.exit(f"{file}: other points than asked for: {sorted(values.keys() ^ expected)}")
    return Artifact(values, {"engine": document["engine"], "limits": document["limits"]})


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every scalar of nested JSON with its path."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from leaves(inner, f"{path}.{key}")
    else:
        yield path, value


def check_same_engine(ours: Artifact, dynamos: Artifact) -> None:
    """Every fact about the engine that both artifacts record is the same."""
    other = dict(leaves(dynamos.engine))
    for path, value in leaves(ours.engine):
        if path in other and other[path] != value and path not in NAMED_OTHERWISE:
            sys.exit(f"not the same engine: {path} is {value!r} here, {other[path]!r} in Dynamo's run")


def frozen_cells() -> list[FrozenCell]:
    """One cell of each phase with the points of `MANIFEST`, on the demo's profile."""
    graph = CampaignGraph(CAMPAIGN)
    profile = read_profile(graph.profile_file(DEPLOYMENT)).profile
    return freeze_cells(graph.request, DEPLOYMENT, graph.request.deployments[DEPLOYMENT], profile, MANIFEST)


def run_child(command: list[str], log: Path, environment: dict[str, str], folder: Path = ROOT) -> None:
    """Run a child process in `folder`; its output is shown only when it fails."""
    with log.open("w") as output:
        done = subprocess.run(
            command, cwd=folder, env=os.environ | environment, stdout=output, stderr=output, timeout=600, check=False
        )
    if done.returncode:
        sys.exit(f"{log.read_text()[-LOG_TAIL:]}\n{' '.join(command)}: exit code {done.returncode}")


def measure_ours(cell: FrozenCell, folder: Path) -> Artifact:
    file = folder / cell.name / "cell.json"
    write_model(file, cell)
    run_child([sys.executable, "-m", "producer.run_cell", "--cell", str(file)], folder / "ours.log", {})
    return read_artifact(file.parent / "benchmark.json", (cell.identity.phase,))


def engine_arguments(cell: FrozenCell) -> dict[str, Any]:
    """vLLM's arguments of a cell, as `producer.engine.start` passes them."""
    identity = cell.identity
    return {
        "model": cell.model,
        "load_format": identity.engine.load_format,
        "dtype": "bfloat16",
        "kv_cache_dtype": KV_CACHE_DTYPES[identity.precision.kv_cache],
        "kv_cache_memory_bytes": identity.engine.kv_cache_memory_bytes,
        "skip_tokenizer_init": True,
        "enforce_eager": identity.engine.enforce_eager,
        "max_model_len": identity.limits.max_model_len,
        "max_num_batched_tokens": identity.limits.max_num_tokens,
        "max_num_seqs": identity.limits.max_batch_size,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "cudagraph_metrics": True,
        "disable_log_stats": True,
    }


def measure_dynamo(python: str, processes: str, cell: FrozenCell, repeats: int, folder: Path) -> Artifact:
    """All points of `MANIFEST`, `repeats` times one after the other, in one engine."""
    points = MANIFEST.model_dump(mode="json", exclude_none=True)
    points |= {phase: points[phase] * repeats for phase in PHASES}
    output, settings = folder / f"{processes}.json", folder / f"{processes}-settings.json"
    benchmark = {"mode": "agg", "output_path": str(output), "points": points}
    settings.write_text(
        json.dumps({"engine": engine_arguments(cell), "benchmark": benchmark, "processes": processes}, indent=2)
    )
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [python, str(ROOT / "tests" / "dynamo_engine.py"), str(settings)]
    device = adapter_of(cell.identity.runtime_backend_version, cell.name).device
    with exclusive_devices(device, cell.identity.topology.gpus):
        run_child(command, folder / f"{processes}.log", environment | cell.identity.environment)
    return read_artifact(output, PHASES)


class Samples:
    """Milliseconds of every shape, by round: ours one retained value a round, Dynamo's one list a round."""

    def __init__(self) -> None:
        self.ours: dict[Shape, list[float]] = defaultdict(list)
        self.dynamo: dict[str, dict[Shape, list[list[float]]]] = {name: defaultdict(list) for name in ENGINES}
        self.versions: dict[str, str] = {}

    def add_round(self, python: str, repeats: int, folder: Path) -> None:
        """Measure every point once here and `repeats` times with each of Dynamo's engines."""
        frozen = frozen_cells()
        ours = [measure_ours(cell, folder) for cell in frozen]
        for artifact in ours:
            for shape, (value,) in artifact.values.items():
                self.ours[shape].append(value)
        for processes in ENGINES:
            theirs = measure_dynamo(python, processes, frozen[0], repeats, folder)
            check_same_engine(ours[-1], theirs)  # the decode cell's: a prefill cell records no largest decode batch
            self.versions = {name: theirs.engine["engine"]["versions"][name] for name in ("vllm", "dynamo", "python")}
            for shape, values in theirs.values.items():
                self.dynamo[processes][shape].append(values)


def dynamo_figures(ours: float, rounds: list[list[float]]) -> dict[str, Any]:
    values = sorted(value for values in rounds for value in values)
    median = statistics.median(values)
    first, _, third = statistics.quantiles(values, n=4)
    return {
        "ms": median,
        "ratio": ours / median,
        "quartiles_ms": [first, third],
        "range_ms": [values[0], values[-1]],
        "samples_ms": rounds,
    }


def point_figures(samples: Samples) -> list[dict[str, Any]]:
    """One record a point, in the order of the manifest."""
    records = []
    for shape in SHAPES:
        rounds = samples.ours[shape]
        ours = statistics.median(rounds)
        dynamo = {name: dynamo_figures(ours, samples.dynamo[name][shape]) for name in ENGINES}
        records.append(shape._asdict() | {"ours_ms": ours, "ours_rounds_ms": rounds, "dynamo": dynamo})
    return records


def summary_of(points: list[dict[str, Any]], processes: str, phase: str) -> dict[str, Any]:
    chosen = [point for point in points if point["phase"] == phase]
    ratios = [point["dynamo"][processes]["ratio"] for point in chosen]
    outside = [
        f"{label(point)}: {ratio:.2f}"
        for point, ratio in zip(chosen, ratios, strict=True)
        if not CLOSE[0] <= ratio <= CLOSE[1]
    ]
    return {
        "points": len(ratios),
        "median_ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "outside": outside,
    }


def label(point: dict[str, Any]) -> str:
    tokens = point["total_prefill_tokens"] or point["total_kv_read_tokens"]
    return f"{point['phase']} {point['batch_size']} x {tokens // point['batch_size']}"


def markdown(figures: dict[str, Any]) -> str:
    """The table and its summary for a person: milliseconds, and ours divided by Dynamo's."""
    lines = [
        "| point | ours | Dynamo, one process | quartiles | ratio | core process | ratio | worker process | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for point in figures["points"]:
        one, *others = (point["dynamo"][name] for name in ENGINES)
        first, third = one["quartiles_ms"]
        cells = [label(point), f"{point['ours_ms']:.2f}", f"{one['ms']:.2f}", f"{first:.2f}-{third:.2f}"]
        cells.append(f"{one['ratio']:.3f}")
        for other in others:
            cells += [f"{other['ms']:.2f}", f"{other['ratio']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for processes, phases in figures["summary"].items():
        for phase, found in phases.items():
            low, high = found["range"]
            outside = ", ".join(found["outside"]) or "none"
            lines.append(
                f"{processes} {phase}: median ratio {found['median_ratio']:.3f} ({low:.3f}-{high:.3f}), "
                f"outside {CLOSE[0]}..{CLOSE[1]}: {outside}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dynamo-python", required=True, help="python of the environment with Dynamo")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "dynamo.json")
    parser.add_argument("--rounds", type=int, default=3, help="engine starts of each kind, interleaved")
    parser.add_argument("--repeats", type=int, default=9, help="samples that Dynamo takes of a point in a round")
    arguments = parser.parse_args()
    python, output = str(Path(arguments.dynamo_python).absolute()), arguments.output.absolute()
    os.chdir(ROOT)
    samples = Samples()
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            samples.add_round(python, arguments.repeats, Path(folder))
        print(f"round {number + 1} of {arguments.rounds} done", file=sys.stderr, flush=True)
    points = point_figures(samples)
    figures = {
        "versions": samples.versions,
        "cpus": os.cpu_count(),
        "rounds": arguments.rounds,
        "dynamo_repeats": arguments.repeats,
        "points": points,
        "summary": {name: {phase: summary_of(points, name, phase) for phase in PHASES} for name in ENGINES},
    }
    write_atomic(output, json.dumps(figures, indent=2).encode())
    print(markdown(figures))


if __name__ == "__main__":
    run(main)
