# The plan and its frozen points, named by digest: a change of the campaign makes new files and touches no old one.
localrules:
    plan_campaign,
    plan_smoke,


# A rule a scope: these outputs are as many as the deployments, and Snakemake compares each file of a cell with all
# outputs that begin like it.
rule plan_campaign:
    input:
        CAMPAIGN.profile_files,
    output:
        plan=f"{ROOT}/plan-{{plan}}/plan.json",
        lists=CAMPAIGN.of_deployments(f"{ROOT}/plan-{{plan}}"),
    log:
        f"{ROOT}/logs/plan-{{plan}}.log",
    conda:
        "../envs/judge.yaml"
    params:
        scope="formal",
    shell:
        f"python workflow/scripts/plan_campaign.py --campaign {CAMPAIGN.file}"
        " --plan {wildcards.plan} --scope {params.scope} --output {output.plan} 2> {log}"


use rule plan_campaign as plan_smoke with:
    output:
        plan=f"{ROOT}/smoke/plan-{{plan}}/plan.json",
        lists=CAMPAIGN.of_deployments(f"{ROOT}/smoke/plan-{{plan}}"),
    log:
        f"{ROOT}/logs/smoke/plan-{{plan}}.log",
    params:
        scope="smoke",
