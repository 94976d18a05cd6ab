"""The scheduler subclass by itself: what it passes on, and what it counts as its own cost."""

from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from producer.scheduler import BenchmarkScheduler
from producer.session import Spent

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
