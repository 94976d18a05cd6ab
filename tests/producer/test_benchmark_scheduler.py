"""The scheduler subclass by itself: what it passes on, and what it counts as its own cost."""

import threading
from array import array
from types import SimpleNamespace

import pytest
from test_lockstep import Meeting, ThreadLockstep
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from producer.scheduler import BenchmarkScheduler, PrefixHashes
from producer.session import RequestSpec, Spent, Submission
from producer.tokens import TokenStream

NOTHING = SimpleNamespace(total_num_scheduled_tokens=0)


@pytest.fixture
def scheduler(monkeypatch):
    """Without an engine's configuration: the base class only records how it is called."""
    calls = []
    monkeypatch.setattr(Scheduler, "__init__", lambda self, *args, **kwargs: calls.append(("__init__", args, kwargs)))

    def schedule(self, *args, **kwargs):
        calls.append(("schedule", args, kwargs))
        return NOTHING

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    monkeypatch.setattr(Scheduler, "has_requests", lambda self: False)
    made = BenchmarkScheduler("config", log_stats=False)
    made.calls = calls
    return made


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((True,), {}), ((), {"throttle_prefills": True})])
def test_schedule_reaches_the_base_class_unchanged(scheduler, args, kwargs):
    """An engine hands over a new argument, by position or by name (vllm-gaudi#1555)."""
    assert scheduler.schedule(*args, **kwargs) is NOTHING
    assert scheduler.calls == [("__init__", ("config",), {"log_stats": False}), ("schedule", args, kwargs)]


def test_without_a_conversation_it_has_no_work_and_no_cost(scheduler):
    assert not scheduler.has_requests()
    scheduler.schedule()
    assert scheduler.spent() == Spent(0.0, 0)


class Pool:
    """Stands for the base scheduler: the requests of a submission all run, for as many forwards as the script says."""

    def __init__(self, monkeypatch, forwards: dict[int, list[int]]) -> None:
        def schedule(self) -> SimpleNamespace:
            ids = list(self.requests)
            if not ids:
                self.finished_req_ids = set()
            return SimpleNamespace(
                total_num_scheduled_tokens=len(ids),
                num_scheduled_tokens=dict.fromkeys(ids, 1),
                scheduled_new_reqs=[],
                scheduled_cached_reqs=SimpleNamespace(req_ids=ids, num_computed_tokens=[0] * len(ids)),
            )

        def update_from_output(self, scheduler_output, model_runner_output) -> dict:
            self.left -= 1
            if not self.left:
                self.finished_req_ids = set(self.requests)
                self.requests = {}
            return {}

        def add_request(self, request) -> None:
            self.requests[request.request_id] = request
            self.left = self.script[0]

        for function in (schedule, update_from_output, add_request):
            monkeypatch.setattr(Scheduler, function.__name__, function)
        monkeypatch.setattr(Scheduler, "__init__", lambda self: None)
        self.forwards = forwards

    def scheduler(self, rank: int) -> BenchmarkScheduler:
        made = BenchmarkScheduler()
        made.requests, made.finished_req_ids, made.hash_block_size = {}, set(), 16
        made.cache_config = SimpleNamespace(prefix_caching_hash_algo="sha256")
        made.script = self.forwards[rank]
        return made


def test_two_schedulers_with_different_forwards_end_every_submission_together(monkeypatch):
    """The real order of calls: a rank's prefill is split, another's seeds take longer, and nobody is left waiting."""
    init_none_hash(sha256)
    expected = [1, 3, 0, 1]
    forwards = {0: [1, 3, 2, 2], 1: [2, 3, 5, 1]}
    dummies = {0: 1 + 0 + 3 + 0, 1: 0 + 0 + 0 + 1}
    pool, talk, collective = Pool(monkeypatch, forwards), Meeting(2), Meeting(2)
    seen: dict[int, list[int]] = {0: [], 1: []}
    locksteps = [ThreadLockstep(rank, talk, collective) for rank in range(2)]

    def run(rank: int) -> None:
        scheduler = pool.scheduler(rank)

        def conversation():
            for steps in expected:
                seen[rank].append(len((yield Submission((RequestSpec(0, array("I", range(3, 40)), 1),), steps))))
                scheduler.script.pop(0)

        scheduler.begin(conversation(), 0, locksteps[rank], lambda: None)
        while scheduler.running_conversation:
            output = scheduler.schedule()
            if output.total_num_scheduled_tokens:
                collective.exchange(rank, b"forward")
                scheduler.update_from_output(output, SimpleNamespace(cudagraph_stats=None))

    wanted = {rank: list(script) for rank, script in forwards.items()}
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert seen == wanted
    assert {step.rank: step.dummies for step in locksteps} == dummies


def test_a_prefix_is_hashed_once_and_hashed_right():
    """What a slot shares of long prompts is not hashed again, and the engine sees the same blocks."""
    init_none_hash(sha256)
    hashed = []
    plain = get_request_block_hasher(16, sha256)

    def counting(request):
        new = plain(request)
        hashed.append(len(new))
        return new

    stream, prefixes = TokenStream("53", 5000), PrefixHashes(16, counting)

    def request(spec: RequestSpec, hasher) -> Request:
        sampling = SamplingParams(max_tokens=3, ignore_eos=True)
        return Request("r", spec.prompt.tolist(), sampling, None, block_hasher=hasher)

    for repetition, (prefix, length, blocks) in enumerate([(64, 100, 6), (64, 100, 2), (128, 200, 8), (32, 90, 3)]):
        spec = RequestSpec(0, stream.prompt("key", repetition, 0, prefix, length), 3, prefix)
        made, whole = request(spec, prefixes.hasher(spec)), request(spec, plain)
        assert made.block_hashes == whole.block_hashes
        assert hashed.pop() == blocks
        # And as it grows, token by token, past a block's end.
        for growing in (made, whole):
            growing.append_output_token_ids([7] * 30)
        assert made.block_hashes == whole.block_hashes
        hashed.clear()
