"""Whose records are read: rules of the history, none of which hangs on the digest of today's code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from producer.contracts import CONTRACTS
from producer.releases import (
    HISTORY,
    THIS_CHECKOUT,
    Release,
    accepted_producer_digests,
    extended,
    read_releases,
    this_release,
)
from producer.source_digest import producer_digest
from schemas.errors import Refusal

ROOT = Path(__file__).parents[2]


def release(name: str, digest: str, generic: int = 1, glm: int = 1) -> Release:
    return Release(release=name, protocols={"generic": generic, "glm53flash": glm}, producer_digest=digest * 64)


def test_code_of_no_release_is_read_by_itself_and_by_nothing_else():
    protocol = CONTRACTS["generic"].protocol
    assert accepted_producer_digests("generic", protocol, history=()) == {producer_digest(): THIS_CHECKOUT}


def test_releases_of_the_same_protocol_are_read_and_others_are_not():
    protocol = CONTRACTS["generic"].protocol
    history = [release("1", "a", generic=protocol - 1), release("2", "b", protocol), release("3", "c", protocol + 1)]
    accepted = accepted_producer_digests("generic", protocol, history)
    assert accepted == {producer_digest(): THIS_CHECKOUT, "b" * 64: "2"}
    # Nor does this checkout measure by a protocol that is not its own.
    assert accepted_producer_digests("generic", protocol + 1, history) == {"c" * 64: "3"}


def test_contracts_count_their_protocols_for_themselves():
    history = [release("1", "a", generic=7, glm=8)]
    assert accepted_producer_digests("generic", 7, history) == {"a" * 64: "1"}
    assert accepted_producer_digests("glm53flash", 8, history) == {"a" * 64: "1"}
    assert accepted_producer_digests("generic", 8, history) == {}
    assert accepted_producer_digests("glm53flash", 7, history) == {}
    assert accepted_producer_digests("another", 7, history) == {}


def test_a_digest_goes_by_the_first_release_that_had_it():
    history = [release("1", "a", 7), release("2", "a", 7)]
    assert accepted_producer_digests("generic", 7, history) == {"a" * 64: "1"}


def test_a_name_is_given_once():
    with pytest.raises(Refusal, match=r"^release: expected another name than 1, found 1: history$"):
        extended([release("1", "a")], release("1", "b"), "history")


def test_the_same_code_never_stands_under_two_protocols():
    with pytest.raises(Refusal, match=r"^protocols of 2: expected .* of 1, which is the same code, found .*: history$"):
        extended([release("1", "a", generic=1)], release("2", "a", generic=2), "history")


def test_a_release_that_did_not_touch_the_producer_has_its_digest():
    history = extended([release("1", "a")], release("2", "a"), "history")
    assert [entry.release for entry in history] == ["1", "2"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "releases: expected a list, found a dict"),
        ([{"release": "1", "protocols": {"generic": 1}}], "producer_digest: expected a value, found nothing"),
        ([{"release": "1", "protocols": {"generic": True}, "producer_digest": "a"}], "protocols.generic: expected "),
        (
            [{"release": "1", "protocols": {"generic": 1}, "producer_digest": "a"}] * 2,
            "release: expected another name than 1, found 1",
        ),
    ],
)
def test_a_history_that_no_release_made_is_refused(tmp_path: Path, entries, message: str):
    file = tmp_path / "releases.json"
    file.write_text(json.dumps(entries))
    with pytest.raises(Refusal) as refused:
        read_releases(file)
    assert str(refused.value).startswith(message)
    assert str(refused.value).endswith(str(file))


def test_the_shipped_history_is_one_and_contradicts_no_checkout():
    history = read_releases(HISTORY)
    extended(history, this_release("the next one"), HISTORY)


def add(history: Path, name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "producer.releases", "--add", name, "--history", str(history)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command_appends_this_checkout_once(tmp_path: Path):
    file = tmp_path / "releases.json"
    file.write_text("[]\n")
    done = add(file, "1.0")
    assert done.returncode == 0, done.stderr
    (added,) = read_releases(file)
    assert (added.release, added.producer_digest) == ("1.0", producer_digest())
    assert added.protocols == {name: contract.protocol for name, contract in CONTRACTS.items()}
    assert file.read_text().endswith("}\n]\n")

    before = file.read_bytes()
    again = add(file, "1.0")
    assert (again.returncode, again.stderr) == (
        2,
        f"refused: release: expected another name than 1.0, found 1.0: {file}\n",
    )
    assert file.read_bytes() == before


def test_the_command_refuses_the_same_code_under_another_protocol(tmp_path: Path):
    file = tmp_path / "releases.json"
    earlier = {"release": "0.9", "protocols": {"generic": 99}, "producer_digest": producer_digest()}
    file.write_text(json.dumps([earlier]))
    done = add(file, "1.0")
    assert done.returncode == 2
    assert done.stderr.startswith("refused: protocols of 1.0: expected {'generic': 99} of 0.9, which is the same code")
    assert json.loads(file.read_text()) == [earlier]
