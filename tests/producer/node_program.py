"""One node of a launch whose ranks are small programs instead of engines: what the supervisors do is the same.

node_program.py NODE_RANK/NODES HEAD PORT BODY [FACTS]: BODY is what the node's rank runs, `heart` its pulse; without
a body the head has nothing to do. FACTS is JSON, or words that refuse. Says at the end how it ended.
node_program.py slurm BODY: the same where `srun` has started it.
"""

import json
import os
import sys
import textwrap
from typing import Any

from producer.control import Engines, follow, head_of
from producer.nodes import Place, place_of
from producer.supervise import Patience, Stopped, stop_on_signals
from schemas.errors import Refusal, run
from schemas.launch import Topology

PROLOGUE = """
import os, sys, time, signal
from producer.heartbeat import Heartbeat
from producer.supervise import prepare_rank
prepare_rank(int(sys.argv[-3]))
heart = Heartbeat(int(sys.argv[-1]))
heart.ready()
"""
PATIENCE = Patience(start_seconds=6, step_seconds=60)


class Programs(Engines):
    """Engines whose rank is a program."""

    def commands(self, place: Place) -> dict[str, list[str]]:
        code = f"{PROLOGUE}\nplace = {tuple(place)}\n{textwrap.dedent(self.module)}"
        return {f"rank {place.node_rank}": [sys.executable, "-c", code]}


def main() -> None:
    if sys.argv[1] == "slurm":
        body, *rest = sys.argv[2:]
        place = place_of(2, Place(), os.environ)
    else:
        node, head_address, port, body, *rest = sys.argv[1:]
        node_rank, nodes = map(int, node.split("/"))
        place = Place(nodes=nodes, node_rank=node_rank, head=head_address, port=int(port))
    programs = Programs(body, [], Topology(tp=2), None)

    def facts() -> dict[str, Any]:
        if rest and not rest[0].startswith("{"):
            raise Refusal("facts", "none", rest[0], "test")
        return json.loads(rest[0]) if rest else {"cell": "c"}

    stop_on_signals()
    try:
        if place.node_rank:
            sys.exit(follow(place, programs, PATIENCE, facts))
        with head_of(place, PATIENCE) as head:
            head.code = 0
            if body:
                ended = head.supervise(programs, PATIENCE, facts(), lambda pulses: None)
                head.code = ended.code
                print(f"ended: {ended.reason}", flush=True)
        sys.exit(head.code)
    except Stopped as stop:
        print(stop, flush=True)
        sys.exit(128 + stop.number)


if __name__ == "__main__":
    run(main)
