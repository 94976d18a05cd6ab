"""The measuring conversation, answered by hand with what an engine's record could show."""

import itertools

import pytest
from hosts import host

from producer.contracts import GENERIC
from producer.session import Chunk, MeasurementFailed, Step, measure, scheduled_requests
from producer.tokens import TokenStream
from schemas.journal import PointLine
from schemas.native import UNOBSERVED
from schemas.points import DecodePoint, PrefillPoint

PREFILL = PrefillPoint(batch_size=2, total_prefill_tokens=2 * 32, total_kv_read_tokens=2 * 128)
DECODE = DecodePoint(batch_size=2, total_kv_read_tokens=2 * 200)


class Engine:
    """Answers submissions like an engine with a prefix cache of 128-token blocks; `lose` forgets a slot's prefix."""

    def __init__(self) -> None:
        self.forwards = itertools.count()
        self.clock = itertools.count(step=0.25)
        self.cached: dict[tuple[int, ...], bool] = {}
        self.submissions: list[tuple] = []
        self.lose: set[int] = set()
        self.extra_step_at: set[int] = set()

    def step(self, chunks: dict[int, Chunk], previous_end: float | None) -> Step:
        start, end = next(self.clock), next(self.clock)
        return Step(next(self.forwards), chunks, start, end, previous_end, 0.125, UNOBSERVED)

    def cached_tokens(self, spec) -> int:
        return self.hit(spec.prompt)

    def hit(self, prompt) -> int:
        whole = (len(prompt) - 1) // 128 * 128
        while whole and tuple(prompt[:whole]) not in self.cached:
            whole -= 128
        return whole

    def answer(self, requests) -> list[Step]:
        number = len(self.submissions)
        self.submissions.append(requests)
        if number in self.lose:
            self.cached.clear()
        hits = {r.slot: self.hit(r.prompt) for r in requests}
        steps = [
            self.step(
                {r.slot: Chunk(hits[r.slot], len(r.prompt) - hits[r.slot], len(r.prompt)) for r in requests}, None
            )
        ]
        if number in self.extra_step_at:
            steps.append(self.step(steps[0].chunks, steps[-1].end))
        for generated in range(requests[0].max_tokens - 1):
            chunks = {r.slot: Chunk(len(r.prompt) + generated, 1, len(r.prompt)) for r in requests}
            steps.append(self.step(chunks, steps[-1].end))
        for request in requests:
            for whole in range(128, len(request.prompt) + 1, 128):
                self.cached[tuple(request.prompt[:whole])] = True
        return steps


def converse(engine: Engine, phase, points, finished=frozenset()) -> list[PointLine]:
    lines: list[PointLine] = []
    talk = measure(
        TokenStream("53", 5000),
        GENERIC,
        host(lines, cached_tokens=engine.cached_tokens),
        phase,
        points,
        128,
        finished,
        1,
    )
    try:
        submission = next(talk)
        while True:
            submission = talk.send(engine.answer(submission.requests))
    except StopIteration:
        return lines


def test_a_prefill_point_is_seeded_warmed_and_measured_in_one_step_each():
    engine = Engine()
    (point,) = converse(engine, "prefill", (PREFILL,))
    (line,) = point.ranks
    assert len(engine.submissions) == 1 + 5 + 10
    assert [(seed.slot, seed.prefix_tokens, seed.computed_tokens) for seed in line.seeds] == [
        (0, 128, 129),
        (1, 128, 129),
    ]
    assert line.warmup_ordinals == [0, 1, 2, 3, 4]
    assert [r.ordinal for r in line.repetitions] == list(range(5, 15))
    scheduled = line.repetitions[0].scheduled_requests
    assert (scheduled.num_prefill_requests, scheduled.sum_prefill_tokens, scheduled.sum_prefill_kv_tokens) == (
        2,
        64,
        256,
    )
    assert {r.basis for r in line.repetitions} == {"schedule_to_output"}
    assert {r.overhead_seconds for r in line.repetitions} == {0.0}
    assert point.kv_seed_regime == "real_prefix"


