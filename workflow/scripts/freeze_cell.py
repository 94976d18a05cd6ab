"""Write one cell of the plan as the self-contained file that a GPU job measures."""

import argparse
from pathlib import Path

from schemas.canonical import write_model
from schemas.errors import run
from schemas.layout import scope_of

from campaign_argument import add_campaign, graph_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_campaign(parser)
    parser.add_argument("--cell", required=True, help="<phase>-<deployment>-<digest>")
    parser.add_argument("--scope", default="", help='"" or "smoke/"')
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    graph = graph_of(arguments)
    write_model(arguments.output, graph.frozen_cell(scope_of(arguments.scope), arguments.cell))


if __name__ == "__main__":
    run(main)
