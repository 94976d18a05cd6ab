"""A report that a person looks at: latencies, the spread of every point's samples, what was measured on what."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import plotly.graph_objects as go
import polars as pl
from msgspec import UNSET
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from schemas.canonical import read_bytes, read_model, sha256, short, write_atomic
from schemas.errors import run
from schemas.evidence import CellEvidence
from schemas.imported import ImportReceipt, read_receipt
from schemas.layout import cells_folder
from schemas.merged import MergedArtifact
from schemas.native import CellReceipt, read_struct
from schemas.plan import DeploymentPlan, FrozenCell, Measurement, Plan

TEMPLATES = Path(__file__).parent.parent / "templates"
# Okabe and Ito's palette: told apart by people who see colours differently.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
LAYOUT: dict[str, Any] = {
    "template": "plotly_white",
    "margin": {"l": 60, "r": 20, "t": 60, "b": 50},
    "font": {"family": "system-ui, sans-serif", "size": 13},
}


class Cell(NamedTuple):
    """What the report shows of one cell."""

    frozen: FrozenCell
    merged: MergedArtifact
    receipt: CellReceipt | ImportReceipt
    evidence: CellEvidence


def read_cell(folder: Path) -> Cell:
    return Cell(
        read_model(FrozenCell, folder / "cell.json", "frozen cell"),
        read_struct(MergedArtifact, folder / "merged.json", "merged artifact"),
        read_receipt(folder / "receipt.json"),
        read_model(CellEvidence, folder / "evidence.json", "evidence"),
    )


def samples_of(cell: Cell) -> pl.DataFrame:
    """One row per raw sample: coordinates of its point, order of measuring, and times in milliseconds."""
    rows: list[dict[str, Any]] = []
    for order, group in enumerate(cell.merged.iteration_groups):
        point = group.point
        for result in group.rank_results:
            measurement = result.fpms[0].benchmark_measurement
            common = {
                "order": order,
                "batch_size": point.batch_size,
                "new_tokens": point.total_prefill_tokens // point.batch_size,
                "kv_tokens": point.total_kv_read_tokens // point.batch_size,
                "latency_ms": group.wall_time * 1000,
                "dp_rank": result.dp_rank,
            }
            if measurement is UNSET:  # Dynamo 1.6.1 keeps no raw samples: its value is all there is, without a clock
                only = {"sample": 0, "sample_ms": result.fpms[0].wall_time * 1000, "session": 1, "ended": float(order)}
                rows.append(common | only)
                continue
            basis = measurement.raw_fpms[-1].benchmark_sample.timing.basis
            rows.extend(
                common
                | {
                    "sample": raw.benchmark_sample.sample_index,
                    "sample_ms": raw.wall_time * 1000,
                    "session": measurement.session if measurement.session is not UNSET else 1,
                    "ended": raw.benchmark_sample.timing.end_monotonic,
                }
                for raw in measurement.raw_fpms
                if raw.benchmark_sample.timing.basis == basis  # Dynamo's first decode step is the admission
            )
    return measured_at(pl.DataFrame(rows))


def measured_at(samples: pl.DataFrame) -> pl.DataFrame:
    """Adds `seconds` of measuring until a sample ended; clocks of two engine starts do not compare: they queue up."""
    within = samples.with_columns(within=pl.col("ended") - pl.col("ended").min().over("session", "dp_rank"))
    starts = (
        within.group_by("session")
        .agg(length=pl.col("within").max())
        .sort("session")
        .with_columns(start=pl.col("length").cum_sum() - pl.col("length"))
    )
    return within.join(starts, on="session").with_columns(seconds=pl.col("start") + pl.col("within"))


def _log_axis(figure: go.Figure, values: list[int], title: str) -> None:
    figure.update_xaxes(type="log", tickvals=values, ticktext=[f"{value:,}" for value in values], title=title)


def prefill_figure(samples: pl.DataFrame) -> go.Figure:
    """Latency over new tokens, a line per prefix, a panel per batch size."""
    points = samples.unique(["batch_size", "new_tokens", "kv_tokens"]).sort("batch_size", "kv_tokens", "new_tokens")
    batches = points["batch_size"].unique().sort().to_list()
    prefixes = points["kv_tokens"].unique().sort().to_list()
    titles = [f"batch {batch}" for batch in batches]
    figure = make_subplots(cols=len(batches), shared_yaxes=True, subplot_titles=titles, horizontal_spacing=0.02)
    for column, batch in enumerate(batches, start=1):
        for index, prefix in enumerate(prefixes):
            line = points.filter(batch_size=batch, kv_tokens=prefix)
            if line.is_empty():
                continue
            name = f"{prefix:,}"
            figure.add_scatter(
                x=line["new_tokens"].to_list(),
                y=line["latency_ms"].to_list(),
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                mode="lines+markers",
                line={"color": COLOURS[index % len(COLOURS)]},
                hovertemplate=f"batch {batch}, prefix {name}<br>%{{x}} new tokens: %{{y:.2f}} ms<extra></extra>",
                row=1,
                col=column,
            )
    _log_axis(figure, points["new_tokens"].unique().sort().to_list(), "new tokens of a request")
    figure.update_yaxes(type="log", dtick="D2")
    figure.update_yaxes(title="latency (ms)", col=1)
    figure.update_layout(**LAYOUT, height=380, legend_title="prefix tokens", title="Prefill")
    return figure


def decode_figure(samples: pl.DataFrame) -> go.Figure:
    """Latency over context, a line per batch size; and over batch size, a line per context."""
    points = samples.unique(["batch_size", "kv_tokens"]).sort("batch_size", "kv_tokens")
    panels = (
        ("kv_tokens", "batch_size", "context of a request", "batch"),
        ("batch_size", "kv_tokens", "batch size", "context"),
    )
    figure = make_subplots(
        cols=2, shared_yaxes=True, subplot_titles=["over context", "over batch size"], horizontal_spacing=0.03
    )
    for column, (axis, series, title, word) in enumerate(panels, start=1):
        for index, value in enumerate(points[series].unique().sort().to_list()):
            line = points.filter(pl.col(series) == value).sort(axis)
            figure.add_scatter(
                x=line[axis].to_list(),
                y=line["latency_ms"].to_list(),
                name=f"{word} {value:,}",
                legendgroup=word,
                mode="lines+markers",
                line={"color": COLOURS[index % len(COLOURS)], "dash": "solid" if column == 1 else "dot"},
                hovertemplate=f"{word} {value}, %{{x}}: %{{y:.2f}} ms<extra></extra>",
                row=1,
                col=column,
            )
        ticks = points[axis].unique().sort().to_list()
        figure.update_xaxes(
            type="log", tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks], title=title, row=1, col=column
        )
    figure.update_yaxes(title="latency (ms)", rangemode="tozero", col=1)
    figure.update_layout(**LAYOUT, height=380, title="Decode")
    return figure


def spread_figure(samples: pl.DataFrame, phase: str) -> go.Figure:
    """Every sample of every point, relative to the point's published value, over time: a drift shows as a slope."""
    relative = samples.with_columns(percent=(pl.col("sample_ms") / pl.col("latency_ms") - 1) * 100)
    labels = [
        f"batch {row['batch_size']}, "
        + (f"{row['new_tokens']} new after {row['kv_tokens']}" if phase == "prefill" else f"context {row['kv_tokens']}")
        + f"<br>sample {row['sample'] + 1}: {row['sample_ms']:.3f} ms"
        for row in relative.iter_rows(named=True)
    ]
    figure = go.Figure(
        go.Scattergl(
            x=relative["seconds"].to_list(),
            y=relative["percent"].to_list(),
            text=labels,
            hovertemplate="%{text}, %{y:+.1f} %<extra></extra>",
            mode="markers",
            marker={
                "size": 6,
                "opacity": 0.75,
                "color": (relative["sample"] + 1).to_list(),
                "colorscale": "Viridis",
                "colorbar": {"title": "sample", "thickness": 12},
            },
        )
    )
    figure.update_xaxes(title="seconds of measuring")
    figure.update_yaxes(title="sample against published value (%)", zeroline=True, zerolinecolor="#555")
    figure.update_layout(**LAYOUT, height=300, title=f"Spread of the samples: {phase}")
    return figure


