"""Write the artifact of one data-parallel rank of a cell again: from its journal, or as it was imported."""

import argparse
from pathlib import Path

from producer.artifact import assemble
from producer.journal import read_journal
from schemas.canonical import read_bytes, read_model, write_atomic
from schemas.errors import run
from schemas.imported import IMPORTED, is_imported
from schemas.layout import rank_file
from schemas.native import write_struct
from schemas.plan import FrozenCell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", type=Path, required=True, help="cell.json; its journal lies beside it")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if is_imported(arguments.cell.with_name("receipt.json")):
        kept = arguments.cell.parent / IMPORTED / rank_file(arguments.rank)
        write_atomic(arguments.output, read_bytes(kept, "imported artifact"))
        return
    cell = read_model(FrozenCell, arguments.cell, "frozen cell")
    journal = read_journal(arguments.cell.parent / "repetitions.jsonl", cell.digest)
    write_struct(arguments.output, assemble(cell, journal, arguments.rank))


if __name__ == "__main__":
    run(main)
