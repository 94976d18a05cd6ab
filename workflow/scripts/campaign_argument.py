"""The --campaign argument of the scripts that look at a whole campaign."""

import argparse
from pathlib import Path

from producer.graph import CampaignGraph
from schemas.errors import Refusal
from schemas.layout import campaign_file


def add_campaign(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--campaign", type=Path, required=True, help="campaign file")


def campaign_name(arguments: argparse.Namespace) -> str:
    file: Path = arguments.campaign
    if file != campaign_file(file.stem):
        raise Refusal("campaign", campaign_file(file.stem), file, "command line")
    return file.stem


def graph_of(arguments: argparse.Namespace) -> CampaignGraph:
    return CampaignGraph(campaign_name(arguments))
