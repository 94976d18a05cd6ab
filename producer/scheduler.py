"""The benchmark scheduler: vLLM's own scheduler, fed by a measuring conversation instead of clients."""

import time
from collections.abc import Callable
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from producer.lockstep import Lockstep
from producer.session import SAMPLING_TEMPERATURE, Chunk, Conversation, MeasurementFailed, RequestSpec, Spent, Step
from schemas.native import UNOBSERVED, CudagraphObservation

BlockHasher = Callable[[Request], list[BlockHash]]


class PrefixHashes:
    """Block hashes of each slot's prefix, computed once: a prompt of 100,000 tokens takes longer to hash than to run.

    A slot's prefixes are one stream (`TokenStream.prefix`): the hashes of a longer one begin with those of a shorter.
    """

    def __init__(self, block: int, hasher: BlockHasher) -> None:
        self._block, self._hasher = block, hasher
        self._known: dict[int, list[BlockHash]] = {}

    def hasher(self, spec: RequestSpec) -> BlockHasher:
        """vLLM's hasher, which is asked when the request is made and whenever it grows, with a head start."""

        def blocks(request: Request) -> list[BlockHash]:
            if request.block_hashes:
                return self._hasher(request)
            shared = spec.prefix // self._block
            known = self._known.get(spec.slot, [])[:shared]
            # The hasher goes on after what the request has (v1/core/kv_cache_utils.py, get_request_block_hasher).
            request.block_hashes.extend(known)
            new = self._hasher(request)
            request.block_hashes.clear()
            if shared > len(self._known.get(spec.slot, [])):
                self._known[spec.slot] = (known + new)[:shared]
            return known + new

        return blocks


class BenchmarkScheduler(Scheduler):
    """Runs a conversation: submits its requests together, records every step from the engine's own output.

    Without a conversation it is vLLM's scheduler. `schedule()` passes its arguments through unchanged, positional
    or not: their names differ between engine releases.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._conversation: Conversation | None = None
        self._started = False
        self._lockstep = Lockstep()
        self._beat: Callable[[], None] = lambda: None
        self._expected_steps = 0
        self._steps: list[Step] = []
        self._chunks: dict[int, Chunk] = {}
        self._slots: dict[str, RequestSpec] = {}
        self._prepared: list[tuple[RequestSpec, Request]] = []
        self._requests = 0
        self._forward_index = 0
        self._scheduled_at = 0.0
        self._previous_end: float | None = None
        self._overhead_of_step = 0.0
        self._overhead_seconds = 0.0
        self._forwards = 0
        self.stopped_by: MeasurementFailed | None = None

    def begin(
        self, conversation: Conversation, first_forward_index: int, lockstep: Lockstep, beat: Callable[[], None]
    ) -> None:
        """Start a conversation: the engine then has work until it ends. `beat` is called after every forward."""
        hasher = get_request_block_hasher(
            self.hash_block_size, get_hash_fn_by_name(self.cache_config.prefix_caching_hash_algo)
        )
        self._prefixes = PrefixHashes(self.hash_block_size, hasher)
        self._conversation, self._forward_index = conversation, first_forward_index
        self._lockstep, self._beat = lockstep, beat

    @property
    def running_conversation(self) -> bool:
        return self._conversation is not None

    def spent(self) -> Spent:
        return Spent(self._overhead_seconds, self._forwards)

    def cached_tokens(self, spec: RequestSpec) -> int:
        """Tokens of the prompt that the prefix cache holds now, as the engine would find them."""
        request = self._request_of(spec)
        self._prepared.append((spec, request))
        return int(self.kv_cache_manager.get_computed_blocks(request)[1])

    def has_requests(self) -> bool:
        return self.running_conversation or super().has_requests()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        called = time.monotonic()
        if self._conversation is not None:
            if self.requests:
                if self._steps and len(self._steps) >= self._expected_steps:
                    self._lockstep.still_working()
            # A finished request leaves the workers with the next step: let an empty step carry that, so that no
            # measured step pays for the repetition before it.
            elif not self.finished_req_ids:
                self._lockstep.wait_for_others(len(self._steps), self._expected_steps)
                self._advance()
                called = time.monotonic()
        self._overhead_of_step += time.monotonic() - called
        output = super().schedule(*args, **kwargs)
        entered = time.monotonic()
        if self._slots and output.total_num_scheduled_tokens:
            self._chunks = self._chunks_of(output)
        self._scheduled_at = time.monotonic()
        self._overhead_of_step += self._scheduled_at - entered
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        arrived = time.monotonic()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if not self._slots or not scheduler_output.total_num_scheduled_tokens:
            return outputs
        entered = time.monotonic()
        self._beat()  # of forwards alone: a scheduler that has requests and schedules nothing is as good as dead
        self._steps.append(
            Step(
                forward_index=self._forward_index,
                chunks=self._chunks,
                start=self._scheduled_at,
                end=arrived,
                previous_end=self._previous_end,
                overhead=self._overhead_of_step,
                cudagraph=_observed(model_runner_output),
            )
        )
        self._overhead_seconds += self._overhead_of_step
        self._forwards += 1
        self._forward_index += 1
        self._previous_end = arrived
        self._overhead_of_step = time.monotonic() - entered
        return {}

    def _chunks_of(self, output: SchedulerOutput) -> dict[int, Chunk]:
        computed = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return {
            self._slots[req_id].slot: Chunk(computed[req_id], scheduled, len(self._slots[req_id].prompt))
            for req_id, scheduled in output.num_scheduled_tokens.items()
        }

    def _advance(self) -> None:
        """Hand the finished steps to the conversation and submit what it wants next."""
        assert self._conversation is not None
        steps, self._steps = self._steps, []
        self._slots, self._previous_end, self._overhead_of_step = {}, None, 0.0
        try:
            submission = self._conversation.send(steps) if self._started else next(self._conversation)
        except StopIteration:
            self._conversation = None
            return
        except MeasurementFailed as failure:
            self._conversation, self.stopped_by = None, failure
            return
        self._started, self._expected_steps = True, submission.expected_steps
        prepared, self._prepared = self._prepared, []
        for spec in submission.requests:
            request = next((request for known, request in prepared if known is spec), None) or self._request_of(spec)
            self._slots[request.request_id] = spec
            self.add_request(request)
        self._lockstep.exchange(b"")

    def _request_of(self, spec: RequestSpec) -> Request:
        self._requests += 1
        return Request(
            request_id=f"passgrid-{self._requests}-{spec.slot}",
            prompt_token_ids=spec.prompt.tolist(),
            sampling_params=SamplingParams(
                temperature=SAMPLING_TEMPERATURE, max_tokens=spec.max_tokens, ignore_eos=True
            ),
            pooling_params=None,
            block_hasher=self._prefixes.hasher(spec),
        )


def _observed(output: ModelRunnerOutput) -> CudagraphObservation:
    stats = output.cudagraph_stats
    if stats is None:
        return UNOBSERVED
    return CudagraphObservation(
        status="observed",
        runtime_mode=str(stats.runtime_mode),
        num_unpadded_tokens=stats.num_unpadded_tokens,
        num_padded_tokens=stats.num_padded_tokens,
        num_paddings=stats.num_paddings,
    )
