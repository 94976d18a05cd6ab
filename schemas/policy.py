"""The collection policy: how often a campaign is measured again, and how far its values may lie apart."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from schemas.canonical import Strict, parse, read_yaml

ComparisonMode = Literal["full_grid", "bounded"]
Limit = Annotated[float, Field(gt=0, lt=1)]


class RepeatabilityPolicy(Strict):
    """`samples` independent launches of each cell, over all its points or over `max_points_per_cell` of them.

    `max_cv` limits their sample standard deviation by their mean, `max_source_relative_difference` the distance of
    that mean to the source's value, as a part of it; null asks for the spread alone.
    """

    comparison_mode: ComparisonMode = "full_grid"
    samples: Annotated[int, Field(ge=2)] = 5
    max_points_per_cell: Annotated[int, Field(ge=2)] = 12
    max_cv: Limit = 0.05
    max_source_relative_difference: Limit | None = 0.05

    @property
    def max_points(self) -> int | None:
        """Points of a cell that are measured again at most; None for all."""
        return self.max_points_per_cell if self.comparison_mode == "bounded" else None


class CollectionPolicy(Strict):
    """`config/policies/<policy>.yaml`."""

    schema_name: Literal["passgrid-collection-policy/v1"]
    repeatability: RepeatabilityPolicy = RepeatabilityPolicy()


def read_policy(file: Path) -> CollectionPolicy:
    return parse(CollectionPolicy, read_yaml(file, "policy"), file)
