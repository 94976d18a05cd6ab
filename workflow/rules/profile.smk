# From the campaign file to an accepted profile: what is asked for, and what memory the engine really has.
localrules:
    resolve_request,
    import_profile,
    profiles,
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
    threads: CAMPAIGN.resources["cpus_per_task"]
    resources:
        **CAMPAIGN.resources,
        attempt=lambda wildcards, attempt: attempt,
        machine=CAMPAIGN.probe_machine,
    shell:
        f"python -m producer.launch --campaign {CAMPAIGN.file}"
        " --deployment {wildcards.deployment} --"
        f" producer.run_probe --campaign {CAMPAIGN.file}"
        " --deployment {wildcards.deployment} --digest {wildcards.probe} --phase {wildcards.phase}"
        " --output {output} --start-timeout {resources.start_timeout}"
        " --attempt {resources.attempt} 2> {log}"


rule import_profile:
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


# A first run waits here until the cells are known. Once the profiles are there no run asks for it: a checkpoint has
# Snakemake build the whole graph twice.
checkpoint profiles:
    input:
        CAMPAIGN.profile_files,
    output:
        f"{ROOT}/profile/request-{{request}}.sha256",
    log:
        f"{ROOT}/logs/profiles-{{request}}.log",
    conda:
        "../envs/judge.yaml"
    shell:
        "sha256sum {input:q} > {output} 2> {log}"


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
