"""Who measured: `measurement_protocol.producer` of an artifact, and what the engine was serving with.

The record is a function of the frozen cell and of the code, so a reader derives it again and compares field by field.
"""

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from producer.adapters import Adapter, pins_digest
from producer.contracts import CONTRACTS, GLM53FLASH, REAL_SEED_PROTOCOL
from producer.releases import accepted_producer_digests
from producer.session import SAMPLING_TEMPERATURE
from producer.source_digest import producer_digest
from schemas.errors import Refusal
from schemas.plan import FrozenCell

GC_POLICY = "collected_frozen_disabled"
"""What the engine half does with the garbage collector of the driver and of every worker while points run."""

CONTEXT_POLICY = "exact_context_each_repetition"
"""Every repetition submits its whole context anew and counts only if the engine's record shows exactly that context:
nothing is decoded on from the repetition before it, and no context is made up (`recurrent_state` unchanged)."""

REDUCTION = "upper_median_after_first_repetition"
"""The reduction in the words of the artifact (`adjacent_upper_median` of the estimate)."""

PYTHON_VERSION = re.compile(r"3\.\d+\.\d+\S*")

RECURRENT = "MambaSpec"
"""Cache-spec class of the groups that can hold a prefill checkpoint (vLLM 0.33.0, v1/kv_cache_interface.py:1101)."""


def execution_mode(cell: FrozenCell) -> str:
    """The contract's execution mode; a contract that leaves it open takes the launch's."""
    contract = CONTRACTS.get(cell.identity.contract)
    if contract is not None and contract.execution_mode != "any":
        return contract.execution_mode
    return "eager" if cell.identity.engine.enforce_eager else "native_graph_policy"


def producer_record(cell: FrozenCell, adapter: Adapter) -> dict[str, Any]:
    """The record of `cell`, measured by this checkout in this interpreter with the engine of `adapter`."""
    identity = cell.identity
    record = {
        "name": "passgrid",
        "contract": identity.contract,
        "protocol": identity.producer_protocol,
        "scheduler_revision": f"passgrid_benchmark_scheduler_v{identity.producer_protocol}",
        "producer_digest": producer_digest(),
        "cell_digest": cell.digest,
        "model_config_sha256": identity.model_config_sha256,
        "model_revision": identity.model_revision,
        "execution_mode": execution_mode(cell),
        "distribution": adapter.distribution,
        "vllm_package_version": adapter.version,
        "python_version": platform.python_version(),
        "runtime_source_manifest_sha256": pins_digest(adapter),
        "token_generator": identity.token_generator,
        "token_seed": identity.token_seed,
        "context_policy": CONTEXT_POLICY,
        "reduction": REDUCTION,
        "prompts_of_measurement": 1,
        "sampling_temperature": SAMPLING_TEMPERATURE,
        "gc_policy": GC_POLICY,
    }
    if identity.contract == GLM53FLASH.name:
        record["state_protocol"] = REAL_SEED_PROTOCOL
    return record


def _wanted(field: str, cell: FrozenCell, expected: Mapping[str, Any], found: Any) -> str | None:
    """What a field should have been, or None when it is right."""
    if field == "producer_digest":
        accepted = accepted_producer_digests(cell.identity.contract, cell.identity.producer_protocol)
        readable = " or ".join(f"{digest} of {who}" for digest, who in accepted.items())
        if isinstance(found, str) and found in accepted:
            return None
        return readable or f"a producer of {cell.identity.contract} protocol {cell.identity.producer_protocol}"
    if field == "python_version":
        return None if isinstance(found, str) and PYTHON_VERSION.fullmatch(found) else "a version of Python 3"
    if field not in expected:
        return "no such field"
    value = expected[field]
    return None if type(found) is type(value) and found == value else str(value)


def check_producer_record(record: Mapping[str, Any], cell: FrozenCell, adapter: Adapter) -> Iterator[str]:
    """A line for each field that is not the record of `cell`.

    The digest may be that of any producer with the cell's protocol; the interpreter's version is checked for its form,
    since no cell fixes it.
    """
    # The cell was planned for its pins; the record says which pins the installed engine was compared with.
    expected = producer_record(cell, adapter) | {"runtime_source_manifest_sha256": cell.identity.pins_sha256}
    for field in sorted(expected.keys() | record.keys()):
        found = record.get(field, "nothing")
        wanted = _wanted(field, cell, expected, found)
        if wanted is not None:
            yield f"producer.{field}: expected {wanted}, found {found}"


def serving_config(groups: Sequence[Mapping[str, Any]], launch: Mapping[str, Any], where: Path | str) -> dict[str, Any]:
    """What the align rule hangs on: `groups` of a scheduler record, `launch` of `launch_facts`.

    `mamba_prefill_checkpoint` is null without a recurrent group. vLLM takes the alignment of the first recurrent
    group for all (0.33.0, v1/core/sched/scheduler.py:437), so it is only right where they agree.

    Raises:
        Refusal: recurrent groups with different checkpoint blocks or alignments.
    """
    specs = [next(iter(group["layer_specs"].values())) for group in groups]
    checkpoints = [
        {"blocks": spec["num_prefill_checkpoint_blocks"], "alignment": spec.get("prefill_checkpoint_alignment")}
        for spec in specs
        if spec["spec_type"] == RECURRENT
    ]
    if any(checkpoint != checkpoints[0] for checkpoint in checkpoints):
        field = "serving_config.mamba_prefill_checkpoint"
        raise Refusal(field, "one prefill checkpoint alignment", checkpoints, where)
    return {"mamba_prefill_checkpoint": checkpoints[0] if checkpoints else None, "launch": dict(launch)}
