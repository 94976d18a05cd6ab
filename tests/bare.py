"""A Snakefile that is nothing but the shape of a campaign: what Snakemake itself takes for as many jobs and files."""

import json
from pathlib import Path

SNAKEFILE = """
import json
CELLS = json.load(open("cells.json"))
PROBES = sorted({cell.split("-", 1)[1] for cell in CELLS})

localrules: all, import_profile, merge, verify, plan, readiness, publish, report

rule all:
    input:
        [f"results/profile/{probe}.json" for probe in PROBES],
        [f"results/cells/{cell}/{name}" for cell in CELLS for name in ("benchmark.json", "receipt.json", "merged.json", "evidence.json")],
        "results/report.html",

rule probe:
    output: "results/probe/{deployment}-{probe}/{phase}.json"
    log: "results/logs/probe-{deployment}-{probe}-{phase}.log"
    threads: 1
    resources: machine=1, mem_mb=8000, runtime=240, cpus_per_task=1
    shell: "probe --output {output} 2> {log}"

rule import_profile:
    input: "results/probe/{deployment}-{probe}/prefill.json", "results/probe/{deployment}-{probe}/decode.json"
    output: "results/profile/{deployment}-{probe}.json"
    log: "results/logs/import-{deployment}-{probe}.log"
    shell: "import --output {output} {input} 2> {log}"

rule collect:
    output:
        artifact="results/cells/{cell}/benchmark.json",
        receipt="results/cells/{cell}/receipt.json",
    log: "results/logs/collect-{cell}.log"
    threads: 1
    resources: machine=1, mem_mb=8000, runtime=240, cpus_per_task=1
    shell: "collect --cell results/cells/{wildcards.cell}/cell.json 2> {log}"

rule merge:
    input:
        ranks="results/cells/{cell}/benchmark.json",
        receipt="results/cells/{cell}/receipt.json",
    output: "results/cells/{cell}/merged.json"
    log: "results/logs/merge-{cell}.log"
    shell: "merge --cell results/cells/{wildcards.cell}/cell.json --output {output} 2> {log}"

rule verify:
    input:
        ranks="results/cells/{cell}/benchmark.json",
        receipt="results/cells/{cell}/receipt.json",
        merged="results/cells/{cell}/merged.json",
    output: "results/cells/{cell}/evidence.json"
    log: "results/logs/verify-{cell}.log"
    shell: "verify --cell results/cells/{wildcards.cell}/cell.json --output {output} 2> {log}"

rule plan:
    input: [f"results/profile/{probe}.json" for probe in PROBES]
    output:
        plan="results/plan/plan.json",
        lists=[f"results/plan/{kind}/{probe}.json" for kind in ("points", "profiles") for probe in PROBES],
    log: "results/logs/plan.log"
    shell: "plan --output {output.plan} 2> {log}"

rule readiness:
    input:
        plan="results/plan/plan.json",
        evidence=[f"results/cells/{cell}/{name}" for cell in CELLS for name in ("evidence.json", "merged.json")],
    output: "results/readiness.json"
    log: "results/logs/readiness.log"
    shell: "readiness --output {output} 2> {log}"

rule publish:
    input:
        plan="results/plan/plan.json",
        readiness="results/readiness.json",
        cells=[f"results/cells/{cell}/{name}" for cell in CELLS for name in ("evidence.json", "merged.json")],
    output: "results/table.parquet"
    log: "results/logs/publish.log"
    shell: "publish --plan {input.plan} 2> {log}"

rule report:
    input:
        plan="results/plan/plan.json",
        cells=[f"results/cells/{cell}/{name}" for cell in CELLS for name in ("merged.json", "evidence.json", "receipt.json")],
        table="results/table.parquet",
    output: "results/report.html"
    log: "results/logs/report.log"
    shell: "report --output {output} 2> {log}"
"""


def bare_workflow(folder: Path, cells: int) -> None:
    """`cells` cells of half as many deployments, whose probes and profiles are there."""
    deployments = [f"dense{number:05}-{'0' * 16}" for number in range(cells // 2)]
    (folder / "Snakefile").write_text(SNAKEFILE)
    names = [f"{phase}-{deployment}" for deployment in deployments for phase in ("prefill", "decode")]
    (folder / "cells.json").write_text(json.dumps(names))
    (folder / "results/profile").mkdir(parents=True)
    for deployment in deployments:
        probe = folder / "results/probe" / deployment
        probe.mkdir(parents=True)
        for file in (probe / "prefill.json", probe / "decode.json", folder / f"results/profile/{deployment}.json"):
            file.write_text("{}")
