"""vLLM's own scheduler without a model: who runs how many tokens in which step, and how many blocks that takes.

The installed `vllm.v1.core.sched.scheduler.Scheduler` is built from a profile, fed the seeds and the requests of a
point, and answered as a model runner would. Nothing of the planner's rules is used: `prove` compares them.
"""

import argparse
import dataclasses
import inspect
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import vllm
from hosts import host
from vllm.config import CacheConfig, ObservabilityConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from producer.admission import blocks_of_point, drop_rule
from producer.contracts import GENERIC
from producer.grids import candidates, glm53flash
from producer.partition import RequestShape, request_shapes
from producer.session import (
    DECODE_MAX_TOKENS,
    Chunk,
    MeasurementFailed,
    RequestSpec,
    Step,
    expected_chunks,
    measure,
)
from producer.tokens import TokenStream
from schemas.canonical import read_model
from schemas.journal import PointLine
from schemas.native import UNOBSERVED
from schemas.points import DecodePoint, Phase, Point
from schemas.profile import Profile, ProfileGroup
from schemas.request import Grid

Chunks = dict[int, tuple[int, int]]
"""Slot -> (tokens computed before, tokens scheduled in) one step."""

BlockHasher = Callable[[Request], list[BlockHash]]

LIMIT_OF_STEPS = 10_000
"""Steps of one submission after which the scheduler is thought to run in circles."""

REPETITIONS = 3
"""Repetitions of a point in a row. A prefix that the first one lets go of is lost to the second."""

NOT_ASKABLE = ("imbalanced", "split", "context", "prefix")
"""Drop rules that say that a point cannot be asked of the engine; all others say that it would run otherwise."""

# `reset_prefix_cache` announces itself each time (v1/core/block_pool.py:861).
logging.getLogger("vllm.v1.core.block_pool").setLevel(logging.WARNING)


class Run(NamedTuple):
    """What the scheduler did with requests that entered together.

    `peak_blocks` counts blocks of the pool that were not free at once, without the null block. `unfinished` are the
    slots that it did not serve to their end, because nothing more could run.
    """

    steps: list[Chunks]
    peak_blocks: int
    preemptions: int
    unfinished: tuple[int, ...]


def spec_of(group: ProfileGroup, mamba_cache_mode: str) -> KVCacheSpec:
    """The engine's cache spec of a group. Page sizes do not matter to the scheduler: it counts blocks."""
    block = group.block_size_tokens
    attention: dict[str, Any] = {"block_size": block, "num_kv_heads": 1, "head_size": 1, "dtype": torch.bfloat16}
    match group.spec_type:
        case "FullAttentionSpec":
            return FullAttentionSpec(**attention)
        case "MLAAttentionSpec":
            return MLAAttentionSpec(**attention)
        case "CircularBufferSpec":
            return CircularBufferSpec(**attention)
        case "SlidingWindowSpec":
            return SlidingWindowSpec(**attention, sliding_window=group.sliding_window)
        case "MambaSpec":
            return MambaSpec(
                block_size=block,
                shapes=((1,),),
                dtypes=(torch.bfloat16,),
                mamba_cache_mode=mamba_cache_mode,
                num_speculative_blocks=(group.blocks_per_request or 1) - 1,
                num_prefill_checkpoint_blocks=group.prefill_checkpoint_blocks or 0,
                prefill_checkpoint_alignment=group.prefill_checkpoint_alignment,
            )
    raise ValueError(f"no engine spec for {group.spec_type}")


class EngineConfig(VllmConfig):
    """A `VllmConfig` of which only what the scheduler asks is filled in.

    The model runner is V1's, as on the CPU; the scheduler asks only how to hand over resumed requests
    (v1/core/sched/scheduler.py:1418).
    """

    use_v2_model_runner = False


