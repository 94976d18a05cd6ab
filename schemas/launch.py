"""What an engine is started as: topology, precision, limits, graphs, memory."""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.canonical import Strict
from schemas.points import Positive

Strategy = Literal["single", "tp", "pure_tp", "tep", "dep"]


def increasing(name: str, values: tuple[int, ...] | None) -> None:
    """For validators: refuse an axis that is empty or does not rise."""
    if values is not None and (not values or any(a >= b for a, b in pairwise(values))):
        raise ValueError(f"{name} a strictly increasing list")


class Topology(Strict):
    """Widths in GPUs. Pipeline and context parallelism are 1: nothing here measures them."""

    tp: Positive = 1
    pp: Literal[1] = 1
    dp: Positive = 1
    moe_tp: Positive = 1
    moe_ep: Positive = 1
    cp: Literal[1] = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.dp


def strategy(topology: Topology, is_moe: bool) -> Strategy | None:
    """The parallel strategy of a topology, or None when no engine launch has it.

    Dense: experts and data parallelism are 1. MoE: pure TP (moe_tp = tp), TEP (moe_ep = tp, dp 1),
    DEP (tp 1, moe_ep = dp).
    """
    tp, dp, moe = topology.tp, topology.dp, (topology.moe_tp, topology.moe_ep)
    if not is_moe:
        return None if dp > 1 or moe != (1, 1) else ("single" if tp == 1 else "tp")
    if dp == 1 and moe == (tp, 1):
        return "single" if tp == 1 else "pure_tp"
    if dp == 1 and moe == (1, tp):
        return "tep"
    return "dep" if tp == 1 and moe == (1, dp) else None


class Precision(Strict):
    """Labels of the published table."""

    gemm: str = "bfloat16"
    moe: str = "bfloat16"
    fmha: str = "bfloat16"
    kv_cache: Literal["bfloat16", "fp8", "half", "int8"] = "bfloat16"
    comm: Literal["half"] = "half"


class Limits(Strict):
    """Scheduler limits: tokens of one step, requests of one step, tokens of one request."""

    max_num_tokens: Annotated[int, Field(ge=2)] = 8192
    max_batch_size: Positive = 256
    max_model_len: Positive

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_num_tokens < self.max_batch_size:
            raise ValueError(f"max_num_tokens of at least max_batch_size {self.max_batch_size}")
        return self


class GraphSettings(Strict):
    """CUDA graphs. Policy `runtime` leaves the sizes to the engine unless they are listed; `explicit` captures the
    collector's own list up to `max_prefill_cudagraph_size` tokens."""

    prefill_cudagraph_policy: Literal["runtime", "explicit"] = "runtime"
    max_prefill_cudagraph_size: Positive | None = None
    cudagraph_mode: Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"] | None = None
    cudagraph_capture_sizes: tuple[Positive, ...] | None = None
    max_cudagraph_capture_size: Positive | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        increasing("cudagraph_capture_sizes", self.cudagraph_capture_sizes)
        if self.prefill_cudagraph_policy == "runtime" and self.max_prefill_cudagraph_size is not None:
            raise ValueError("prefill_cudagraph_policy explicit for max_prefill_cudagraph_size")
        if self.cudagraph_capture_sizes is None:
            if self.max_cudagraph_capture_size is not None:
                raise ValueError("cudagraph_capture_sizes for max_cudagraph_capture_size")
            return self
        if self.cudagraph_mode == "NONE":
            raise ValueError("no cudagraph_capture_sizes with cudagraph_mode NONE")
        if self.prefill_cudagraph_policy == "explicit":
            raise ValueError("prefill_cudagraph_policy runtime for cudagraph_capture_sizes")
        last = self.cudagraph_capture_sizes[-1]
        if self.max_cudagraph_capture_size not in (None, last):
            raise ValueError(f"max_cudagraph_capture_size {last}, the last of cudagraph_capture_sizes")
        return self

    @property
    def capture_sizes(self) -> tuple[int, ...] | None:
        """Sizes that the campaign fixes, in tokens, or None when the engine chooses."""
        if self.prefill_cudagraph_policy == "explicit":
            return tuple(size for size in EXPLICIT_CAPTURE_SIZES if size <= (self.max_prefill_cudagraph_size or 2048))
        return self.cudagraph_capture_sizes


EXPLICIT_CAPTURE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), *range(544, 2049, 32))
"""The original collector's explicit capture list, in tokens."""


class EngineSettings(Strict):
    """What the engine is started with, beyond limits and topology."""

    load_format: Literal["auto", "dummy"] = "auto"
    enforce_eager: bool = False
    mamba_cache_mode: Literal["align"] | None = None
    kv_cache_memory_bytes: Positive | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    graph: GraphSettings | None = None

    @model_validator(mode="after")
    def _one_memory(self) -> Self:
        if (self.kv_cache_memory_bytes is None) == (self.gpu_memory_utilization is None):
            raise ValueError("exactly one of kv_cache_memory_bytes and gpu_memory_utilization")
        if self.enforce_eager and self.graph is not None and self.graph.cudagraph_mode not in (None, "NONE"):
            raise ValueError(f"cudagraph_mode NONE with enforce_eager, not {self.graph.cudagraph_mode}")
        return self


class ExecutionIdentity(Strict):
    """The four columns by which consumers bind rows to a model config. Other models have none."""

    model_config_sha256: str
    execution_profile: str
    engram_residency: str
    input_modality: str
