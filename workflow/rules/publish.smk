# What leaves the project: a systems root that the consumers load, its finalization, and a report for people.
localrules:
    publish,
    finalize,
    report,


PAIR = CAMPAIGN.pair(f"{ROOT}/plan-{{plan}}")


rule publish:
    input:
        plan=f"{ROOT}/plan-{{plan}}/plan.json",
        readiness=f"{ROOT}/plan-{{plan}}/readiness.json",
        cells=lambda wildcards: CAMPAIGN.of_cells("", "evidence.json", "merged.json"),
    output:
        f"{PAIR}/fpm_forward_perf.parquet",
        f"{PAIR}/fpm_forward_perf.metadata.json",
        f"{ROOT}/plan-{{plan}}/systems/{CAMPAIGN.system}.yaml",
    log:
        f"{ROOT}/logs/publish-{{plan}}.log",
    conda:
        "../envs/judge.yaml"
    shell:
        "python workflow/scripts/publish.py --plan {input.plan} --readiness {input.readiness} 2> {log}"


rule finalize:
    input:
        f"{PAIR}/fpm_forward_perf.parquet",
        f"{PAIR}/fpm_forward_perf.metadata.json",
        plan=f"{ROOT}/plan-{{plan}}/plan.json",
    output:
        f"{ROOT}/plan-{{plan}}/final/finalization.json",
    log:
        f"{ROOT}/logs/finalize-{{plan}}.log",
    conda:
        "../envs/judge.yaml"
    shell:
        f"python workflow/scripts/finalize.py --campaign {CAMPAIGN.file}"
        " --plan {input.plan} --output {output} 2> {log}"


rule report:
    input:
        plan=f"{ROOT}/plan-{{plan}}/plan.json",
        cells=lambda wildcards: CAMPAIGN.of_cells(
            "", "merged.json", "evidence.json", "receipt.json"
        ),
        pair=f"{PAIR}/fpm_forward_perf.metadata.json",
    output:
        f"{ROOT}/plan-{{plan}}/report.html",
    log:
        f"{ROOT}/logs/report-{{plan}}.log",
    conda:
        "../envs/judge.yaml"
    shell:
        "python workflow/scripts/report.py --plan {input.plan} --output {output} 2> {log}"
