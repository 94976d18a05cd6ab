# From the campaign file to an accepted profile: what is asked for, and what memory the engine really has.
localrules:
    resolve_request,
    import_profile,
    accept,


rule resolve_request:
    output:
        f"{ROOT}/request-{{request}}.json",
    log:
        f"{ROOT}/logs/resolve_request-{{request}}.log",
    conda:
        "../envs/judge.yaml"
    shell:
        f"python workflow/scripts/resolve_request.py --campaign {CAMPAIGN.file}"
        " --output {output} 2> {log}"


# No input: the digest in the path covers all that a probe depends on.
rule probe:
    output:
        f"{ROOT}/probe/{{deployment}}-{{probe}}/{{phase}}.json",
    log:
        f"{ROOT}/logs/probe-{{deployment}}-{{probe}}-{{phase}}.log",
    conda:
        "../envs/engine.yaml"
    threads: CAMPAIGN.resource("cpus_per_task")
    resources:
        **CAMPAIGN.asked(
            slurm_partition="partition", slurm_account="account", gres="gres"
        ),
        machine=CAMPAIGN.probe_machine,
        cpus_per_task=CAMPAIGN.resource("cpus_per_task"),  # threads are cut to the driver's cores
        mem_mb=CAMPAIGN.resource("mem_mb"),
        runtime=CAMPAIGN.resource("runtime_minutes"),
        start_timeout=CAMPAIGN.resource("start_timeout_seconds"),
        attempt=lambda wildcards, attempt: attempt,
    shell:
        f"python -m producer.run_probe --campaign {CAMPAIGN.file}"
        " --deployment {wildcards.deployment} --digest {wildcards.probe} --phase {wildcards.phase}"
        " --output {output} --start-timeout {resources.start_timeout}"
        " --attempt {resources.attempt} 2> {log}"


checkpoint import_profile:
    input:
        lambda wildcards: CAMPAIGN.probe_files(wildcards.deployment),
    output:
        f"{ROOT}/profile/{{deployment}}-{{probe}}.json",
    log:
        f"{ROOT}/logs/import-{{deployment}}-{{probe}}.log",
    conda:
        "../envs/judge.yaml"
    shell:
        f"python workflow/scripts/import_profile.py --campaign {CAMPAIGN.file}"
        " --deployment {wildcards.deployment}"
        " --output {output} {input} 2> {log}"


# In the graph only while the campaign file does not name the profile's digest: it then says which digest that is.
rule accept:
    input:
        lambda wildcards: str(CAMPAIGN.profile_file(wildcards.deployment)),
    output:
        f"{ROOT}/profile/{{deployment}}-{{probe}}.accepted",
    log:
        f"{ROOT}/logs/accept-{{deployment}}-{{probe}}.log",
    conda:
        "../envs/judge.yaml"
    shell:
        f"python workflow/scripts/accept.py --campaign {CAMPAIGN.file}"
        " --deployment {wildcards.deployment}"
        " --profile {input} --output {output} 2>&1 | tee {log} >&2"
