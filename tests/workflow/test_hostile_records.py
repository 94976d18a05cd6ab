"""Probe records that nobody should believe: each is refused with its reason in a line, and no profile is made."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import ROOT
from probe_mutants import FIXTURES, launches, other_phase

from schemas.canonical import canonical_bytes, read_model
from schemas.errors import REFUSED, Refusal
from schemas.observation import ProbeRecord

from probe_checks import diagnose

CAMPAIGNS = {"dense": "cpu-demo", "hybrid": "cpu-demo", "tensor": "cpu-parallel", "data": "cpu-parallel"}


class Hostile(NamedTuple):
    """What becomes of the prefill record's bytes, and what the refusal or the diagnostic must say."""

    change: Callable[[bytes], bytes]
    reason: str
    deployment: str = "dense"


def values(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """A change of the record's values; NaN and infinities are written as Python writes them."""

    def changed(data: bytes) -> bytes:
        record = json.loads(data)
        change(record)
        return json.dumps(record).encode()

    return changed


def worker(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    return values(lambda record: change(record["workers"][0]))


def cache(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    return values(lambda record: change(record["workers"][0]["cache"]))


def scheduler(**fields: object) -> Callable[[bytes], bytes]:
    return values(lambda record: record["schedulers"][0].update(fields))


def text(old: str, new: str) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        assert old.encode() in data
        return data.replace(old.encode(), new.encode(), 1)

    return changed


def view_of(cache: dict[str, Any]) -> dict[str, Any]:
    return next(iter(cache["layer_tensors"].values()))[0]


DEEP = 100_000
UNREADABLE = {
    "truncated": Hostile(lambda data: data[: len(data) // 2], "probe record: expected JSON, found "),
    "empty": Hostile(lambda data: b"", "probe record: expected JSON, found Expecting value"),
    "blank": Hostile(lambda data: b"\n", "probe record: expected JSON, found Expecting value"),
    "two records in a file": Hostile(lambda data: data + data, "probe record: expected JSON, found Extra data"),
    "not UTF-8": Hostile(lambda data: data.replace(b"prefill", b"pref\xffll"), "can't decode byte 0xff"),
    "UTF-16": Hostile(lambda data: data.decode().encode("utf-16"), "can't decode byte 0xff"),
    "a key twice": Hostile(text('"num_blocks":', '"num_blocks":1,"num_blocks":'), "key 'num_blocks' stands twice"),
    "bottomless": Hostile(lambda data: b"[" * DEEP + b"]" * DEEP, "found containers nested too deep"),
    "deep in the launch": Hostile(
        text('"launch":{', f'"launch":{{"x":{"[" * 500}{"]" * 500},'), "ProbeRecord: expected invalid JSON"
    ),
    "NaN": Hostile(scheduler(max_concurrency=float("nan")), "NaN is no JSON number"),
    "infinity": Hostile(scheduler(max_concurrency=float("inf")), "Infinity is no JSON number"),
    "a float that is infinite": Hostile(text('"max_concurrency":', '"max_concurrency":1e999,"x":'), "1e999 is larger"),
    "an integer of 5,000 digits": Hostile(
        text('"num_blocks":', f'"num_blocks":{"9" * 5000},"x":'), "Exceeds the limit"
    ),
    "a list for the record": Hostile(lambda data: b"[" + data + b"]", "ProbeRecord: expected an object, found a list"),
    "null for the record": Hostile(lambda data: b"null", "ProbeRecord: expected an object, found None"),
    "a list for an object": Hostile(
        worker(lambda each: each.update(cache=[each["cache"]])), "workers.0.cache: expected an object, found a list"
    ),
    "an object for a list": Hostile(
        values(lambda record: record.update(workers={"0": record["workers"][0]})), "workers: expected a valid array"
    ),
    "a float for an integer": Hostile(
        cache(lambda each: each.update(num_blocks=float(each["num_blocks"]))),
        "workers.0.cache.num_blocks: expected a valid integer, found 1024.0",
    ),
    "a bool for an integer": Hostile(
        cache(lambda each: view_of(each).update(storage_offset_bytes=False)),
        "storage_offset_bytes: expected a valid integer, found False",
    ),
    "a text for an integer": Hostile(
        scheduler(block_size="128"), "schedulers.0.block_size: expected a valid integer, found '128'"
    ),
    "an integer for a bool": Hostile(
        scheduler(enable_prefix_caching=1), "schedulers.0.enable_prefix_caching: expected a valid boolean, found 1"
    ),
    "past 2^53": Hostile(
        cache(lambda each: each["storages"][0].update(size_bytes=2**53 + 1)),
        f"storages.0.size_bytes: expected less than or equal to {2**53}, found {2**53 + 1}",
    ),
    "past 2^53 in a setting": Hostile(
        values(lambda record: record["schedulers"][0]["launch"].update(num_lookahead_tokens=2**53 + 1)),
        f"expected less than or equal to {2**53}, found {2**53 + 1}",
    ),
    "a negative size": Hostile(
        cache(lambda each: each["tensor_allocations"][0].update(size=-1)),
        "tensor_allocations.0.size: expected greater than or equal to 1, found -1",
    ),
    "a negative stride": Hostile(
        cache(lambda each: view_of(each).update(stride_bytes=[-each for each in view_of(each)["stride_bytes"]])),
        "stride_bytes.0: expected greater than or equal to 0, found -",
    ),
    "no blocks": Hostile(
        cache(lambda each: each.update(num_blocks=0)), "num_blocks: expected greater than or equal to 1, found 0"
    ),
    "no groups": Hostile(cache(lambda each: each.update(groups=[])), "groups: expected"),
    "no storages": Hostile(cache(lambda each: each.update(storages=[])), "storages: expected"),
    "a rank below none": Hostile(
        worker(lambda each: each.update(tp_rank=-1)), "tp_rank: expected greater than or equal"
    ),
    "10,000 unknown keys": Hostile(
        worker(lambda each: each.update({f"key{number}": 1 for number in range(10_000)})),
        "workers.0.key0: expected no such key, found 1",
    ),
    "a megabyte of text for a number": Hostile(
        scheduler(num_blocks="x" * 2**20), "schedulers.0.num_blocks: expected a valid integer, found 'xxx"
    ),
    "another version of the record": Hostile(
        values(lambda record: record.update(schema_version=1)), "schema_version: expected 2, found 1"
    ),
    "a scheduler among the workers": Hostile(
        values(lambda record: record["workers"].append(record["schedulers"][0])), "workers.1."
    ),
    "a measured cell": Hostile(lambda data: b'{"schema_version": 2, "points": []}', "expected"),
}


LAYER = "model.layers.0.self_attn.attn"
WORKER = "prefill: worker dp0 tp0 pp0"
ALLOCATION = f"tensor_allocations[0] ({LAYER})"
VIEW = f"layer_tensors.{LAYER}[0]"


def overlapping(cache: dict[str, Any]) -> None:
    """The first two layers of a group share their bytes."""
    allocation = cache["tensor_allocations"][0]
    allocation["layer_stride"] = allocation["block_stride"]


def another_attempt(record: dict[str, Any]) -> None:
    record["workers"][1]["attempt_id"] = "0" * len(record["attempt_id"])


UNBELIEVABLE = {
    "no ranks": Hostile(
        values(lambda record: record.update(workers=[])),
        "prefill: worker ranks (dp, tp, pp): expected [(0, 0, 0)], found []",
    ),
    "no scheduler": Hostile(
        values(lambda record: record.update(schedulers=[])), "prefill: scheduler ranks: expected [0], found []"
    ),
    "a missing rank": Hostile(
        values(lambda record: record["workers"].pop()),
        "prefill: worker ranks (dp, tp, pp): expected [(0, 0, 0), (0, 1, 0)], found [(0, 0, 0)]",
        "tensor",
    ),
    "a duplicate rank": Hostile(
        values(lambda record: record["workers"].append(record["workers"][1])),
        "prefill: worker ranks (dp, tp, pp): expected [(0, 0, 0), (0, 1, 0)], found [(0, 0, 0), (0, 1, 0), (0, 1, 0)]",
        "tensor",
    ),
    "one rank for another": Hostile(
        values(lambda record: record["workers"].__setitem__(1, record["workers"][0])),
        "prefill: worker ranks (dp, tp, pp): expected [(0, 0, 0), (0, 1, 0)], found [(0, 0, 0), (0, 0, 0)]",
        "tensor",
    ),
    "a duplicate scheduler": Hostile(
        values(lambda record: record["schedulers"].append(record["schedulers"][0])),
        "prefill: scheduler ranks: expected [0, 1], found [0, 0, 1]",
        "data",
    ),
    "a record of another attempt": Hostile(
        values(another_attempt), "prefill: worker dp0 tp1 pp0: attempt_id: expected", "tensor"
    ),
    "a record of another deployment": Hostile(
        lambda data: (FIXTURES / "hybrid.json").read_bytes(), "prefill: probe_digest: expected"
    ),
    "a record of the other phase": Hostile(
        values(lambda record: record.update(phase="decode")),
        "phases: expected ['decode', 'prefill'], found ['decode', 'decode']",
    ),
    "overlapping regions": Hostile(cache(overlapping), "in common only for the same block of different groups"),
    "a region outside its storage": Hostile(
        cache(lambda each: each["tensor_allocations"][0].update(offset=each["storages"][0]["size_bytes"])),
        f"{ALLOCATION}.size: expected at least 536870912 bytes for 1024 blocks, found 268435456",
    ),
    "a view outside its page": Hostile(
        cache(lambda each: view_of(each).update(storage_offset_bytes=view_of(each)["storage_offset_bytes"] + 2)),
        f"{VIEW}.storage_offset_bytes: expected ",
    ),
    "a view of more blocks": Hostile(
        cache(lambda each: view_of(each)["shape"].__setitem__(0, view_of(each)["shape"][0] + 1)),
        f"{VIEW}.shape: expected 1024 on the first axis for 1024 blocks, found 1025",
    ),
    "something unresolved": Hostile(
        worker(lambda each: each.update(unresolved_fields=["model.revision"])),
        f"{WORKER}: unresolved_fields: expected none, found model.revision",
    ),
}


def records_of(folder: Path, hostile: Hostile) -> list[Path]:
    """The changed prefill record and an intact decode record, as a probe leaves them."""
    _, _, record, original = launches()[hostile.deployment]
    files = [folder / "prefill.json", folder / "decode.json"]
    intact = canonical_bytes(record)
    files[0].write_bytes(hostile.change(intact))
    files[1].write_bytes(canonical_bytes(other_phase(original)))
    assert files[0].read_bytes() != intact
    return files


def import_profile(folder: Path, hostile: Hostile) -> subprocess.CompletedProcess[str]:
    """The script, as the rule runs it; `folder` then holds what it wrote."""
    command = [
        sys.executable,
        "workflow/scripts/import_profile.py",
        *("--campaign", f"config/campaigns/{CAMPAIGNS[hostile.deployment]}.yaml"),
        *("--deployment", hostile.deployment),
        *("--output", str(folder / "profile.json")),
        *map(str, records_of(folder, hostile)),
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_no_record_is_refused_when_it_is_read(tmp_path: Path, name: str):
    prefill, _ = records_of(tmp_path, UNREADABLE[name])
    with pytest.raises(Refusal) as refusal:
        read_model(ProbeRecord, prefill, "probe record")
    line = str(refusal.value)
    assert UNREADABLE[name].reason in line
    assert line.endswith(f": {prefill}")
    assert len(line) < 1000


@pytest.mark.parametrize("name", UNBELIEVABLE)
def test_what_cannot_be_is_a_diagnostic(tmp_path: Path, name: str):
    hostile = UNBELIEVABLE[name]
    request, deployment, _, _ = launches()[hostile.deployment]
    records = [read_model(ProbeRecord, file, "probe record") for file in records_of(tmp_path, hostile)]
    found = diagnose(request, deployment, records)
    assert [line for line in found if hostile.reason in line], found
    assert not [line for line in found if len(line.splitlines()) != 1]


@pytest.mark.parametrize(
    "name", ["truncated", "empty", "a key twice", "not UTF-8", "bottomless", "NaN", "past 2^53", "10,000 unknown keys"]
)
def test_the_script_refuses_in_one_line_and_writes_nothing(tmp_path: Path, name: str):
    done = import_profile(tmp_path, UNREADABLE[name])
    assert done.returncode == REFUSED
    (line,) = done.stderr.splitlines()
    assert line.startswith("refused: ")
    assert UNREADABLE[name].reason in line
    assert {file.name for file in tmp_path.iterdir()} == {"prefill.json", "decode.json"}


@pytest.mark.parametrize(
    "name", ["a missing rank", "a duplicate rank", "a record of another attempt", "a view outside its page"]
)
def test_the_script_writes_diagnostics_and_no_profile(tmp_path: Path, name: str):
    done = import_profile(tmp_path, UNBELIEVABLE[name])
    assert done.returncode == REFUSED
    lines = done.stderr.splitlines()
    assert [line for line in lines if UNBELIEVABLE[name].reason in line]
    assert all(line.startswith("incomplete: ") for line in lines)
    assert {file.name for file in tmp_path.iterdir()} == {"prefill.json", "decode.json", "profile.diagnostics.json"}
    report = json.loads((tmp_path / "profile.diagnostics.json").read_text())
    assert [f"incomplete: {line}" for line in report["diagnostics"]] == lines


def test_without_a_record_nothing_is_imported(tmp_path: Path):
    hostile = Hostile(lambda data: data + b" ", "")
    prefill, _ = records_of(tmp_path, hostile)
    prefill.unlink()
    with pytest.raises(Refusal, match="probe record: expected a readable file, found No such file or directory"):
        read_model(ProbeRecord, prefill, "probe record")
    prefill.mkdir()
    with pytest.raises(Refusal, match="probe record: expected a readable file, found Is a directory"):
        read_model(ProbeRecord, prefill, "probe record")


def test_the_intact_records_import(tmp_path: Path):
    """Otherwise the refusals above would say nothing."""
    done = import_profile(tmp_path, Hostile(lambda data: data + b" ", ""))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "profile.json").is_file()
