localrules:
    import_native,
    rank_artifact,


# One cell, one job, one engine start. No input: the digest in the path covers all that a cell depends on. What a job
# needs while it runs is no output, cell.json and the journal: Snakemake removes outputs before a job and when one
# failed, and a driver that is late does so while the next one's job is at work.
rule collect_cell:
    output:
        artifact=f"{ROOT}/{{scope}}cells/{{cell}}/benchmark.json",
        receipt=f"{ROOT}/{{scope}}cells/{{cell}}/receipt.json",
    log:
        f"{ROOT}/logs/{{scope}}collect-{{cell}}.log",
    wildcard_constraints:
        cell=CAMPAIGN.cells_that_are("measured"),
    conda:
        "../envs/engine.yaml"
    threads: CAMPAIGN.resources["cpus_per_task"]
    resources:
        **CAMPAIGN.resources,
        attempt=lambda wildcards, attempt: attempt,
        machine=1,
        reason=CAMPAIGN.reason,  # for the dry run; a parameter that changes would measure anew
    message:
        "measure {wildcards.scope}{wildcards.cell}: {resources.reason}"
    shell:
        f"python workflow/scripts/freeze_cell.py --campaign {CAMPAIGN.file}"
        " --cell {wildcards.cell}"
        " --scope '{wildcards.scope}' --output $(dirname {output.receipt})/cell.json 2> {log}; "
        f"python -m producer.launch --campaign {CAMPAIGN.file}"
        " --cell {wildcards.cell} --"
        " producer.run_cell --cell $(dirname {output.receipt})/cell.json"
        " --start-timeout {resources.start_timeout}"
        " --step-timeout {resources.step_timeout} --attempt {resources.attempt} 2>> {log}"


# A cell that Dynamo's self-benchmark measured: its artifacts, once they are what the cell asks for.
rule import_native:
    output:
        artifact=f"{ROOT}/{{scope}}cells/{{cell}}/benchmark.json",
        receipt=f"{ROOT}/{{scope}}cells/{{cell}}/receipt.json",
    log:
        f"{ROOT}/logs/{{scope}}import-{{cell}}.log",
    wildcard_constraints:
        cell=CAMPAIGN.cells_that_are("imported"),
    conda:
        "../envs/judge.yaml"
    shell:
        f"python workflow/scripts/import_native.py --campaign {CAMPAIGN.file}"
        " --cell {wildcards.cell}"
        " --scope '{wildcards.scope}' --output {output.receipt} 2> {log}"


# The artifacts of further data-parallel ranks: how many there are is the cell's affair, so they are no outputs above.
rule rank_artifact:
    input:
        f"{ROOT}/{{scope}}cells/{{cell}}/receipt.json",
    output:
        f"{ROOT}/{{scope}}cells/{{cell}}/benchmark_dp{{rank}}.json",
    log:
        f"{ROOT}/logs/{{scope}}rank{{rank}}-{{cell}}.log",
    conda:
        "../envs/judge.yaml"
    shell:
        "python workflow/scripts/rank_artifact.py --cell $(dirname {input})/cell.json"
        " --rank {wildcards.rank}"
        " --output {output} 2> {log}"
