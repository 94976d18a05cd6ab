"""Write the JSON schema of a campaign file, for editors: config/campaign.schema.json."""

import json
from pathlib import Path

from schemas.request import Campaign

FILE = Path("config/campaign.schema.json")


def schema_text() -> str:
    return json.dumps(Campaign.model_json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(schema_text())