def time_figure(cells: list[Cell]) -> go.Figure:
    """Where each measured cell's seconds went; of imported ones nobody knows."""
    figure = go.Figure()
    receipts = {
        f"{cell.frozen.identity.phase} {cell.frozen.deployment}": cell.receipt
        for cell in cells
        if isinstance(cell.receipt, CellReceipt)
    }
    names = list(receipts)
    kinds = ("engine start", "seeding", "warmup", "scaffolding", "measured", "rejected", "idle")
    for index, kind in enumerate(kinds):
        seconds = [
            receipt.engine_start_seconds if kind == "engine start" else receipt.breakdown[kind]
            for receipt in receipts.values()
        ]
        figure.add_bar(y=names, x=seconds, name=kind, orientation="h", marker_color=COLOURS[index])
    figure.update_layout(
        **LAYOUT, barmode="stack", height=120 + 36 * len(names), title="Where the time went", xaxis_title="seconds"
    )
    figure.update_yaxes(autorange="reversed")
    return figure


def _html(figure: go.Figure) -> str:
    html: str = figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
    return html


def deployment_section(name: str, planned: DeploymentPlan, cells: list[Cell]) -> dict[str, Any]:
    """What the template shows of one deployment."""
    identity = cells[0].frozen.identity
    limits, topology = identity.limits, identity.topology
    figures = []
    for cell in cells:
        samples, phase = samples_of(cell), cell.frozen.identity.phase
        figures.append(_html(prefill_figure(samples) if phase == "prefill" else decode_figure(samples)))
        figures.append(_html(spread_figure(samples, phase)))
    engine = {} if cells[0].merged.engine is UNSET else cells[0].merged.engine
    versions = engine.get("versions", {})
    return {
        "name": name,
        "figures": figures,
        "facts": {
            "model": f"{planned.model} ({', '.join(engine.get('model', {}).get('architectures', ()))})",
            "model config": f"sha256 {short(identity.model_config_sha256)}, weights {identity.engine.load_format}",
            "engine": f"{identity.backend} {versions.get('vllm')}, Python {versions.get('python')}, "
            f"graphs {engine.get('graph', {}).get('cudagraph_mode')}",
            "cache groups": ", ".join(
                f"{group['type']} (block {group['block_size']})"
                for group in engine.get("kv_cache", {}).get("groups", ())
            ),
            "topology": f"{identity.parallel_strategy}: tp {topology.tp}, dp {topology.dp}, "
            f"moe_tp {topology.moe_tp}, moe_ep {topology.moe_ep}",
            "limits": f"{limits.max_num_tokens:,} tokens and {limits.max_batch_size} requests a step, "
            f"{limits.max_model_len:,} tokens a request",
            "blocks": f"{planned.peak_blocks:,} of {planned.free_blocks:,} free blocks at the largest point",
            "environment": ", ".join(f"{key}={value}" for key, value in identity.environment.items()) or "none",
            "points": f"{planned.prefill_points} prefill, {planned.decode_points} decode; dropped at planning: "
            + (", ".join(f"{count} {rule}" for rule, count in planned.dropped.items()) or "none"),
        },
        "cells": [
            {
                "name": cell.frozen.name,
                "points": cell.evidence.points,
                "state": cell.evidence.state,
                "regimes": ", ".join(f"{count} {label}" for label, count in cell.evidence.formal_regime_counts.items()),
                "run": cell.merged.run_id[:8],
                "drifting": cell.evidence.drifting,
                "started": cell.merged.timing.started_at[:19].replace("T", " "),
            }
            | collection(cell.receipt)
            for cell in cells
        ],
    }