def engine_config(profile: Profile) -> EngineConfig:
    """The configuration of a launch without model: real where scheduling depends on it, stubs elsewhere."""
    cache = CacheConfig(
        block_size=profile.block_size,
        enable_prefix_caching=profile.enable_prefix_caching,
        mamba_cache_mode=profile.mamba_cache_mode,
    )
    # The pool's first block is the null block (v1/core/block_pool.py:187).
    cache.num_gpu_blocks = profile.free_blocks + 1
    scheduling = SchedulerConfig(
        max_model_len=profile.max_model_len,
        is_encoder_decoder=False,
        max_num_batched_tokens=profile.max_num_tokens,
        max_num_seqs=profile.max_batch_size,
        async_scheduling=False,
    )
    model = SimpleNamespace(
        max_model_len=profile.max_model_len,
        runner_type="generate",
        uses_mrope=False,
        is_encoder_decoder=False,
        is_diffusion=False,
        supports_multimodal_inputs=False,
        multimodal_config=None,
        return_sampling_mask=False,
    )
    parallel = SimpleNamespace(
        data_parallel_index=0,
        data_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
    )
    absent = (
        "lora_config",
        "kv_events_config",
        "kv_transfer_config",
        "ec_transfer_config",
        "speculative_config",
        "diffusion_config",
    )
    config = object.__new__(EngineConfig)
    parts = {
        "model_config": model,
        "parallel_config": parallel,
        "cache_config": cache,
        "scheduler_config": scheduling,
        "observability_config": ObservabilityConfig(),
        "aux_output_config": SimpleNamespace(enabled=False),
        "ec_manager_config": SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        **dict.fromkeys(absent),
    }
    for name, part in parts.items():
        setattr(config, name, part)
    return config


def scheduler_of(profile: Profile) -> Scheduler:
    """The scheduler that an engine with this profile has.

    Raises:
        ValueError: the engine resolves other block sizes than the profile holds.
    """
    config = engine_config(profile)
    register_all_kvcache_specs(config)
    cache = KVCacheConfig(
        num_blocks=profile.free_blocks + 1,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"group{index}"], spec_of(group, profile.mamba_cache_mode))
            for index, group in enumerate(profile.groups)
        ],
        # CacheConfig's default (config/cache.py:159); KVCacheConfig's own None would keep every recurrent state.
        prefix_cache_retention_interval=config.cache_config.prefix_cache_retention_interval,
    )
    block, hash_block = resolve_kv_cache_block_sizes(cache, config)
    found = (block, hash_block, resolve_cache_hit_alignment_tokens(cache, config, block, hash_block))
    expected = (profile.block_size, profile.hash_block_size, profile.cache_hit_alignment_tokens)
    if found != expected:
        raise ValueError(f"block, hash block and hit alignment: expected {expected} of the profile, found {found}")
    grammar = SimpleNamespace(accept_tokens=lambda request, tokens: True)
    return Scheduler(config, cache, grammar, block, hash_block, log_stats=False)


class Prompt(NamedTuple):
    """The tokens of a request, and who names its whole blocks for the prefix cache."""

    tokens: list[int]
    hasher: BlockHasher


class NamedBlocks:
    """Block hashes without hashing: blocks of a slot's prefix stream have the slot's name, all others are unique.

    That is what a hash without collisions says of prompts with a shared prefix and a unique rest, so the token ids
    do not matter and every prompt can be zeros.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._serial = itertools.count()

    def prompt(self, slot: int, shape: RequestShape) -> Prompt:
        block, shared, serial = self._block, shape.prefix // self._block, next(self._serial)

        def names(request: Request) -> list[BlockHash]:
            return [
                BlockHash(b"%d:%d" % (slot, index) if index < shared else b"%d.%d" % (serial, index))
                for index in range(len(request.block_hashes), request.num_tokens // block)
            ]

        return Prompt([0] * shape.prompt, names)


class HashedTokens:
    """The producer's token streams, hashed as the engine does by default (sha256)."""

    def __init__(self, block: int) -> None:
        init_none_hash(sha256)
        self._stream = TokenStream("oracle", 50_000)
        self._hasher = get_request_block_hasher(block, sha256)
        self._serial = itertools.count()

    def prompt(self, slot: int, shape: RequestShape) -> Prompt:
        return self.given(self._stream.prompt("oracle", next(self._serial), slot, shape.prefix, shape.prompt).tolist())

    def given(self, tokens: list[int]) -> Prompt:
        """A prompt of these very tokens."""
        return Prompt(tokens, self._hasher)


