localrules:
    rank_artifact,


# One cell, one job, one engine start. The journal beside the outputs is no output: a failed or forced job keeps it,
# and what is in it is never measured again.
rule collect_cell:
    input:
        ancient(f"{ROOT}/{{scope}}cells/{{cell}}/cell.json"),
    output:
        f"{ROOT}/{{scope}}cells/{{cell}}/benchmark.json",
        f"{ROOT}/{{scope}}cells/{{cell}}/receipt.json",
    log:
        f"{ROOT}/logs/{{scope}}collect-{{cell}}.log",
    conda:
        "../envs/engine.yaml"
    threads: CAMPAIGN.resource("cpus_per_task")
    resources:
        **CAMPAIGN.asked(
            slurm_partition="partition", slurm_account="account", gres="gres"
        ),
        machine=1,
        cpus_per_task=CAMPAIGN.resource("cpus_per_task"),  # threads are cut to the driver's cores
        mem_mb=CAMPAIGN.resource("mem_mb"),
        runtime=CAMPAIGN.resource("runtime_minutes"),
        start_timeout=CAMPAIGN.resource("start_timeout_seconds"),
        step_timeout=CAMPAIGN.resource("step_timeout_seconds"),
        attempt=lambda wildcards, attempt: attempt,
    shell:
        "python -m producer.run_cell --cell {input} --start-timeout {resources.start_timeout}"
        " --step-timeout {resources.step_timeout} --attempt {resources.attempt} 2> {log}"


# The artifacts of further data-parallel ranks: how many there are is the cell's affair, so they are no outputs above.
rule rank_artifact:
    input:
        cell=ancient(f"{ROOT}/{{scope}}cells/{{cell}}/cell.json"),
        receipt=f"{ROOT}/{{scope}}cells/{{cell}}/receipt.json",
    output:
        f"{ROOT}/{{scope}}cells/{{cell}}/benchmark_dp{{rank}}.json",
    log:
        f"{ROOT}/logs/{{scope}}rank{{rank}}-{{cell}}.log",
    conda:
        "../envs/judge.yaml"
    shell:
        "python workflow/scripts/rank_artifact.py --cell {input.cell} --rank {wildcards.rank}"
        " --output {output} 2> {log}"
