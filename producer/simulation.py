"""A pure simulation of the engine's scheduler for one repetition: who runs how many tokens in which step.

vLLM v1/core/sched/scheduler.py `schedule`: running requests first, then waiting ones in order, each taking what the
step's token budget leaves; the align rule cuts prefill chunks.
"""

from producer.admission import align_rule_of
from producer.align import chunk_end
from producer.partition import RequestShape
from schemas.profile import Profile

Chunks = dict[int, tuple[int, int]]
"""Slot -> (computed before, scheduled in) one step."""


def simulate(profile: Profile, shapes: tuple[RequestShape, ...], generated_tokens: int) -> list[Chunks]:
    """The steps of requests that enter together and generate `generated_tokens` each.

    Raises:
        ValueError: a step in which nothing runs: the engine would hang.
    """
    rule, budget = align_rule_of(profile), profile.max_num_tokens
    computed = [shape.prefix for shape in shapes]
    # A request is done when all but its last generated token have been computed.
    final = [shape.prompt + generated_tokens - 1 for shape in shapes]
    steps: list[Chunks] = []
    while any(done < end for done, end in zip(computed, final, strict=True)):
        left, step = budget, Chunks()
        for slot, shape in enumerate(shapes):
            if computed[slot] >= final[slot] or not left:
                continue
            in_prompt = computed[slot] < shape.prompt
            wanted = min(shape.prompt - computed[slot], left) if in_prompt else 1
            end = computed[slot] + wanted
            if rule is not None and in_prompt:
                end = chunk_end(rule, computed[slot], end, shape.prompt, budget)
            if end > computed[slot]:
                step[slot] = (computed[slot], end - computed[slot])
                left -= end - computed[slot]
        if not step:
            raise ValueError(f"no request runs a token in step {len(steps)}")
        for slot, (start, scheduled) in step.items():
            computed[slot] = start + scheduled
        steps.append(step)
    return steps