class Oracle:
    """Runs points of one profile, each as if it were the first of its engine.

    One scheduler serves all points: between them nothing is running and the prefix cache is reset
    (v1/core/block_pool.py:827: every hash is forgotten), which leaves a pool of free, nameless blocks in another
    order. That takes 0.6 ms where a new scheduler of 13,697 blocks takes 16, and a test shows that it is the same.
    """

    def __init__(self, profile: Profile, content: type[NamedBlocks] | type[HashedTokens] = NamedBlocks) -> None:
        self.profile = profile
        self.scheduler = scheduler_of(profile)
        self.content = content(profile.hash_block_size)
        self._sampling = {
            count: SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            for count in (1, DECODE_MAX_TOKENS)
        }
        self._serial = itertools.count()
        self._watch_pool()

    def _watch_pool(self) -> None:
        """Record the fewest free blocks after each allocation: a step may free blocks before it ends."""
        pool = self.scheduler.kv_cache_manager.block_pool
        allocate = pool.get_new_blocks
        self._fewest_free = pool.get_num_free_blocks()

        def get_new_blocks(count: int) -> Any:
            blocks = allocate(count)
            self._fewest_free = min(self._fewest_free, pool.get_num_free_blocks())
            return blocks

        pool.get_new_blocks = get_new_blocks

    def run(self, point: Point, repetitions: int = REPETITIONS) -> list[Run]:
        """Repetitions of `point` after one seeding, as the producer measures: each has to find the prefix again."""
        if not self.scheduler.reset_prefix_cache():
            raise AssertionError("the pool still holds blocks of an earlier run")
        shapes = request_shapes(point, self.profile.cache_hit_alignment_tokens)
        self.seed(shapes)
        generated = generated_tokens(point)
        return [
            self.submit({slot: (self.content.prompt(slot, shape), generated) for slot, shape in enumerate(shapes)})
            for _ in range(repetitions)
        ]

    def seed(self, shapes: Iterable[RequestShape]) -> None:
        """Leave each slot's prefix in the cache as `producer.session` does: all seeds together, a token longer each."""
        seeds = {
            slot: (self.content.prompt(slot, RequestShape(shape.prefix, shape.prefix + 1)), 1)
            for slot, shape in enumerate(shapes)
            if shape.prefix
        }
        self.submit(seeds)

    def cached_tokens(self, spec: RequestSpec) -> int:
        """Tokens of a prompt that the prefix cache holds now."""
        tokens, hasher = self.content.given(spec.prompt.tolist())
        request = Request(f"{next(self._serial)}", tokens, self._sampling[1], None, block_hasher=hasher)
        return int(self.scheduler.kv_cache_manager.get_computed_blocks(request)[1])

    def submit(self, requests: dict[int, tuple[Prompt, int]]) -> Run:
        """Submit (prompt, generated tokens) of each slot together and step until nothing more runs."""
        scheduler = self.scheduler
        before = self._fewest_free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        slots = {}
        for slot, ((tokens, hasher), generated) in requests.items():
            request = Request(f"{next(self._serial)}", tokens, self._sampling[generated], None, block_hasher=hasher)
            slots[request.request_id] = (slot, request)
            scheduler.add_request(request)
        steps = list(itertools.islice(self._steps(), LIMIT_OF_STEPS))
        unfinished = tuple(slots[request_id][0] for request_id in scheduler.requests)
        scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        return Run(
            steps=[{slots[request_id][0]: chunk for request_id, chunk in step.items()} for step in steps],
            peak_blocks=before - self._fewest_free,
            preemptions=sum(request.num_preemptions for _, request in slots.values()),
            unfinished=unfinished,
        )

    def _steps(self) -> Iterable[dict[str, tuple[int, int]]]:
        """(computed, scheduled) by request of each step, until the scheduler runs nothing."""
        scheduler = self.scheduler
        while scheduler.requests:
            output = scheduler.schedule()
            if not output.num_scheduled_tokens:
                return
            yield chunks_of(output)
            scheduler.update_from_output(output, self._answer(output))

    def _answer(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One token for each request whose prompt is done: `schedule` has already counted this step's tokens."""
        ids = list(output.num_scheduled_tokens)
        requests = (self.scheduler.requests[request_id] for request_id in ids)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[
                [0] if request.num_computed_tokens >= request.num_tokens else [] for request in requests
            ],
        )


