# The campaign, read once, and the one function that waits for its profiles.
from producer.graph import ParsedCampaign

CAMPAIGN = ParsedCampaign(str(config["campaign"]))
ROOT = str(CAMPAIGN.layout.root)
CELL_FILES = ("benchmark.json", "receipt.json", "merged.json", "evidence.json")


resource_scopes:
    machine="local",  # one engine at a time on one machine; a cluster's jobs have machines of their own


wildcard_constraints:
    scope="(smoke/)?",
    plan="[0-9a-f]{16}",
    probe="[0-9a-f]{16}",
    rank="[1-9][0-9]*",
    deployment="|".join(CAMPAIGN.deployments),
    phase="prefill|decode",


def after_import(scope, *names, of_cells=()):
    """Input function: files of the plan and its cells, as soon as every profile is there (a first run waits)."""

    def files(wildcards):
        for missing in CAMPAIGN.missing_profiles:
            checkpoints.import_profile.get(**missing)
        return CAMPAIGN.targets(scope, names, of_cells)

    return files
