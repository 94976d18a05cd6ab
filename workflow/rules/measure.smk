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
        machine=1,
        cpus_per_task=CAMPAIGN.resource("cpus_per_task"),  # threads are cut to the driver's cores
        mem_mb=CAMPAIGN.resource("mem_mb"),
        runtime=CAMPAIGN.resource("runtime_minutes"),
        slurm_partition=CAMPAIGN.resource("partition"),
        slurm_account=CAMPAIGN.resource("account"),
        gres=CAMPAIGN.resource("gres"),
    shell:
        "python -m producer.run_cell --cell {input} 2> {log}"