def chunks_of(output: SchedulerOutput) -> dict[str, tuple[int, int]]:
    """(computed, scheduled) of each request of a step, as the producer's own scheduler reads them."""
    computed = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return {
        request_id: (computed[request_id], scheduled) for request_id, scheduled in output.num_scheduled_tokens.items()
    }


def generated_tokens(point: Point) -> int:
    """Tokens that each request of a point generates."""
    return DECODE_MAX_TOKENS if isinstance(point, DecodePoint) else 1


def expected_steps(point: Point, shapes: tuple[RequestShape, ...]) -> list[Chunks]:
    """The steps of a repetition that the producer accepts: all requests in lockstep."""
    chunks = [expected_chunks(point, shape) for shape in shapes]
    return [dict(enumerate(step)) for step in zip(*chunks, strict=True)]


class Disagreement(NamedTuple):
    """A point of which the planner and the engine's scheduler think differently. Blocks are the planner's figure."""

    what: str
    rule: str | None
    point: Point
    steps: list[Chunks]
    blocks: int
    run: Run

    def __str__(self) -> str:
        found = self.run.steps[: len(self.steps) + 2]
        return (
            f"{self.what} ({self.rule}): {self.point!r}: expected {self.steps} in {self.blocks} blocks, found {found} "
            f"({len(self.run.steps)} steps, {self.run.preemptions} preemptions, unfinished {self.run.unfinished}) "
            f"in {self.run.peak_blocks} blocks"
        )


@dataclasses.dataclass
class Proof:
    """Points of one profile: kept, dropped by rule, and those that no engine can be asked for, by rule.

    `exact` counts kept points whose peak of blocks is the planner's figure itself, not only within it.
    """

    kept: int = 0
    exact: int = 0
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    not_askable: Counter[str] = dataclasses.field(default_factory=Counter)
    disagreements: list[Disagreement] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def points(self) -> int:
        """Points that the engine's scheduler ran."""
        return self.kept + self.dropped.total()

    @property
    def points_per_second(self) -> float:
        return self.points / self.seconds

    def __str__(self) -> str:
        """The disagreements for a person: how many of each kind, and an example of it."""
        kinds = Counter((found.what, found.rule) for found in self.disagreements)
        examples = {(found.what, found.rule): found for found in reversed(self.disagreements)}
        return "\n".join(
            [f"{len(self.disagreements)} of {self.points} points disagree"]
            + [f"{count} x {examples[kind]}" for kind, count in kinds.items()]
        )


def is_askable(profile: Profile, point: Point, rule: str | None) -> bool:
    """Whether an engine takes the requests of a point: it refuses prompts beyond its context."""
    if rule in NOT_ASKABLE:
        return False
    shapes = request_shapes(point, profile.cache_hit_alignment_tokens)
    return all(shape.prompt + generated_tokens(point) <= profile.max_model_len for shape in shapes)


def verdict(rule: str | None, as_planned: bool, held: int, blocks: int) -> str | None:
    """What is wrong with a rule's word on a point that ran as planned, or not, and held blocks of `blocks`."""
    if rule == "seeding":
        return None  # cautious by design: the only rule that may drop what would have run
    if rule is not None:
        return "dropped, but runs as planned" if as_planned else None
    if not as_planned:
        return "kept, but runs otherwise"
    return "kept, but holds more blocks" if held > blocks else None