def collection(receipt: CellReceipt | ImportReceipt) -> dict[str, Any]:
    """How a cell was measured, in the columns of its table."""
    if isinstance(receipt, ImportReceipt):
        return {"rejected": "-", "seeding": "-", "idle": "-", "sessions": f"imported ({receipt.producer})"}
    return {
        "rejected": receipt.rejected_repetitions,
        "seeding": f"{receipt.seeding['ratio']:.2f}",
        "idle": f"{receipt.idle_fraction:.1%}",
        "sessions": len(receipt.sessions),
    }


def how_measured(measurement: Measurement) -> str:
    """What a published value is, in a sentence."""
    if measurement.reduction == "dynamo_native":
        return "Imported from Dynamo's self-benchmark: of each point one sample, or the median of its decode steps."
    return (
        f"Each point: {measurement.warmup_repeats} warm-ups, {measurement.measurement_repeats} measurements; "
        f"the published value is the fifth smallest of measurements 2 to {measurement.measurement_repeats}."
    )


def render(plan_file: Path) -> str:
    """The report of a plan as one self-contained page."""
    plan = read_model(Plan, plan_file, "plan")
    cells = [read_cell(cells_folder(plan_file) / entry.name) for entry in plan.cells]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("report.html.j2").render(
        plan=plan,
        plan_sha256=sha256(read_bytes(plan_file, "plan")),
        plotlyjs=get_plotlyjs(),
        time=_html(time_figure(cells)),
        deployments=[
            deployment_section(name, planned, [cell for cell in cells if cell.frozen.deployment == name])
            for name, planned in plan.deployments.items()
        ],
        measured=how_measured(cells[0].frozen.identity.measurement),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    write_atomic(arguments.output, render(arguments.plan).encode())


if __name__ == "__main__":
    run(main)
