"""A GPU system: what the consumers' system file holds, and whether the system is the embedded one."""

import re
from typing import Annotated

from pydantic import Field, StringConstraints

from schemas.canonical import Strict

SYSTEM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]


class Gpu(Strict):
    """Bandwidths in bytes/s, capacity in bytes, rates in FLOP/s (or OP/s), power in W, latency in s."""

    mem_bw: PositiveFloat
    mem_bw_empirical_scaling_factor: PositiveFloat
    mem_empirical_constant_latency: NonNegativeFloat
    mem_capacity: PositiveInt
    bfloat16_tc_flops: PositiveFloat
    fp32_flops: PositiveFloat
    int8_tc_flops: PositiveFloat
    fp8_tc_flops: PositiveFloat
    power: PositiveFloat
    sm_version: int


class Node(Strict):
    """Bandwidths in bytes/s, latency in s."""

    num_gpus_per_node: PositiveInt
    inter_node_bw: PositiveFloat
    intra_node_bw: PositiveFloat
    pcie_bw: PositiveFloat
    p2p_latency: NonNegativeFloat


class Misc(Strict):
    """`nccl_mem`: bytes for each number of GPUs; `other_mem`: bytes."""

    nccl_mem: dict[str, NonNegativeInt]
    other_mem: NonNegativeInt
    nccl_version: str


class System(Strict):
    """`config/systems/<name>.yaml`. `embedded` marks the system whose profiles may be accepted without a person."""

    name: Annotated[str, StringConstraints(pattern=f"^{SYSTEM_NAME.pattern}$")]
    embedded: bool = False
    gpu: Gpu
    node: Node
    misc: Misc