def prove(profile: Profile, points: Iterable[Point], engine: Profile | None = None) -> Proof:
    """Run every point that can be asked for, and compare with what the planner says of it.

    `engine` is the profile that the engine really has; it differs from the planner's only to see a proof fail.
    """
    oracle, proof, began = Oracle(engine or profile), Proof(), time.perf_counter()
    for point in points:
        rule = drop_rule(profile, point)
        if not is_askable(profile, point, rule):
            proof.not_askable[rule or "context"] += 1
            continue
        shapes = request_shapes(point, profile.cache_hit_alignment_tokens)
        steps, blocks = expected_steps(point, shapes), blocks_of_point(profile, point, shapes)
        runs = oracle.run(point)
        others = [run for run in runs if run.steps != steps or run.unfinished or run.preemptions]
        held = max(run.peak_blocks for run in runs)
        if (what := verdict(rule, not others, held, blocks)) is not None:
            proof.disagreements.append(Disagreement(what, rule, point, steps, blocks, (others or runs)[0]))
        if rule is None:
            proof.kept += 1
            proof.exact += held == blocks
        else:
            proof.dropped[rule] += 1
    proof.seconds = time.perf_counter() - began
    return proof


class Cell(NamedTuple):
    """What the producer's own conversation made of a point list; `failure` is why it could not go on."""

    lines: list[PointLine]
    failure: str | None


def measure_cell(profile: Profile, phase: Phase, points: tuple[Point, ...]) -> Cell:
    """Hold the producer's conversation with the scheduler: its order, its seeds, its tokens, its verdicts."""
    oracle, lines, forwards = Oracle(profile, HashedTokens), [], itertools.count()
    few = GENERIC.measurement.model_copy(update={"warmup_repeats": 1, "measurement_repeats": 3})
    contract, stream = GENERIC._replace(measurement=few), TokenStream("oracle", 50_000)
    hit, nothing = profile.cache_hit_alignment_tokens, frozenset[int]()
    talk = measure(stream, contract, host(lines, cached_tokens=oracle.cached_tokens), phase, points, hit, nothing, 1)
    steps: list[Step] | None = None
    try:
        while True:
            specs = (next(talk) if steps is None else talk.send(steps)).requests
            prompts = {spec.slot: spec.prompt for spec in specs}
            run = oracle.submit(
                {spec.slot: (oracle.content.given(spec.prompt.tolist()), spec.max_tokens) for spec in specs}
            )
            if run.unfinished:
                return Cell(lines, f"the engine would wait forever: prompts of {[len(p) for p in prompts.values()]}")
            steps = [
                Step(
                    forward_index=next(forwards),
                    chunks={slot: Chunk(*chunk, len(prompts[slot])) for slot, chunk in step.items()},
                    start=0.0,
                    end=0.0,
                    previous_end=0.0,
                    overhead=0.0,
                    cudagraph=UNOBSERVED,
                )
                for step in run.steps
            ]
    except StopIteration:
        return Cell(lines, None)
    except MeasurementFailed as failure:
        return Cell(lines, str(failure))


def main() -> None:
    """Prove the candidates of declared profiles with the vLLM that is first on the path; a JSON line for each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--origin", default=glm53flash.ORIGIN)
    parser.add_argument("profiles", type=Path, nargs="+")
    arguments = parser.parse_args()
    for file in arguments.profiles:
        profile = read_model(Profile, file, "profile")
        proof = prove(profile, candidates(arguments.origin, Grid(), profile).points())
        line = {
            "profile": file.name,
            "vllm": vllm.__version__,
            "scheduler": inspect.getfile(Scheduler),
            "points": proof.points,
            "kept": proof.kept,
            "exact": proof.exact,
            "dropped": proof.dropped,
            "disagreements": [str(found) for found in proof.disagreements],
            "points_per_second": round(proof.points_per_second),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
