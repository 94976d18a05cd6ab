"""Candidate points of a deployment: each grid is a pure function from limits to an ordered candidate list."""

from producer.grids import axes, glm53flash
from schemas.points import PointManifest
from schemas.profile import Profile
from schemas.request import Grid


def candidates(origin: str, grid: Grid, profile: Profile) -> PointManifest:
    """The candidates of a grid by its origin."""
    if origin == glm53flash.ORIGIN:
        return glm53flash.candidates(
            block=profile.block_size,
            token_budget=profile.max_num_tokens,
            max_model_len=profile.max_model_len,
            max_batch_size=profile.max_batch_size,
        )
    return axes.candidates(grid, profile)


def smoke(origin: str, manifest: PointManifest, profile: Profile) -> PointManifest:
    """The few points of a plan's list that a smoke run measures: a subset of it."""
    if origin == glm53flash.ORIGIN:
        return glm53flash.smoke(manifest, profile.block_size)
    return axes.smoke(manifest)
