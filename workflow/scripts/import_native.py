"""Import a cell that Dynamo's self-benchmark measured: a folder of artifacts becomes a cell of the campaign.

Files are told apart by what they hold, not by their names.
"""

import argparse
import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from producer.graph import CampaignGraph
from schemas.canonical import read_bytes, write_atomic, write_model
from schemas.errors import Refusal, run
from schemas.imported import IMPORTED, ImportReceipt
from schemas.layout import rank_file, rank_files
from schemas.native import write_struct
from schemas.plan import FrozenCell

from campaign_argument import add_campaign, graph_of
from import_checks import check_imported
from merge_ranks import Ranks, cell_findings, findings

GZIP = b"\x1f\x8b"
WORKER_PROBE = "dynamo.fpm.benchmark_worker_probe"
RECEIPT_VERSION = 1


class Head(msgspec.Struct, frozen=True):
    """What tells the files of a benchmark apart; all else of a file is left alone."""

    artifact_type: str | UnsetType = UNSET
    schema: str | UnsetType = UNSET
    status: str | None = None
    stop_reason: str | None = None
    error: str | None = None
    run_id: str | None = None
    config: dict[str, Any] = {}
    dp: dict[str, Any] = {}
    prefill: msgspec.Raw | UnsetType = UNSET
    decode: msgspec.Raw | UnsetType = UNSET


class Found(NamedTuple):
    """A file of the folder: what it is, in words, and its bytes; `head` only of a rank's artifact."""

    file: Path
    what: str
    data: bytes
    head: Head | None = None


def recognise(file: Path) -> Found:
    """What a file is, by what it holds; a name counts only for a file that may still be written."""
    data = read_bytes(file, "artifact")
    if data.startswith(GZIP):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            return Found(file, f"no artifact: {error}", data)
    if file.suffix == ".tmp":
        return Found(file, "a temporary file, still being written or left by a crash", data)
    try:
        head = msgspec.json.decode(data, type=Head)
    except msgspec.MsgspecError as error:
        return Found(file, f"no artifact: {error}", data)
    if head.artifact_type == "merged":
        return Found(file, "the launcher's merged file", data)
    if head.schema == WORKER_PROBE:
        return Found(file, "the launcher's worker probe", data)
    if head.artifact_type == "rank":
        state = str(head.status) + "".join(f", {why}" for why in (head.stop_reason, head.error) if why)
        return Found(file, f"a rank artifact of mode {head.config.get('mode')} ({state})", data, head)
    if head.prefill is not UNSET and head.decode is not UNSET:
        return Found(file, "a point manifest", data)
    return Found(file, "JSON that is no artifact", data)


def choose(cell: FrozenCell, found: Sequence[Found], folder: Path) -> list[Found]:
    """The complete artifacts of the cell's phase in rank order: one run's, each rank once.

    Raises:
        Refusal: what lies there instead.
    """
    phase, world = cell.identity.phase, list(range(cell.identity.topology.dp))
    fitting = [
        (each.head, each)
        for each in found
        if each.head is not None and each.head.status == "complete" and each.head.config.get("mode") == phase
    ]
    wanted = f"complete rank artifacts of mode {phase}, one for each of the dp ranks {world}"
    if not fitting:
        there = "; ".join(f"{each.file.name}: {each.what}" for each in found) or "an empty folder"
        raise Refusal("artifacts", wanted, there, folder)
    runs = sorted({str(head.run_id) for head, _ in fitting})
    if len(runs) > 1:
        names = ", ".join(f"{each.file.name} of run {head.run_id}" for head, each in fitting)
        raise Refusal("artifacts", f"one run of mode {phase}", names, folder)
    ranks = [head.dp.get("rank") for head, _ in fitting]
    if sorted(map(repr, ranks)) != sorted(map(repr, world)):  # by type too: true is no rank, nor is "0"
        raise Refusal("artifacts: dp.rank", world, ranks, folder)
    return [each for _, each in sorted(fitting, key=_rank)]


def _rank(fitting: tuple[Head, Found]) -> int:
    rank: int = fitting[0].dp["rank"]
    return rank


def producer_of(ranks: Ranks) -> str:
    """Who measured, by rank 0's engine block."""
    engine = ranks.artifacts[0].engine
    versions = {} if engine is UNSET else engine.get("versions", {})
    return ", ".join(f"{name} {versions[name]}" for name in ("dynamo", "vllm") if versions.get(name)) or "unrecorded"


def failures(cell: FrozenCell, ranks: Ranks, receipt_file: Path) -> Iterator[str]:
    """Everything that stands against the import."""
    refusals = [*cell_findings(cell, receipt_file, ranks.sha256, ranks), *findings(ranks)]
    yield from map(str, refusals)
    if not refusals:
        yield from check_imported(cell, ranks.artifacts, receipt_file.parent)


def import_cell(cell: FrozenCell, artifacts: Path, folder: Path) -> ImportReceipt:
    """Copy the artifacts of a cell into its folder; nothing that was imported before is overwritten.

    Raises:
        Refusal: no complete run of the cell's phase, the first thing that stands against it, or another import before.
    """
    if not artifacts.is_dir():
        raise Refusal("artifacts", "a folder", "none", artifacts)
    found = [recognise(file) for file in sorted(artifacts.iterdir()) if file.is_file()]
    chosen = choose(cell, found, artifacts)
    for rank, each in enumerate(chosen):
        kept = folder / IMPORTED / rank_file(rank)
        if kept.exists() and kept.read_bytes() != each.data:
            raise Refusal(f"{kept.name} of {cell.name}", f"the artifact imported before, {kept}", "another", each.file)
    ranks = Ranks(rank_files(folder, len(chosen)), (each.data for each in chosen))
    receipt_file = folder / "receipt.json"
    for line in failures(cell, ranks, receipt_file):
        raise Refusal(f"artifacts of {cell.name}", "what the cell asks for", line, artifacts)
    for rank, each in enumerate(chosen):
        for target in (folder / IMPORTED / rank_file(rank), folder / rank_file(rank)):
            write_atomic(target, each.data)
    write_model(folder / "cell.json", cell)
    receipt = ImportReceipt(
        schema_version=RECEIPT_VERSION,
        cell_digest=cell.digest,
        files=ranks.sha256,
        sources=[each.file.name for each in chosen],
        beside={each.file.name: each.what for each in found if each not in chosen},
        run_id=ranks.artifacts[0].run_id,
        producer=producer_of(ranks),
    )
    write_struct(receipt_file, receipt)
    return receipt


def artifacts_folder(graph: CampaignGraph, cell: FrozenCell) -> Path:
    """Where the campaign says that the artifacts of a cell lie."""
    folder = graph.campaign.deployments[cell.deployment].artifacts
    if folder is None:
        wanted = "a folder of Dynamo's artifacts: without one the cell is measured"
        raise Refusal(f"deployments.{cell.deployment}.artifacts", wanted, "nothing", graph.file)
    return Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_campaign(parser)
    parser.add_argument("--cell", required=True, help="<phase>-<deployment>-<digest>")
    parser.add_argument("--scope", default="", help='"" or "smoke/"')
    parser.add_argument("--output", type=Path, required=True, help="receipt.json of the cell")
    arguments = parser.parse_args()
    graph = graph_of(arguments)
    cell = graph.frozen_cell(arguments.scope, arguments.cell)
    receipt = import_cell(cell, artifacts_folder(graph, cell), arguments.output.parent)
    print(f"{cell.name}: {', '.join(receipt.sources)} of run {receipt.run_id}, {receipt.producer}")


if __name__ == "__main__":
    run(main)
