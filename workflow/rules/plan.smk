# Frozen points and cells. Both are named by digest, so a change of the campaign makes new files and touches no old one.
localrules:
    plan_campaign,
    freeze_cell,


rule plan_campaign:
    input:
        CAMPAIGN.profile_files,
    output:
        plan=f"{ROOT}/{{scope}}plan-{{plan}}/plan.json",
        lists=CAMPAIGN.of_deployments(f"{ROOT}/{{scope}}plan-{{plan}}"),
    log:
        f"{ROOT}/logs/{{scope}}plan-{{plan}}.log",
    conda:
        "../envs/judge.yaml"
    shell:
        f"python workflow/scripts/plan_campaign.py --campaign {CAMPAIGN.file}"
        " --plan {wildcards.plan} --output {output.plan}"
        " --scope '{wildcards.scope}' 2> {log}"


# The profile is `ancient`: its digest-named path says all, and a new time stamp must not measure a cell again.
rule freeze_cell:
    input:
        lambda wildcards: ancient(CAMPAIGN.profile_of_cell(wildcards.cell)),
    output:
        f"{ROOT}/{{scope}}cells/{{cell}}/cell.json",
    log:
        f"{ROOT}/logs/{{scope}}freeze-{{cell}}.log",
    conda:
        "../envs/judge.yaml"
    shell:
        f"python workflow/scripts/freeze_cell.py --campaign {CAMPAIGN.file}"
        " --cell {wildcards.cell}"
        " --scope '{wildcards.scope}' --output {output} 2> {log}"
