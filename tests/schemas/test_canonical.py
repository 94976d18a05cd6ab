import hashlib
from pathlib import Path

import pytest

from schemas.canonical import Strict, canonical_bytes, digest, parse, read_json, read_model, read_yaml, write_atomic
from schemas.errors import Refusal


class Sample(Strict):
    count: int
    name: str = "x"
    note: str | None = None


def test_canonical_json_is_sorted_compact_utf8():
    assert canonical_bytes({"b": [1, 2.5], "a": "ü"}) == '{"a":"ü","b":[1,2.5]}'.encode()


def test_digest_is_the_sha256_of_the_canonical_bytes():
    assert digest({"a": 1}) == hashlib.sha256(b'{"a":1}').hexdigest()


def test_an_absent_optional_field_is_left_out():
    assert canonical_bytes(Sample(count=1)) == b'{"count":1,"name":"x"}'


def test_nan_is_no_json():
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_bytes({"a": float("nan")})


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"count": True}, "count: expected a valid integer, found True: f.yaml"),
        ({"count": "0"}, "count: expected a valid integer, found '0': f.yaml"),
        ({"count": 1.0}, "count: expected a valid integer, found 1.0: f.yaml"),
        ({"count": 1, "cuont": 2}, "cuont: expected no such key, found 2: f.yaml"),
        ({}, "count: expected a value, found nothing: f.yaml"),
    ],
)
def test_a_violation_is_one_line_with_field_expectation_value_and_file(data, line):
    with pytest.raises(Refusal) as refusal:
        parse(Sample, data, "f.yaml")
    assert str(refusal.value) == line


def test_a_key_that_stands_twice_is_refused(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("a: 1\nb: 2\na: 3\n")
    with pytest.raises(Refusal, match="line 3, key 'a' stands twice"):
        read_yaml(file, "campaign")


def test_a_merged_mapping_may_be_overridden(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("base: &base {a: 1, b: 2}\nother: {<<: *base, b: 3}\n")
    assert read_yaml(file, "campaign")["other"] == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "-Infinity is no JSON number"),
        (b'{"a": 1e999}', "1e999 is larger than any number that a reader keeps"),
        (b'{"b": {"a": 1, "c": 2, "a": 1}}', "key 'a' stands twice"),
        (b"", "Expecting value"),
        (b'{"a": ', "Expecting value"),
        (b'{"a": "\xff"}', "can't decode byte 0xff"),
        ('{"a": 1}'.encode("utf-16"), "can't decode byte 0xff"),
        (b"[" * 100_000 + b"]" * 100_000, "containers nested too deep"),
        (b"1" * 10_000, "Exceeds the limit"),
    ],
)
def test_what_is_no_json_or_not_the_same_to_every_reader_is_refused_in_one_line(tmp_path: Path, data, reason):
    file = tmp_path / "c.json"
    file.write_bytes(data)
    for read in (read_json, lambda path, what: read_model(Sample, path, what)):
        with pytest.raises(Refusal) as refusal:
            read(file, "record")
        line = str(refusal.value)
        assert line.startswith("record: expected JSON, found ")
        assert reason in line
        assert line.endswith(f": {file}")
        assert len(line.splitlines()) == 1


def test_a_model_is_read_from_a_file_as_it_is_parsed_from_its_values(tmp_path: Path):
    file = tmp_path / "c.json"
    file.write_text('{"count": 5, "name": "\u00fc"}')
    assert read_model(Sample, file, "sample") == Sample(count=5, name="ü")
    file.write_text('{"count": 5.0}')
    with pytest.raises(Refusal, match=f"count: expected a valid integer, found 5.0: {file}"):
        read_model(Sample, file, "sample")


def test_a_refusal_stays_a_line_whatever_it_found():
    with pytest.raises(Refusal) as refusal:
        parse(Sample, {"count": "x" * 1_000_000}, "f.yaml")
    assert len(str(refusal.value)) < 500


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path: Path):
    file = tmp_path / "artifact.json"
    write_atomic(file, b"old")
    with pytest.raises(TypeError):
        write_atomic(file, "no bytes")  # type: ignore[arg-type]
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]
