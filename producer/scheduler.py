"""The benchmark scheduler: vLLM's own scheduler, fed by a measuring conversation instead of clients."""

import time
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from producer.session import Chunk, Conversation, MeasurementFailed, RequestSpec, Step
from schemas.native import CudagraphObservation

UNOBSERVED = CudagraphObservation(status="unavailable")


class BenchmarkScheduler(Scheduler):
    """Runs a conversation: submits its requests together, records every step from the engine's own output.

    Without a conversation it is vLLM's scheduler. `schedule()` passes its arguments through unchanged, positional
    or not: their names differ between engine releases.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._conversation: Conversation | None = None
        self._steps: list[Step] = []
        self._chunks: dict[int, Chunk] = {}
        self._slots: dict[str, RequestSpec] = {}
        self._submissions = 0
        self._forward_index = 0
        self._scheduled_at = 0.0
        self._previous_end: float | None = None
        self.overhead_seconds = 0.0
        self.stopped_by: MeasurementFailed | None = None

    def begin(self, conversation: Conversation, first_forward_index: int) -> None:
        """Start a conversation. The engine then has work until it ends."""
        self._hasher = get_request_block_hasher(
            self.hash_block_size, get_hash_fn_by_name(self.cache_config.prefix_caching_hash_algo)
        )
        self._conversation, self._forward_index = conversation, first_forward_index
        self._advance(start=True)

    @property
    def running_conversation(self) -> bool:
        return self._conversation is not None

    def has_requests(self) -> bool:
        return self.running_conversation or super().has_requests()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        # A finished request leaves the workers with the next step: let an empty step carry that, so that no
        # measured step pays for the repetition before it.
        if self._conversation is not None and not self.requests and not self.finished_req_ids:
            self._advance()
        output = super().schedule(*args, **kwargs)
        entered = time.monotonic()
        if self._slots and output.total_num_scheduled_tokens:
            self._chunks = self._chunks_of(output)
        self._scheduled_at = time.monotonic()
        self.overhead_seconds += self._scheduled_at - entered
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        arrived = time.monotonic()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if not self._slots or not scheduler_output.total_num_scheduled_tokens:
            return outputs
        entered = time.monotonic()
        self._steps.append(
            Step(
                forward_index=self._forward_index,
                chunks=self._chunks,
                start=self._scheduled_at,
                end=arrived,
                previous_end=self._previous_end,
                cudagraph=_observed(model_runner_output),
            )
        )
        self._forward_index += 1
        self._previous_end = arrived
        self.overhead_seconds += time.monotonic() - entered
        return {}

    def _chunks_of(self, output: SchedulerOutput) -> dict[int, Chunk]:
        computed = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return {
            self._slots[req_id].slot: Chunk(computed[req_id], scheduled, len(self._slots[req_id].prompt))
            for req_id, scheduled in output.num_scheduled_tokens.items()
        }

    def _advance(self, start: bool = False) -> None:
        """Hand the finished steps to the conversation and submit what it wants next."""
        assert self._conversation is not None
        steps, self._steps = self._steps, []
        self._slots, self._previous_end = {}, None
        try:
            specs = next(self._conversation) if start else self._conversation.send(steps)
        except StopIteration:
            self._conversation = None
            return
        except MeasurementFailed as failure:
            self._conversation, self.stopped_by = None, failure
            return
        self._submissions += 1
        for spec in specs:
            request = Request(
                request_id=f"passgrid-{self._submissions}-{spec.slot}",
                prompt_token_ids=spec.prompt.tolist(),
                sampling_params=SamplingParams(temperature=0.0, max_tokens=spec.max_tokens, ignore_eos=True),
                pooling_params=None,
                block_hasher=self._hasher,
            )
            self._slots[request.request_id] = spec
            self.add_request(request)


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
