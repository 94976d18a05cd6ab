"""Ways to forge the files of a measured cell, and what the judges then say."""

import json
from pathlib import Path

from conftest import ROOT

from producer.artifact import assemble, receipt
from producer.journal import read_journal
from schemas.canonical import read_model, sha256, short, write_atomic
from schemas.layout import rank_file, rank_files
from schemas.merged import merged_bytes
from schemas.native import write_struct
from schemas.plan import FrozenCell

from merge_ranks import merge_files
from verify_cell import read_cell, verify


def rewrite(file: Path, change, whole: bool = False) -> None:
    """Change a JSON file in place; `whole` also renews its digest in the receipt, as a forger would."""
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data, indent=2))
    if whole:
        renew(file)


def renew(file: Path) -> None:
    receipt = file.parent / "receipt.json"
    data = json.loads(receipt.read_text())
    data["files"][file.name] = sha256(file.read_bytes())
    receipt.write_text(json.dumps(data))


def rewrite_line(folder: Path, number: int, change, derive: bool = False) -> None:
    """Change one line of the journal, and renew chain and receipt, as a forger would.

    `derive` also makes artifact, receipt and merged file anew from the changed journal: only the contents give it away.
    """
    journal = folder / "repetitions.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    change(lines[number])
    previous, data = sha256(b""), b""
    for line in lines:
        encoded = json.dumps(line | {"previous_sha256": previous}, separators=(",", ":")).encode()
        previous, data = sha256(encoded), data + encoded + b"\n"
    journal.write_bytes(data)
    renew(journal)
    if derive:
        cell = read_model(FrozenCell, folder / "cell.json", "frozen cell")
        read = read_journal(journal, cell.digest)
        files = {"repetitions.jsonl": sha256(data)}
        for rank in range(read.ranks):
            files[rank_file(rank)] = write_struct(folder / rank_file(rank), assemble(cell, read, rank))
        write_struct(folder / "receipt.json", receipt(cell, read, files))
        write_atomic(folder / "merged.json", merged_bytes(merged(folder)))


def accepted_of(folder: Path) -> list[Path]:
    """What the launches of a cell, or of a copy of it, are bound to: the profile and the record of its campaign."""
    cell = read_model(FrozenCell, folder / "cell.json", "frozen cell")
    name = f"{cell.deployment}-{short(cell.identity.probe_digest)}"
    (profile,) = (ROOT / "results").glob(f"*/profile/{name}.json")
    return [profile, profile.parent.parent / "probe" / name / f"{cell.identity.phase}.json"]


def failures(folder: Path) -> str:
    evidence = verify(read_cell(folder, accepted_of(folder)))
    assert evidence.state == "failed"
    return "\n".join(evidence.failures)


def merged(folder: Path):
    cell = read_model(FrozenCell, folder / "cell.json", "frozen cell")
    return merge_files(cell, folder / "receipt.json", rank_files(folder, cell.identity.topology.dp))
