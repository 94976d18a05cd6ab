"""Producer contracts: what a cell of each kind of model promises. The frozen cell chooses its contract."""

from typing import NamedTuple

from schemas.plan import Measurement


class Contract(NamedTuple):
    """`protocol` is raised when the meaning of what the producer writes changes, never for a reformatting."""

    name: str
    protocol: int
    measurement: Measurement
    max_rejections: int


GENERIC = Contract(
    name="generic",
    protocol=1,
    measurement=Measurement(warmup_repeats=5, measurement_repeats=10, reduction="adjacent_upper_median"),
    max_rejections=3,
)

CONTRACTS = {contract.name: contract for contract in (GENERIC,)}
