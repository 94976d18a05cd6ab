"""Write the artifact of one data-parallel rank of a measured cell again, from its journal."""

import argparse
from pathlib import Path

from producer.artifact import assemble
from producer.journal import read_journal
from schemas.canonical import read_model
from schemas.errors import run
from schemas.native import write_struct
from schemas.plan import FrozenCell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", type=Path, required=True, help="cell.json; its journal lies beside it")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    cell = read_model(FrozenCell, arguments.cell, "frozen cell")
    journal = read_journal(arguments.cell.parent / "repetitions.jsonl", cell.digest)
    write_struct(arguments.output, assemble(cell, journal, arguments.rank))


if __name__ == "__main__":
    run(main)