def test_a_decode_point_is_measured_in_its_second_pure_decode_step():
    engine = Engine()
    ((line,),) = [point.ranks for point in converse(engine, "decode", (DECODE,))]
    assert {len(request.prompt) for request in engine.submissions[-1]} == {199}
    measured = line.repetitions[0]
    assert measured.basis == "inter_output"
    assert (measured.scheduled_requests.num_decode_requests, measured.scheduled_requests.sum_decode_kv_tokens) == (
        2,
        400,
    )
    assert measured.scheduled_requests.num_prefill_requests == 0
    # From the arrival of the first decode step's output to that of the second: three quarter-second ticks less two.
    assert measured.end_monotonic - measured.start_monotonic == 0.5
    assert measured.overhead_seconds == 0.125


def test_no_two_repetitions_submit_the_same_prompt():
    engine = Engine()
    converse(engine, "prefill", (PREFILL,))
    prompts = [tuple(request.prompt) for requests in engine.submissions for request in requests]
    assert len(set(prompts)) == len(prompts)


def test_an_evicted_prefix_is_noticed_before_the_repetition_and_seeded_again():
    engine = Engine()
    asked = itertools.count()

    def forgetful(spec) -> int:
        if next(asked) == 8:  # the fifth repetition asks for its first slot
            engine.cached.clear()
        return engine.hit(spec.prompt)

    engine.cached_tokens = forgetful
    ((line,),) = [point.ranks for point in converse(engine, "prefill", (PREFILL,))]
    assert line.rejections == []
    assert [(seed.slot, seed.attempt) for seed in line.seeds] == [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert len(line.repetitions) == 10


def test_a_prefix_that_goes_while_the_repetition_runs_is_rejected_and_seeded_again():
    engine = Engine()
    engine.lose = {9}
    ((line,),) = [point.ranks for point in converse(engine, "prefill", (PREFILL,))]
    assert len(line.rejections) == 1
    assert "expected (cached, scheduled) (128, 32), found (0, 160)" in line.rejections[0].reason
    assert line.rejections[0].chunks == [[[0, 160], [0, 160]]]
    # The rejected repetition computed both prefixes itself, so they are there again.
    assert len(line.seeds) == 2
    assert len(line.repetitions) == 10
    assert line.rejections[0].ordinal not in {r.ordinal for r in line.repetitions}


def test_a_repetition_of_two_steps_is_rejected():
    engine = Engine()
    engine.extra_step_at = {4}
    ((line,),) = [point.ranks for point in converse(engine, "prefill", (PREFILL,))]
    assert line.rejections[0].reason == "expected 1 steps, found 2"


def test_too_many_rejections_end_the_cell():
    engine = Engine()
    engine.extra_step_at = set(range(100))
    with pytest.raises(MeasurementFailed, match="4 rejected repetitions"):
        converse(engine, "prefill", (PREFILL,))


def test_a_finished_point_is_not_measured_again():
    engine = Engine()
    second = PrefillPoint(batch_size=1, total_prefill_tokens=16, total_kv_read_tokens=0)
    lines = converse(engine, "prefill", (PREFILL, second), finished=frozenset({1}))
    assert [line.benchmark_id for line in lines] == [2]
    assert len(engine.submissions) == 15


def test_counts_of_a_mixed_step_come_from_the_engines_record():
    step = Engine().step({0: Chunk(0, 10, 10), 1: Chunk(4, 16, 20), 2: Chunk(50, 1, 30), 3: Chunk(70, 1, 30)}, None)
    found = scheduled_requests(step)
    assert (found.num_prefill_requests, found.sum_prefill_tokens, found.sum_prefill_kv_tokens) == (2, 26, 4)
    assert (found.num_decode_requests, found.sum_decode_kv_tokens) == (2, 120)
    # Population variances: of full prompt lengths 10 and 20, of contexts 50 and 70.
    assert (found.var_prefill_length, found.var_decode_kv_tokens) == (25.0, 100.0)
