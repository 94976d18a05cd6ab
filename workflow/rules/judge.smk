# Judging: ordinary scripts that need no engine.
localrules:
    merge_ranks,
    verify_cell,
    assess_readiness,
    require_ready,
    assess_repeatability,


rule merge_ranks:
    input:
        ranks=CAMPAIGN.rank_files,
        receipt=f"{ROOT}/{{scope}}cells/{{cell}}/receipt.json",
    output:
        f"{ROOT}/{{scope}}cells/{{cell}}/merged.json",
    log:
        f"{ROOT}/logs/{{scope}}merge-{{cell}}.log",
    conda:
        "../envs/judge.yaml"
    shell:
        "python workflow/scripts/merge_ranks.py --cell $(dirname {input.receipt})/cell.json"
        " --receipt {input.receipt} --output {output}"
        " {input.ranks} 2> {log}"


rule verify_cell:
    input:
        ranks=CAMPAIGN.rank_files,
        receipt=f"{ROOT}/{{scope}}cells/{{cell}}/receipt.json",
        merged=f"{ROOT}/{{scope}}cells/{{cell}}/merged.json",
        accepted=lambda wildcards: CAMPAIGN.accepted_files(wildcards.cell),
    output:
        f"{ROOT}/{{scope}}cells/{{cell}}/evidence.json",
    log:
        f"{ROOT}/logs/{{scope}}verify-{{cell}}.log",
    conda:
        "../envs/judge.yaml"
    shell:
        "python workflow/scripts/verify_cell.py --folder $(dirname {input.receipt})"
        " --accepted {input.accepted:q} --output {output} 2> {log}"


rule assess_readiness:
    input:
        plan=f"{ROOT}/{{scope}}plan-{{plan}}/plan.json",
        evidence=lambda wildcards: CAMPAIGN.of_cells(
            wildcards.scope, "evidence.json", "merged.json"
        ),
    output:
        f"{ROOT}/{{scope}}plan-{{plan}}/readiness.json",
    log:
        f"{ROOT}/logs/{{scope}}readiness-{{plan}}.log",
    conda:
        "../envs/judge.yaml"
    shell:
        f"python workflow/scripts/assess_readiness.py --campaign {CAMPAIGN.file}"
        " --plan {input.plan} --output {output} 2> {log}"


# A smoke run that found something ends with it, and keeps the verdict.
rule require_ready:
    input:
        f"{ROOT}/{{scope}}plan-{{plan}}/readiness.json",
    output:
        f"{ROOT}/{{scope}}plan-{{plan}}/ready",
    log:
        f"{ROOT}/logs/{{scope}}ready-{{plan}}.log",
    conda:
        "../envs/judge.yaml"
    shell:
        "python workflow/scripts/require_ready.py --readiness {input} --output {output} 2> {log}"


rule assess_repeatability:
    input:
        policy=CAMPAIGN.policy_file,
        plan=f"{ROOT}/plan-{{plan}}/plan.json",
        source=lambda wildcards: CAMPAIGN.of_cells("", "evidence.json", "merged.json"),
        repeats=lambda wildcards: CAMPAIGN.of_repeats("evidence.json", "merged.json"),
    output:
        f"{ROOT}/plan-{{plan}}/repeatability.json",
    log:
        f"{ROOT}/logs/repeatability-{{plan}}.log",
    conda:
        "../envs/judge.yaml"
    shell:
        "python workflow/scripts/repeatability.py --plan {input.plan} --policy {input.policy:q}"
        " --output {output} > {log} 2>&1"
