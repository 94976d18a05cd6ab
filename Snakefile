# passgrid: declarative benchmark campaigns of LLM forward passes. A table of contents; the rules say how.
from snakemake.utils import min_version

min_version("9.27")


configfile: "config/config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/profile.smk"
include: "workflow/rules/plan.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/judge.smk"
include: "workflow/rules/publish.smk"


localrules:
    all,
    plan,
    smoke,
    repeatability,


# Everything: the published table, finalized, and the report.
rule all:
    default_target: True
    input:
        CAMPAIGN.request_file,
        CAMPAIGN.profile_files,
        after_import(
            "formal", "final/finalization.json", "report.html", of_cells=CELL_FILES
        ),


# Only the plan: which cells there are.
rule plan:
    input:
        CAMPAIGN.request_file,
        CAMPAIGN.profile_files,
        after_import("formal", "plan.json"),


# A few points of every cell through every check; nothing is published.
rule smoke:
    input:
        CAMPAIGN.request_file,
        CAMPAIGN.profile_files,
        after_import("smoke", "readiness.json", "ready", of_cells=CELL_FILES),


# Every cell again, as often as the policy says and each time in an engine of its own: do the values come out again?
rule repeatability:
    input:
        CAMPAIGN.request_file,
        CAMPAIGN.profile_files,
        policy=CAMPAIGN.policy_file,
        verdict=after_import("formal", "repeatability.json"),
        cells=after_import("formal", of_cells=CELL_FILES, repeated=True),
    log:
        f"{ROOT}/logs/repeatability.log",
    conda:
        "workflow/envs/judge.yaml"
    shell:
        "python workflow/scripts/require_repeatable.py --verdict {input.verdict} --policy {input.policy:q}"
        " 2>&1 | tee {log} >&2"


onsuccess:
    shell("python workflow/scripts/show.py --campaign {CAMPAIGN.file}")
