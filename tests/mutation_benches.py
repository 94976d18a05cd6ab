"""Where a mutant is judged: a copy of a cell's folder, the project's own judges, in this process.

A bench writes the files that a forger would leave, lets `finalize.check_cell` and `publish.rows_of_cell` say what they
are worth, and puts the originals back.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from mutants import NAN
from native_samples import cell_of
from tampering import accepted_of

from producer.artifact import assemble, receipt
from producer.journal import read_journal
from schemas.canonical import canonical_bytes, digest, read_model, sha256
from schemas.errors import Refusal
from schemas.evidence import CellEvidence
from schemas.layout import rank_file
from schemas.merged import merged_bytes
from schemas.native import struct_bytes
from schemas.plan import DeploymentPlan, FrozenCell, Plan

from finalize import check_cell
from import_native import import_cell
from merge_ranks import merge_files
from publish import read_values, rows_of_cell
from verify_cell import read_cell, verify

JOURNAL = "repetitions.jsonl"

Forgery = Literal["plain", "renewed", "derived"]
"""plain: the file alone is changed. renewed: so is every digest of it in another file, and the chain of the journal.
derived: artifacts, receipt, merged file and evidence are made anew from the changed journal, or from the changed
artifact that is imported."""

Outcome = Literal["refused", "crashed", "verdict", "rows", "survived"]
"""verdict: accepted with another state, gap, label or count. rows: accepted, with another latency or coordinate.
crashed: an exception that is no refusal."""

OF_THE_RUN = {"cell_id", "source_plan_sha256", "collector_attempt_id", "runtime_run_id", "runtime_grid_digest"}
DIGESTS = {"cell_digest", "merged_sha256", "run_id", "grid_digest"}
"""Columns of a row, and fields of the evidence, that name what was judged: another name is no other verdict."""


class Verdict(NamedTuple):
    evidence: dict[str, Any]
    rows: list[dict[str, Any]]


class Judged(NamedTuple):
    """What became of a mutant, and the first finding against it."""

    outcome: Outcome
    words: str


def written(file: str, document: Any) -> bytes:
    """A document as its writer lays it out."""
    if file == JOURNAL:
        data = b"".join(msgspec.json.encode(line) + b"\n" for line in document)
    elif file in ("cell.json", "evidence.json"):
        data = msgspec.json.encode(document, order="sorted")
    elif file == "merged.json":
        data = msgspec.json.encode(document)
    else:
        data = msgspec.json.format(msgspec.json.encode(document), indent=2)
    return data.replace(f'"{NAN}"'.encode(), b"NaN")


def chained(lines: list[Any]) -> list[Any]:
    """The lines of a journal with its chain renewed."""
    previous, renewed = sha256(b""), []
    for line in lines:
        renewed.append(line | {"previous_sha256": previous} if isinstance(line, dict) else line)
        previous = sha256(msgspec.json.encode(renewed[-1]))
    return renewed


def verdict_on(evidence: CellEvidence, plan: Plan, cell: FrozenCell, folder: Path) -> Verdict:
    file = folder / "merged.json"
    rows = rows_of_cell(plan, "", cell, read_values(file.read_bytes(), file), evidence, file)
    kept = [{name: value for name, value in row.items() if name not in OF_THE_RUN} for row in rows]
    return Verdict(evidence.model_dump(exclude=DIGESTS), kept)


def judged(verdict: Callable[[], Verdict], expected: Verdict) -> Judged:
    """What `verdict` comes to, beside that on the files as they were."""
    try:
        found = verdict()
    except Refusal as refusal:
        return Judged("refused", str(refusal))
    except Exception as error:
        return Judged("crashed", f"{type(error).__name__}: {error}")
    if found == expected:
        return Judged("survived", "")
    if found.evidence == expected.evidence:
        return Judged("rows", "other rows")
    changed = [name for name, value in found.evidence.items() if value != expected.evidence[name]]
    return Judged("verdict", f"other {', '.join(changed)}")


def judge_anew(cell: FrozenCell, folder: Path, accepted: list[Path]) -> CellEvidence:
    """Merged file and evidence made anew of what lies in the folder; `accepted` is what its launches are bound to.

    Raises:
        Refusal: the merge refuses it, or the evidence has failed.
    """
    names = [rank_file(rank) for rank in range(cell.identity.topology.dp)]
    merged = merge_files(cell, folder / "receipt.json", [folder / name for name in names])
    (folder / "merged.json").write_bytes(merged_bytes(merged))
    evidence = verify(read_cell(folder, accepted))
    (folder / "evidence.json").write_bytes(canonical_bytes(evidence))
    if evidence.state == "failed":
        raise Refusal("evidence", "recorded or unestablished", evidence.failures[0], folder)
    return evidence


class MeasuredBench:
    """A copy of a cell that the engine measured."""

    def __init__(self, cell: Path, workplace: Path) -> None:
        self.folder = workplace / cell.name
        shutil.copytree(cell, self.folder)
        self.cell = read_model(FrozenCell, self.folder / "cell.json", "frozen cell")
        self.accepted = accepted_of(cell)
        self.artifacts = [rank_file(rank) for rank in range(self.cell.identity.topology.dp)]
        self.plan = plan_of(cell)
        judge_anew(self.cell, self.folder, self.accepted)
        names = ["cell.json", JOURNAL, *self.artifacts, "receipt.json", "merged.json", "evidence.json"]
        self.files = {name: (self.folder / name).read_bytes() for name in names}
        for name in names:
            assert written(name, self.document(name)) == self.files[name], f"{name} is laid out otherwise"
        self.verdict = self.found()

    def document(self, file: str) -> Any:
        """A file as plain values: of the journal a list of its lines."""
        data = self.files[file]
        return [json.loads(line) for line in data.splitlines()] if file == JOURNAL else json.loads(data)

    def found(self) -> Verdict:
        return verdict_on(check_cell(self.cell, self.folder, self.accepted), self.plan, self.cell, self.folder)

    def judge(self, file: str, forgery: Forgery, document: Any) -> Judged:
        """What the judges say of a document in the place of a file."""

        def verdict() -> Verdict:
            self.write(self.forged(file, forgery, document))
            if forgery == "derived":
                self.derive()
            return self.found()

        try:
            return judged(verdict, self.verdict)
        finally:
            self.write(self.files)

    def judge_files(self, files: dict[str, bytes | None]) -> Judged:
        """What the judges say of other files, or none, in the places of some; the receipt has their digests."""

        def verdict() -> Verdict:
            for name, data in files.items():
                (self.folder / name).unlink()
                if data is not None:
                    self.write(self.renewed(name, data))
            return self.found()

        try:
            return judged(verdict, self.verdict)
        finally:
            self.write(self.files)

    def write(self, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            (self.folder / name).write_bytes(data)

    def forged(self, file: str, forgery: Forgery, document: Any) -> dict[str, bytes]:
        """The files that a forger leaves: the mutant, and what else he renews."""
        if file == JOURNAL:
            lines = document if isinstance(document, list) else [document]
            document = lines if forgery == "plain" else chained(lines)
        data = written(file, document)
        return {file: data} if forgery == "plain" else self.renewed(file, data)

    def renewed(self, file: str, data: bytes) -> dict[str, bytes]:
        """A changed file with those that hold its digest, directly or by way of another."""
        files = {file: data}
        for holder, field in (("receipt.json", "files"), ("merged.json", "source_sha256"), ("evidence.json", None)):
            if holder == file:
                continue
            document = json.loads((self.folder / holder).read_bytes())
            digests = document[field] if field else document
            for name in list(files):
                key = name if field else f"{Path(name).stem}_sha256"
                if key in digests:
                    digests[key] = sha256(files[name])
                    files[holder] = written(holder, document)
        return files

    def derive(self) -> None:
        """Artifacts, receipt, merged file and evidence made anew from the journal that lies in the folder.

        Raises:
            Refusal: what was made is refused already.
        """
        journal = read_journal(self.folder / JOURNAL, self.cell.digest)
        digests = {JOURNAL: sha256((self.folder / JOURNAL).read_bytes())}
        try:
            for rank, name in enumerate(self.artifacts):
                data = struct_bytes(assemble(self.cell, journal, rank))
                digests[name] = sha256(data)
                self.write({name: data})
            self.write({"receipt.json": struct_bytes(receipt(self.cell, journal, digests))})
        except Exception:
            return  # it cannot be forged so far: the judges see the rest as it is
        judge_anew(self.cell, self.folder, self.accepted)


def plan_of(cell: Path) -> Plan:
    """The plan that asks for a measured cell."""
    for file in sorted(cell.parent.parent.glob("plan-*/plan.json")):
        plan = read_model(Plan, file, "plan")
        if any(entry.name == cell.name for entry in plan.cells):
            return plan
    raise Refusal("cell", "a plan that asks for it", "none", cell)


class ImportedBench:
    """A folder into which one of Dynamo's artifacts is imported; the cell asks for what the artifact held."""

    def __init__(self, document: dict[str, Any], workplace: Path) -> None:
        self.artifact = document
        self.cell = cell_of(document)
        self.source, self.folder = workplace / "artifacts", workplace / self.cell.name
        self.source.mkdir(parents=True)
        self.plan = plan_for(self.cell)
        self.verdict = self.found(document)

    def found(self, document: Any) -> Verdict:
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.source / "benchmark.json").write_bytes(written("benchmark.json", document))
        import_cell(self.cell, self.source, self.folder)
        return verdict_on(judge_anew(self.cell, self.folder, []), self.plan, self.cell, self.folder)

    def judge(self, document: Any) -> Judged:
        return judged(lambda: self.found(document), self.verdict)


def plan_for(cell: FrozenCell) -> Plan:
    """The plan of one imported cell, by hand."""
    identity = cell.identity
    deployment = DeploymentPlan(
        model=cell.model,
        probe_digest=identity.probe_digest,
        profile_sha256=digest("declared"),
        points_sha256=identity.points_sha256,
        origin="manifest",
        prefill_points=len(cell.points.prefill),
        decode_points=len(cell.points.decode),
        dropped={},
        contract=identity.contract,
        peak_blocks=1,
        estimated_blocks=1,
        free_blocks=cell.free_blocks,
    )
    return Plan(
        scope="formal",
        system=identity.system,
        system_sha256=digest("system"),
        backend=identity.backend,
        backend_version=identity.runtime_backend_version,
        runtime_backend_version=identity.runtime_backend_version,
        deployments={cell.deployment: deployment},
        cells=(),
    )
