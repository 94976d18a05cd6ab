"""Data-parallel ranks side by side: nobody waits in a forward that the others do not run."""

import itertools
import threading

import pytest
from hosts import host
from test_session import Engine

from producer.contracts import GENERIC
from producer.lockstep import Lockstep
from producer.session import measure
from producer.tokens import TokenStream
from schemas.journal import PointLine
from schemas.points import PrefillPoint

RANKS = 2


class Meeting:
    """Where threads that stand for ranks exchange values; a forward is a meeting too, as a collective is."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=10)
        self._values: list[bytes] = [b""] * ranks

    def exchange(self, rank: int, data: bytes) -> list[bytes]:
        self._values[rank] = data
        self._barrier.wait()
        everyone = list(self._values)
        self._barrier.wait()
        return everyone


class ThreadLockstep(Lockstep):
    """The rules of `Lockstep` over a meeting of threads."""

    def __init__(self, rank: int, talk: Meeting, forwards: Meeting) -> None:
        super().__init__(group="threads", run_dummy_batch=self.dummy)
        self.rank, self.talk, self.forwards, self.dummies = rank, talk, forwards, 0

    def dummy(self) -> None:
        self.dummies += 1
        self.forwards.exchange(self.rank, b"dummy")

    def exchange(self, data: bytes) -> list[bytes]:
        return self.talk.exchange(self.rank, data)


def serve(step: ThreadLockstep, forwards: int, expected: int) -> None:
    """What the scheduler does for one submission (`BenchmarkScheduler.schedule`)."""
    step.exchange(b"")
    for done in range(forwards):
        if done and done >= expected:
            step.still_working()
        step.forwards.exchange(step.rank, b"forward")
    step.wait_for_others(forwards, expected)


@pytest.mark.parametrize(
    ("forwards", "expected", "dummies"),
    [
        ((1, 1), 1, (0, 0)),
        ((3, 3), 3, (0, 0)),
        ((1, 2), 1, (1, 0)),  # one rank's prefill was split
        ((4, 1), 1, (0, 3)),
        ((3, 4), 3, (1, 0)),
        ((2, 5), 0, (3, 0)),  # seeds: as many as each needs
        ((1, 3), 3, (2, 0)),  # one rank did less than expected
    ],
)
def test_ranks_with_different_numbers_of_forwards_end_together(forwards, expected, dummies):
    talk, collective = Meeting(RANKS), Meeting(RANKS)
    steps = [ThreadLockstep(rank, talk, collective) for rank in range(RANKS)]
    threads = [
        threading.Thread(target=serve, args=(step, count, expected))
        for step, count in zip(steps, forwards, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert tuple(step.dummies for step in steps) == dummies


def test_a_single_rank_waits_for_nobody():
    alone = Lockstep()
    assert alone.exchange(b"x") == [b"x"]
    alone.wait_for_others(1, 3)
    alone.still_working()


def converse(engines: list[Engine], points) -> list[list[PointLine]]:
    """Every rank's lines, from conversations that agree with each other."""
    meeting = Meeting(len(engines))
    lines: list[list[PointLine]] = [[] for _ in engines]
    errors: list[BaseException] = []

    def talk(rank: int) -> None:
        engine = engines[rank]
        given = {
            "cached_tokens": engine.cached_tokens,
            "exchange": lambda data: meeting.exchange(rank, data),
        }
        conversation = measure(
            TokenStream("53", 5000, rank), GENERIC, host(lines[rank], **given), "prefill", points, 128, frozenset(), 1
        )
        try:
            submission = next(conversation)
            while True:
                submission = conversation.send(engine.answer(submission.requests))
        except StopIteration:
            return
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=talk, args=(rank,)) for rank in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    return lines


POINT = PrefillPoint(batch_size=2, total_prefill_tokens=2 * 32, total_kv_read_tokens=2 * 128)


def test_a_repetition_that_one_rank_rejects_counts_on_none():
    first, second = Engine(), Engine()
    second.extra_step_at = {4}
    lines = converse([first, second], (POINT,))
    (point,), (other,) = lines
    assert point.ranks == other.ranks
    for rank in point.ranks:
        assert [r.reason for r in rank.rejections] == ["rank 1: expected 1 steps, found 2"]
        assert len(rank.repetitions) == 10
    ordinals = [[r.ordinal for r in rank.repetitions] for rank in point.ranks]
    assert ordinals[0] == ordinals[1]


def test_a_prefix_that_one_rank_lost_is_seeded_on_all():
    """Pools differ by rank: another rank still has the prefix and computes one token more."""
    first, second = Engine(), Engine()
    asked = itertools.count()

    def forgetful(spec) -> int:
        if next(asked) == 8:
            second.cached.clear()
        return second.hit(spec.prompt)

    second.cached_tokens = forgetful
    (point,) = converse([first, second], (POINT,))[0]
    seeds = [[(seed.slot, seed.attempt, seed.cached_tokens) for seed in rank.seeds] for rank in point.ranks]
    assert seeds[0] == [(0, 1, 0), (1, 1, 0), (0, 2, 128), (1, 2, 128)]
    assert seeds[1] == [(0, 1, 0), (1, 1, 0), (0, 2, 0), (1, 2, 0)]
    assert [len(rank.rejections) for rank in point.ranks] == [0, 0]


def test_ranks_measure_different_tokens():
    (point,) = converse([Engine(), Engine()], (POINT,))[0]
    prompts = [request.sha256 for rank in point.ranks for request in rank.prompts.requests]
    assert len(set(prompts)) == 4
