"""Journals that were forged through and through: chain, artifacts, receipt and merged file made anew from them.

What is found is what something else witnesses. Right journals are those of real cells, and of conversations with an
engine by hand that evicts, rejects, splits long prompts and is started again.
"""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cells import frozen_cell
from hosts import host
from tampering import accepted_of, failures, rewrite_line

from producer.contracts import GENERIC, GLM53FLASH
from producer.journal import Journal
from producer.partition import request_shapes
from producer.session import Chunk, RequestSpec, Spent, Step, measure
from producer.tokens import TokenStream
from schemas.canonical import read_model
from schemas.journal import PointLine, RankPoint, RankSession, SessionLine
from schemas.native import UNOBSERVED, CudagraphObservation
from schemas.plan import FrozenCell
from schemas.points import DecodePoint, PointManifest, PrefillPoint

from journal_checks import MeasuredCell, check_clocks, check_course, check_points, check_seeding
from session_checks import check_sessions
from verify_cell import read_cell, verify


@pytest.fixture
def cell_of(smoke: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of the smoke cell whose name begins so."""

    def copied(prefix: str) -> Path:
        (source,) = (smoke / "cells").glob(f"{prefix}-*")
        return Path(shutil.copytree(source, tmp_path / source.name))

    return copied


@pytest.fixture
def decode(cell_of) -> Path:
    return cell_of("decode-hybrid")


# Sessions


def engine(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda line: change(line["ranks"][0]["engine"])


def launch(**values: Any) -> Callable[[dict[str, Any]], Any]:
    names = {name.replace("__", "."): value for name, value in values.items()}
    return engine(lambda found: found["serving_config"]["launch"].update(names))


def own(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda line: change(line["ranks"][0])


SESSIONS = [
    # Blocks that are none.
    *(
        (engine(lambda found, name=name, value=value: found.update({name: value})), f"engine.{name}: expected")
        for name in ("kv_cache", "scheduler", "parallel", "graph", "versions", "model", "quantization", "threads")
        for value in (None, [])
    ),
    (engine(lambda found: found.update(serving_config=None)), "engine.serving_config: expected a mapping"),
    (engine(lambda found: found["serving_config"].update(launch=[])), "launch: expected a mapping, found []"),
    (own(lambda rank: rank["cudagraph"].update(decode_capture_sizes=None)), "decode_capture_sizes: expected []"),
    # Values, and their types.
    (engine(lambda found: found["kv_cache"].update(enable_prefix_caching=1)), "prefix_caching: expected True, found 1"),
    (engine(lambda found: found["parallel"].update(data_parallel_rank=False)), "rank: expected 0, found False"),
    (engine(lambda found: found["parallel"].update(pipeline_parallel_size=2)), "parallel_size: expected 1, found 2"),
    (engine(lambda found: found["parallel"].update(enable_eplb=True)), "enable_eplb: expected False, found True"),
    (engine(lambda found: found["scheduler"].update(enable_chunked_prefill=False)), "prefill: expected True"),
    (engine(lambda found: found["scheduler"].update(surprise=1)), "scheduler.surprise: expected no such field"),
    (engine(lambda found: found["scheduler"].pop("max_num_seqs")), "max_num_seqs: expected 8, found nothing"),
    (engine(lambda found: found.update(surprise=1)), "engine.surprise: expected no such field, found 1"),
    (engine(lambda found: found.update(resolution="resolved")), "resolution: expected pending_worker_probe"),
    (engine(lambda found: found["graph"].update(cudagraph_capture_sizes=[1])), "capture_sizes: expected [], found [1]"),
    (engine(lambda found: found["versions"].update(python="3.12.1")), "versions.python: expected 3.11"),
    (engine(lambda found: found["model"].update(dtype="float16")), "model.dtype: expected bfloat16, found float16"),
    (engine(lambda found: found["model"].update(architectures=[])), "architectures: expected a list of a text"),
    (engine(lambda found: found["quantization"].update(method=5)), "method: expected a text or None, found 5"),
    (engine(lambda found: found["threads"].update(OMP_NUM_THREADS="2")), "OMP_NUM_THREADS: expected 1, found 2"),
    (engine(lambda found: found["threads"].update(torch_num_threads=[1, 1])), "expected a list of 1 times a positive"),
    (engine(lambda found: found["kv_cache"].update(block_size=128)), "kv_cache.block_size: expected 256, found 128"),
    (engine(lambda found: found["kv_cache"].update(cache_dtype="fp8")), "cache_dtype: expected one of ('auto', "),
    (engine(lambda found: found["kv_cache"].update(groups=[])), "groups: expected one at least, found none"),
    (engine(lambda found: found["kv_cache"]["groups"][0].update(block_size=128)), "[0].block_size: expected 256"),
    (engine(lambda found: found["kv_cache"]["groups"][3].update(block_size=96)), "expected a divisor of 256, found 96"),
    (
        engine(lambda found: found["kv_cache"]["groups"][3].update(type="Spec")),
        "a cache-spec class, found Spec",
    ),
    (
        engine(lambda found: found["kv_cache"]["groups"][3].update(dtype="uint8")),
        "expected bfloat16, found uint8",
    ),
    (engine(lambda found: found["kv_cache"]["groups"][3].pop("head_size")), "head_size: expected a positive count"),
    (engine(lambda found: found["kv_cache"]["groups"][0].update(mamba_cache_mode="all")), "mode: expected align"),
    # The launch.
    (launch(num_lookahead_tokens=1), "launch.num_lookahead_tokens: expected 0, found 1"),
    (launch(num_lookahead_tokens=False), "launch.num_lookahead_tokens: expected 0, found False"),
    (launch(use_eagle_block_drop="absent"), "launch.use_eagle_block_drop: expected False, found absent"),
    (launch(num_hash_lookahead_tokens=0), "num_hash_lookahead_tokens: expected absent in 0.32.0, found 0"),
    (launch(scheduler_config__policy="priority"), "launch.scheduler_config.policy: expected fcfs, found priority"),
    (launch(surprise=1), "launch.surprise: expected no such field, found 1"),
    (engine(lambda found: found["serving_config"]["launch"].pop("block_size")), "launch.block_size: expected 256"),
    (launch(block_size=128), "launch.block_size: expected 256, found 128"),
    (launch(hash_block_size=128), "launch.hash_block_size: expected 256, found 128"),
    (launch(recurrent_block_sizes=[256]), "recurrent_block_sizes: expected 3 to 3 of its groups, found 1"),
    (launch(recurrent_block_sizes=[256, 256, 128]), "recurrent_block_sizes: expected a list of 256"),
    (
        engine(lambda found: found["serving_config"].update(mamba_prefill_checkpoint=None)),
        "mamba_prefill_checkpoint: expected a mapping, found None",
    ),
    (
        engine(lambda found: found["serving_config"]["mamba_prefill_checkpoint"].update(blocks=-1)),
        "mamba_prefill_checkpoint.blocks: expected a count or None, found -1",
    ),
    # What the rank can hold.
    (own(lambda rank: rank["limits"].update(max_model_len=1)), "limits.max_model_len: expected 4096, found 1"),
    (own(lambda rank: rank["limits"].update(num_gpu_blocks=1000)), "num_gpu_blocks: expected at least 2047"),
    (own(lambda rank: rank["limits"].update(feasible_max_batch_size=0)), "max_batch_size: expected 8, found 0"),
    (own(lambda rank: rank["limits"].update(surprise=1)), "limits.surprise: expected no such field"),
    (own(lambda rank: rank["capacity"].update(usable_blocks_with_watermark=9)), "watermark: expected 2047, found 9"),
    (own(lambda rank: rank["capacity"].update(max_num_running_reqs=8.0)), "reqs: expected 8, found 8.0"),
    (own(lambda rank: rank["capacity"].update(kvwarm_eligible=1)), "kvwarm_eligible: expected True, found 1"),
    (own(lambda rank: rank["cudagraph"].update(mode="FULL")), "cudagraph.mode: expected NONE, found FULL"),
    (own(lambda rank: rank["cudagraph"].update(prefill_mode="FULL")), "prefill_mode: expected NONE, found FULL"),
    (own(lambda rank: rank["cudagraph"].update(max_capture_size=8)), "max_capture_size: expected 0, found 8"),
    (own(lambda rank: rank["cudagraph"].pop("decode_mode")), "cudagraph.decode_mode: expected NONE, found nothing"),
    (own(lambda rank: rank.update(dp_rank=1)), "rank 0 dp_rank: expected 0, found 1"),
    (own(lambda rank: rank.update(engine_start_seconds=-1.0)), "engine_start_seconds: expected a positive number"),
    (lambda line: line.update(run_id="x"), "run_id: expected 32 hexadecimal digits, found x"),
    (lambda line: line.update(started_at="yesterday"), "started_at: expected a time such as 2026-"),
    (lambda line: line.update(started_at="2999-01-01T00:00:00.000000Z"), "completed_at: expected a time after 2999-"),
]


@pytest.mark.demo
@pytest.mark.parametrize(("change", "finding"), SESSIONS, ids=[finding for _, finding in SESSIONS])
def test_a_session_that_is_not_the_cells_is_found(decode: Path, change, finding: str):
    """Each journal that cannot be made into an artifact at all is a finding, too, and no traceback."""
    try:
        rewrite_line(decode, 0, change, derive=True)
    except (TypeError, KeyError, AttributeError):
        rewrite_line(decode, 0, lambda line: None)
    assert finding in failures(decode)


def session_of(folder: Path) -> tuple[FrozenCell, dict[str, Any]]:
    cell = read_model(FrozenCell, folder / "cell.json", "frozen cell")
    return cell, json.loads((folder / "repetitions.jsonl").read_text().splitlines()[0])


def findings_of(cell: FrozenCell, line: dict[str, Any]) -> list[str]:
    session = msgspec.convert({key: value for key, value in line.items() if key != "kind"}, SessionLine)
    return list(check_sessions(cell, Journal((session,))))


def as_graphs(line: dict[str, Any]) -> None:
    """What a session of vLLM 0.33.0 with graphs says: by hand, of `CUDAGraphMode.FULL_AND_PIECEWISE`."""
    (rank,) = line["ranks"]
    rank["cudagraph"] = {
        "mode": "FULL_AND_PIECEWISE",
        "prefill_mode": "PIECEWISE",
        "decode_mode": "FULL",
        "max_capture_size": 16,
        "capture_sizes": [1, 2, 4, 8, 16],
        "prefill_capture_sizes": [1, 2, 4, 8, 16],
        "decode_capture_sizes": [1, 2, 4, 8],
    }
    rank["engine"]["graph"].update(cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=[1, 2, 4, 8, 16])
    rank["engine"]["versions"]["vllm"] = "0.33.0"
    rank["engine"]["serving_config"]["launch"].update(
        {"num_hash_lookahead_tokens": 0, "vllm_config.engram_config.cpu_offload": False}
    )
    rank["engine"]["serving_config"]["mamba_prefill_checkpoint"] = {"blocks": 1, "alignment": 16}
    # As much memory as there was at this start.
    rank["limits"]["num_gpu_blocks"] = 3001
    rank["capacity"].update(usable_blocks_without_watermark=3000, usable_blocks_with_watermark=3000)


def graph_cell(cell: FrozenCell) -> FrozenCell:
    settings = cell.identity.engine.model_copy(
        update={"enforce_eager": False, "kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.9}
    )
    identity = cell.identity.model_copy(update={"engine": settings, "runtime_backend_version": "0.33.0"})
    return cell.model_copy(update={"identity": identity})


@pytest.mark.demo
@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda rank: None, None),
        (lambda rank: rank["cudagraph"].update(prefill_mode="FULL"), "prefill_mode: expected PIECEWISE, found FULL"),
        (lambda rank: rank["cudagraph"].update(mode="EAGER"), "cudagraph.mode: expected one of ('NONE', "),
        (
            lambda rank: rank["cudagraph"].update(decode_capture_sizes=[1]),
            "capture_sizes: expected [1, 2, 4, 8]",
        ),
        (lambda rank: rank["cudagraph"].update(max_capture_size=32), "max_capture_size: expected 16, found 32"),
        (
            lambda rank: rank["engine"]["serving_config"]["launch"].update(num_hash_lookahead_tokens="absent"),
            "num_hash_lookahead_tokens: expected 0, found absent",
        ),
    ],
)
def test_graphs_follow_from_their_mode_and_sizes(decode: Path, change, finding: str | None):
    cell, line = session_of(decode)
    as_graphs(line)
    change(line["ranks"][0])
    found = findings_of(graph_cell(cell), line)
    assert found == [] if finding is None else any(finding in line for line in found)


@pytest.mark.demo
def test_another_path_of_the_model_is_right(decode: Path):
    cell, line = session_of(decode)
    line["ranks"][0]["engine"]["model"]["model"] = "/elsewhere/qwen3-next-tiny"
    assert findings_of(cell, line) == []


@pytest.mark.demo
@pytest.mark.parametrize(("threads", "right"), [({}, True), ({"OMP_NUM_THREADS": "8"}, True), ({"OTHER": "1"}, False)])
def test_threads_that_the_cell_leaves_open_are_right(decode: Path, threads: dict[str, str], right: bool):
    cell, line = session_of(decode)
    identity = cell.identity.model_copy(update={"environment": {}})
    line["ranks"][0]["engine"]["threads"] = {"torch_num_threads": [4]} | threads
    found = findings_of(cell.model_copy(update={"identity": identity}), line)
    assert (found == []) == right


# Points


def repetition(index: int, **values: Any) -> Callable[[dict[str, Any]], Any]:
    return own(lambda rank: rank["repetitions"][index].update(values))


def dispatch(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return own(lambda rank: rank["repetitions"][3]["cudagraph"].update(values))


def seconds(**values: float) -> Callable[[dict[str, Any]], Any]:
    return own(lambda rank: rank["seconds"].update(values))


def seed(index: int, **values: int) -> Callable[[dict[str, Any]], Any]:
    return own(lambda rank: rank["seeds"][index].update(values))


def seed_step(name: str, **values: float) -> Callable[[dict[str, Any]], Any]:
    return own(lambda rank: rank["warmups"][0][name].update(values))


def all_seeds(**values: int) -> Callable[[dict[str, Any]], Any]:
    return own(lambda rank: [found.update(values) for found in rank["seeds"]])


# The second point of the smoke cell: 8 requests of 2,048 tokens of context, prefixes of 1,792 computed in 9 steps.
POINTS = [
    (own(lambda rank: rank["warmups"].reverse()), "warm-ups: expected forwards that rise"),
    (own(lambda rank: rank["warmup_ordinals"].reverse()), "ordinals: expected warm-ups and then measurements in order"),
    (own(lambda rank: rank.update(steps=rank["steps"] + 1)), "steps: expected "),
    (own(lambda rank: rank["seeds"].append(rank["seeds"][-1])), "seeds: expected rising slots"),
    (own(lambda rank: rank["seeds"].reverse()), "seeds: expected rising slots"),
    (all_seeds(attempt=7), "seed attempts: expected [1] of its spans, found [7]"),
    (seed(0, attempt=0), "seed attempts: expected [1] of its spans, found [0, 1]"),
    (seed(0, prefix_tokens=256, computed_tokens=257), "seed of slot 0: expected a prefix of "),
    (seed(0, cached_tokens=-1), "seed of slot 0: expected "),
    (seed_step("first", num_prefill_requests=-1), "first step: expected up to "),
    (seed_step("first", sum_prefill_tokens=1 << 20), "first step: expected up to "),
    (seed_step("first", sum_prefill_kv_tokens=1), "first step tokens: expected "),
    (seed_step("first", var_prefill_length=7.5), "first step var_prefill_length: expected "),
    (seed_step("last", num_decode_requests=1), "last step: expected no decode requests, found 1"),
    (seed_step("last", sum_prefill_tokens=2), "last step tokens: expected "),
    (seed_step("last", var_prefill_length=1e9), "last step var_prefill_length: expected "),
    (own(lambda rank: rank["seconds"].pop("writing")), "seconds: expected ['measured', 'overhead', "),
    (seconds(surprise=1.0), "seconds: expected ['measured', 'overhead', "),
    (seconds(seeding=-1.0), "seconds.seeding: expected more than 0, found -1.0"),
    (seconds(warmup=0.0), "seconds.warmup: expected more than 0, found 0.0"),
    (seconds(rejected=0.001), "seconds.rejected: expected 0, found 0.001"),
    (seconds(wall=0.001), "seconds.wall: expected at least "),
    (seconds(measured=99.0), "seconds.measured: expected at most "),
    (seconds(overhead=0.0), "seconds.overhead: expected at least "),
    (seconds(writing=0.0), "seconds.writing: expected more than 0, found 0.0"),
    (seconds(writing=99.0), "seconds.writing and .warmup: expected at most "),
    (dispatch(runtime_mode="FULL"), "expected ('NONE', 0) of an eager launch, found ('FULL', 0)"),
    (dispatch(num_padded_tokens=16, num_paddings=8), "expected ('NONE', 0) of an eager launch, found ('NONE', 8)"),
    (dispatch(num_unpadded_tokens=9, num_padded_tokens=9), "cudagraph.num_unpadded_tokens: expected 8, found 9"),
    (lambda line: line.update(completed_at="soon"), "completed_at: expected a time such as 2026-"),
    (lambda line: line.update(completed_at="2020-01-01T00:00:00.000000Z"), "completed_at: expected a time after "),
    (
        own(lambda rank: rank["rejections"].append({"ordinal": 15, "reason": "slow", "chunks": []})),
        "rejections: expected ordinals that rise before the last measurement, found [15]",
    ),
]


@pytest.mark.demo
@pytest.mark.parametrize(("change", "finding"), POINTS, ids=[finding for _, finding in POINTS])
def test_a_point_that_did_not_run_so_is_found(decode: Path, change, finding: str):
    try:
        rewrite_line(decode, 2, change, derive=True)
    except KeyError:
        rewrite_line(decode, 2, lambda line: None)
    assert finding in failures(decode)


@pytest.mark.demo
def test_overhead_in_a_prefill_step_is_found(cell_of):
    prefill = cell_of("prefill-dense")
    rewrite_line(prefill, 1, repetition(0, overhead_seconds=1e-9), derive=True)
    assert "overhead_seconds: expected 0.0 in a prefill step, found 1e-09" in failures(prefill)


@pytest.mark.demo
def test_lines_in_another_order_are_found(decode: Path):
    """The forger numbers sessions and chain anew; the points were not run in this order."""
    lines = [json.loads(line) for line in (decode / "repetitions.jsonl").read_text().splitlines()]

    def exchanged(number: int) -> Callable[[dict[str, Any]], None]:
        def change(line: dict[str, Any]) -> None:
            line.clear()
            line.update(copy.deepcopy(lines[number]))

        return change

    # Two steps, since a point may not stand twice.
    rewrite_line(decode, 1, lambda line: line.update(benchmark_id=99))
    rewrite_line(decode, 2, exchanged(1))
    rewrite_line(decode, 1, exchanged(2), derive=True)
    found = failures(decode)
    assert "repetitions.jsonl points: expected the order of execution " in found
    assert "forwards: expected at least " in found


@pytest.mark.demo
def test_a_wall_time_that_does_not_fit_between_its_neighbours_is_found(cell_of):
    prefill = cell_of("prefill-dense")
    rewrite_line(prefill, 2, seconds(wall=1000.0), derive=True)
    assert "seconds.wall and .writing: expected at most " in failures(prefill)


@pytest.mark.demo
def test_writing_by_a_line_that_nothing_was_written_before_is_found(decode: Path):
    rewrite_line(decode, 1, seconds(writing=0.001), derive=True)
    assert "benchmark_id=1 seconds.writing: expected 0, found 0.001" in failures(decode)


@pytest.mark.demo
def test_every_real_cell_is_recorded(demo: Path, parallel: Path, smoke: Path):
    cells = [folder for campaign in (demo, parallel, smoke) for folder in sorted((campaign / "cells").glob("*-*"))]
    assert len(cells) == 6 + 4 + 6
    failed = {folder.name: verify(read_cell(folder, accepted_of(folder))).failures for folder in cells}
    assert failed == {folder.name: () for folder in cells}


# Right journals of an engine by hand


class Engine:
    """Answers a conversation like an engine with a prefix cache of 128-token blocks and steps of 1,024 tokens.

    `lost` and `extended` are the submissions (from 0) before which every prefix is lost, and after which one step too
    many runs; `evicted` are the questions after cached tokens (from 0) before which they are lost.
    """

    def __init__(self, first_forward: int = 0, lost=frozenset(), extended=frozenset(), evicted=frozenset()) -> None:
        self.first_forward, self.lost, self.extended, self.evicted = first_forward, lost, extended, evicted
        self.time, self.overhead, self.forwards, self.submissions, self.questions = 1000.0, 0.0, 0, 0, 0
        self.cached: set[tuple[int, ...]] = set()

    def hit(self, prompt) -> int:
        whole = (len(prompt) - 1) // 128 * 128
        while whole and tuple(prompt[:whole]) not in self.cached:
            whole -= 128
        return whole

    def cached_tokens(self, spec: RequestSpec) -> int:
        if self.questions in self.evicted:
            self.cached.clear()
        self.questions += 1
        return self.hit(spec.prompt)

    def step(self, chunks: dict[int, Chunk], previous_end: float | None) -> Step:
        overhead, start, end = 0.001, self.time + 0.004, self.time + 0.034
        self.time, self.overhead = end, self.overhead + overhead
        tokens = sum(chunk.scheduled for chunk in chunks.values())
        seen = CudagraphObservation("observed", "NONE", tokens, tokens, 0)
        self.forwards += 1
        return Step(self.first_forward + self.forwards - 1, chunks, start, end, previous_end, overhead, seen)

    def answer(self, requests: tuple[RequestSpec, ...]) -> list[Step]:
        if self.submissions in self.lost:
            self.cached.clear()
        self.submissions += 1
        computed = {request.slot: self.hit(request.prompt) for request in requests}
        steps: list[Step] = []
        while True:
            chunks, room = {}, 1024
            for request in requests:
                length, done = len(request.prompt), computed[request.slot]
                wanted = length - done if done < length else int(done - length < request.max_tokens - 1)
                if scheduled := min(wanted, room):
                    chunks[request.slot] = Chunk(done, scheduled, length)
                    room -= scheduled
            if not chunks:
                break
            steps.append(self.step(chunks, steps[-1].end if steps else None))
            for slot, chunk in chunks.items():
                computed[slot] += chunk.scheduled
        if self.submissions - 1 in self.extended:
            steps.append(self.step(steps[-1].chunks, steps[-1].end))
        for request in requests:
            self.cached |= {tuple(request.prompt[:end]) for end in range(128, len(request.prompt) + 1, 128)}
        return steps


def conversed(cell: FrozenCell, engine: Engine, journal: Journal, until: int = 1 << 20) -> Journal:
    """The journal after another engine start, which ends after so many points."""
    number = len(journal.sessions) + 1
    lines: list[PointLine] = []

    def finish(line: PointLine) -> float:
        lines.append(line)
        engine.time += 0.002
        return 0.002

    mine = host(lines, clock=lambda: engine.time, cached_tokens=engine.cached_tokens, finish=finish)
    mine = mine._replace(spent=lambda: Spent(engine.overhead, engine.forwards))
    stream = TokenStream(cell.identity.token_seed, cell.vocab_size)
    points = cell.points.points()
    talk = measure(stream, GENERIC, mine, cell.identity.phase, points, 128, journal.finished, number)
    try:
        submission = next(talk)
        while len(lines) < until:
            submission = talk.send(engine.answer(submission.requests))
    except StopIteration:
        pass
    rank = RankSession(0, "cpu", 1.0, {}, {}, {}, {}, {})
    session = SessionLine("", cell.digest, number, "0" * 32, "", {}, [rank])
    return Journal((*journal.sessions, session), (*journal.points, *lines))


DECODE = (DecodePoint(batch_size=2, total_kv_read_tokens=300), DecodePoint(batch_size=3, total_kv_read_tokens=3300))
PREFILL = (
    PrefillPoint(batch_size=3, total_prefill_tokens=70, total_kv_read_tokens=3 * 640 + 128),
    PrefillPoint(batch_size=1, total_prefill_tokens=16, total_kv_read_tokens=0),
    PrefillPoint(batch_size=2, total_prefill_tokens=64, total_kv_read_tokens=256),
)


def cell_with(phase: str) -> FrozenCell:
    points = PointManifest(prefill=PREFILL if phase == "prefill" else (), decode=DECODE if phase == "decode" else ())
    return frozen_cell(phase=phase).model_copy(update={"points": points})


def course_findings(cell: FrozenCell, journal: Journal) -> list[str]:
    files = MeasuredCell(Path(), cell, None, journal, None, None)  # type: ignore[arg-type]
    found = [*check_course(files), *check_clocks(files), *check_seeding(files)]
    return [*found, *check_points(files, GENERIC)]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("trouble", "rejections", "attempts"),
    [
        ({}, 0, 1),
        ({"evicted": {30}}, 0, 2),
        ({"lost": {24}}, 1, 1),
        ({"extended": {3, 25}}, 2, 1),
        ({"extended": {5, 6, 7}}, 3, 1),
    ],
)
def test_whatever_happens_to_a_point_it_is_right(phase: str, trouble, rejections: int, attempts: int):
    cell = cell_with(phase)
    journal = conversed(cell, Engine(**trouble), Journal())
    ranks = [line.ranks[0] for line in journal.points]
    assert len(ranks) == len(cell.points.points())
    assert sum(len(own.rejections) for own in ranks) == rejections
    assert max(seed.attempt for own in ranks for seed in own.seeds) >= attempts
    spans = [span for own in ranks for span in own.warmups if span.kind == "real_prefix_seed"]
    assert max(span.forward_index_end - span.forward_index_start for span in spans) > 1
    assert course_findings(cell, journal) == []


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_cell_that_goes_on_after_a_kill_is_right(phase: str):
    cell = cell_with(phase)
    first = conversed(cell, Engine(), Journal(), until=1)
    whole = conversed(cell, Engine(first.next_forward_index(0)), first)
    assert [line.session for line in whole.points] == [1] + [2] * (len(cell.points.points()) - 1)
    assert course_findings(cell, whole) == []


def rejected(change: Callable[[dict[str, Any]], Any]) -> list[str]:
    """Findings on a decode journal with one rejection, changed."""
    cell = cell_with("decode")
    journal = conversed(cell, Engine(lost=frozenset({24})), Journal())
    (number,) = [n for n, line in enumerate(journal.points) if line.ranks[0].rejections]
    plain = msgspec.to_builtins(journal.points[number].ranks[0])
    change(plain)
    ranks = [msgspec.convert(plain, RankPoint)]
    lines = list(journal.points)
    lines[number] = msgspec.structs.replace(lines[number], ranks=ranks)
    return course_findings(cell, journal._replace(points=tuple(lines)))


def point_steps(rank: dict[str, Any]) -> None:
    """Chunks as those of a right repetition of the second point: contexts of 1,100 tokens, prefixes of 1,024."""
    (found,) = rank["rejections"]
    shapes = request_shapes(DECODE[1], 128)
    assert [(shape.prefix, shape.prompt) for shape in shapes] == [(1024, 1099)] * 3
    found["chunks"] = [[[1024, 75]] * 3, [[1099, 1]] * 3, [[1100, 1]] * 3]


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda rank: rank["rejections"][0].update(reason=""), "expected one reason, found ['']"),
        (point_steps, "expected steps that are not the point's, found [[[1024, 75], "),
        (lambda rank: rank["rejections"][0]["chunks"].pop(), "steps: expected "),
        (lambda rank: rank["rejections"].clear(), "ordinals: expected each of 0..14 once"),
        (lambda rank: rank["seconds"].update(rejected=0.0), "seconds.rejected: expected more than 0, found 0.0"),
    ],
)
def test_a_rejection_that_was_none_is_found(change, finding: str):
    assert any(finding in line for line in rejected(change))


def test_glm_cells_observe_the_graph_dispatch_of_every_sample(decode: Path):
    cell = read_model(FrozenCell, decode / "cell.json", "frozen cell")
    files = read_cell(decode, accepted_of(decode)).origin
    assert isinstance(files, MeasuredCell)
    unobserved = [
        msgspec.structs.replace(
            line,
            ranks=[
                msgspec.structs.replace(
                    rank,
                    repetitions=[
                        msgspec.structs.replace(repetition, cudagraph=UNOBSERVED) for repetition in rank.repetitions
                    ],
                )
                for rank in line.ranks
            ],
        )
        for line in files.journal.points
    ]
    blind = files._replace(cell=cell, journal=files.journal._replace(points=tuple(unobserved)))
    found = [line for line in check_points(blind, GLM53FLASH) if "cudagraph.status: expected observed of" in line]
    assert len(found) == 10 * len(cell.points.points())
    assert not any("cudagraph.status" in line for line in check_points(files, GLM53FLASH))
    assert not any("cudagraph.status" in line for line in check_points(blind, GENERIC))
