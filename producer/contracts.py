"""Producer contracts: what a cell of each kind of model promises. The frozen cell chooses its contract."""

from typing import NamedTuple

from producer.grids import axes, glm53flash
from schemas.canonical import digest
from schemas.launch import ExecutionIdentity
from schemas.plan import Measurement

REAL_SEED_PROTOCOL = "glm53flash_prefix_cache_real_seed_v1"
"""State protocol of GLM-5.3-Flash, folded into the config digest of its execution identity."""


class Contract(NamedTuple):
    """`protocol` is raised when the meaning of what the producer writes changes, never for a reformatting.

    `strategies` are the topologies that its producer can run; `warmup_iterations` the global warm-ups that a request
    may ask for (None: says nothing of them).
    """

    name: str
    protocol: int
    measurement: Measurement
    max_rejections: int
    grid_origin: str
    execution_mode: str
    strategies: tuple[str, ...]
    warmup_iterations: tuple[int | None, ...] | range
    hex_revision: bool
    token_seed: str


MEDIAN = Measurement(warmup_repeats=5, measurement_repeats=10, reduction="adjacent_upper_median")

GENERIC = Contract(
    name="generic",
    protocol=2,
    measurement=MEDIAN,
    max_rejections=3,
    grid_origin=axes.ORIGIN,
    execution_mode="any",
    strategies=("single", "tp", "pure_tp", "tep", "dep"),
    warmup_iterations=(None, 0),
    hex_revision=False,
    token_seed="53",
)
GLM53FLASH = GENERIC._replace(
    name="glm53flash",
    grid_origin=glm53flash.ORIGIN,
    execution_mode="native_graph_policy",
    strategies=("single", "pure_tp"),
    warmup_iterations=(0,),
    hex_revision=True,
)
DSV41 = GENERIC._replace(name="dsv41", execution_mode="eager")

DYNAMO = GENERIC._replace(
    name="dynamo",
    protocol=1,
    measurement=Measurement(warmup_repeats=0, measurement_repeats=1, reduction="dynamo_native"),
    max_rejections=0,
    warmup_iterations=range(1025),
)
"""Cells that Dynamo's self-benchmark measured and that are imported: of a point one value, by whichever of Dynamo's
reductions it has; warm-ups once for the whole engine."""

CONTRACTS = {contract.name: contract for contract in (GENERIC, GLM53FLASH, DSV41, DYNAMO)}

CONTRACT_OF_RESIDENCY = {"none": GLM53FLASH, "hbm_tp_sharded": DSV41}
"""Engram residency of a config-bound execution identity -> its contract. An identity without one is no cell."""

CONFIG_BOUND = {"Glm5NextForConditionalGeneration": REAL_SEED_PROTOCOL}
"""Architectures whose rows consumers bind to the model config -> the state protocol that is part of that binding."""


def execution_identity(architecture: str, config_sha256: str, engram_residency: str) -> ExecutionIdentity | None:
    """The execution identity of a model, or None for one that no consumer binds to its config."""
    protocol = CONFIG_BOUND.get(architecture)
    if protocol is None and engram_residency == "none":
        return None
    if protocol is not None:
        config_sha256 = digest({"model_config_sha256": config_sha256, "state_protocol": protocol})
    return ExecutionIdentity(
        model_config_sha256=config_sha256,
        execution_profile="full",
        engram_residency=engram_residency,
        input_modality="text",
    )


def contract_of(identity: ExecutionIdentity | None) -> Contract | None:
    """The contract that an execution identity selects, or None when nobody has audited one for it."""
    return GENERIC if identity is None else CONTRACT_OF_RESIDENCY.get(identity.engram_residency)
