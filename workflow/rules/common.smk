# The campaign, read once, and the one function that waits for its profiles.
from producer.parsed import ParsedCampaign
from schemas.layout import REPEAT_PREFIX

CAMPAIGN = ParsedCampaign(
    str(config["campaign"]), policy=str(config.get("policy", "collection"))
)
ROOT = str(CAMPAIGN.layout.root)
CELL_FILES = (
    "benchmark.json",
    "receipt.json",
    "merged.json",
    "evidence.json",
)


resource_scopes:
    machine="local",  # one engine at a time on one machine; a cluster's jobs have machines of their own


wildcard_constraints:
    scope=f"(smoke/|{REPEAT_PREFIX.pattern})?",
    plan="[0-9a-f]{16}",
    probe="[0-9a-f]{16}",
    request="[0-9a-f]{16}",
    rank="[1-9][0-9]*",
    cell="(prefill|decode)-[A-Za-z0-9][A-Za-z0-9_.-]*",
    deployment="[A-Za-z0-9][A-Za-z0-9_.-]*",
    phase="prefill|decode",


def after_import(scope, *names, of_cells=(), repeated=False):
    """Input function: files of the plan and its cells, as soon as every profile is there (a first run waits)."""

    def files(wildcards):
        if CAMPAIGN.missing_profiles:
            checkpoints.profiles.get(request=CAMPAIGN.request_name)
        if repeated:
            return CAMPAIGN.repeat_targets(names, of_cells)
        return CAMPAIGN.targets(scope, names, of_cells)

    return files
