"""Write one cell of the plan as the self-contained file that a GPU job measures."""

import argparse
from pathlib import Path

from schemas.canonical import write_model
from schemas.errors import run

from campaign_argument import add_campaign, graph_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_campaign(parser)
    parser.add_argument("--cell", required=True, help="<phase>-<deployment>-<digest>")
    parser.add_argument("--scope", default="", help='prefix of its path: "", "smoke/" or a repeat\'s')
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    graph = graph_of(arguments)
    write_model(arguments.output, graph.frozen_cell(arguments.scope, arguments.cell))


if __name__ == "__main__":
    run(main)
