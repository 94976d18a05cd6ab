"""Data-parallel ranks of one engine, side by side: they submit together, and none waits in a forward for ever."""

from collections.abc import Callable
from typing import Any


class Lockstep:
    """`group` is the gloo group of the ranks (vLLM's `stateless_init_dp_group`), None for a single rank.

    A forward of vLLM with data parallelism is collective: a rank without work has to run a dummy batch while another
    one still works (vllm/v1/engine/core.py, `DPEngineCoreProc.run_busy_loop`). vLLM asks every few forwards whether
    anybody does; here the ranks ask before a submission and after its expected forwards, so that nothing stands
    between the forwards that are measured.
    """

    def __init__(self, group: Any = None, run_dummy_batch: Callable[[], None] = lambda: None) -> None:
        self._group, self._run_dummy_batch = group, run_dummy_batch

    def exchange(self, data: bytes) -> list[bytes]:
        """Everybody's `data`, in rank order."""
        if self._group is None:
            return [data]
        import torch
        from torch import distributed

        ranks = self._group.size()
        length = torch.tensor([len(data)], dtype=torch.int64)
        lengths = [torch.zeros_like(length) for _ in range(ranks)]
        distributed.all_gather(lengths, length, group=self._group)
        longest = max(int(n) for n in lengths)
        padded = torch.frombuffer(bytearray(data.ljust(longest + 1, b"\0")), dtype=torch.uint8)
        rows = [torch.zeros_like(padded) for _ in range(ranks)]
        distributed.all_gather(rows, padded, group=self._group)
        return [row.numpy().tobytes()[: int(n)] for row, n in zip(rows, lengths, strict=True)]

    def all_done(self, done: bool) -> bool:
        """Whether every rank is done; returns when all have asked."""
        return all(data == b"1" for data in self.exchange(b"1" if done else b"0"))

    def wait_for_others(self, forwards: int, expected: int) -> None:
        """This rank is done after `forwards` of its `expected` forwards: run along until all are."""
        if self._group is None:
            return
        for _ in range(expected - forwards):
            self._run_dummy_batch()
        while not self.all_done(True):
            self._run_dummy_batch()

    def still_working(self) -> None:
        """This rank is about to run a forward that the others may not have: they run a dummy batch beside it."""
        if self._group is not None:
            self.all_done(False)
