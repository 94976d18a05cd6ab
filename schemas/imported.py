"""The receipt of a cell that Dynamo measured and that was imported."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.native import CellReceipt, Int, Struct, read_struct

IMPORTED = "imported"
"""Folder of a cell with the artifacts as they were found, under the names of their ranks."""


class ImportReceipt(Struct, frozen=True):
    """`receipt.json` of an imported cell: its files by digest, and where they came from.

    `sources` are the artifacts' names in their folder, by rank; `beside` what else lay there, by name: the merged file
    of Dynamo's launcher, its worker probe, and artifacts of other runs.
    """

    schema_version: Int
    cell_digest: str
    files: dict[str, str]
    sources: Annotated[list[str], Meta(min_length=1)]
    beside: dict[str, str]
    run_id: str
    producer: str


class ReceiptKind(msgspec.Struct, frozen=True):
    """What tells the receipt of an imported cell from that of a measured one."""

    sources: list[str] | None = None


def read_receipt(file: Path) -> CellReceipt | ImportReceipt:
    """The receipt of a cell, of either kind, strictly."""
    if is_imported(file):
        return read_struct(ImportReceipt, file, "receipt")
    return read_struct(CellReceipt, file, "receipt")


def is_imported(file: Path) -> bool:
    """Whether the cell of a receipt was imported."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ReceiptKind).sources is not None
    except (OSError, msgspec.MsgspecError):
        return False  # whoever reads it says what is wrong
