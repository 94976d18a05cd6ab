"""Run Dynamo's self-benchmark on the CPU engine; runs in Dynamo's environment: dynamo_engine.py SETTINGS.

SETTINGS is a JSON file: {"engine": arguments of vLLM, "benchmark": Dynamo's settings, "processes": see below}.

one_process    engine core and model in this process, which steps the core: the engine as passgrid starts it
core_process   engine core and model in a process of their own
worker_process the engine core in one process, the model in another: what vLLM does by default on the CPU
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 300
POLL_SECONDS = 0.2


def executor(processes: str) -> dict[str, Any]:
    """The engine argument for where the model runs. Under a core process "uni" becomes "mp", but a class stays."""
    if processes != "core_process":
        return {}
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    return {"distributed_executor_backend": UniProcExecutor}


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    processes, output = settings["processes"], Path(settings["benchmark"]["output_path"])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if processes == "one_process" else "1"
    from vllm import LLM

    llm = LLM(
        **settings["engine"],
        **executor(processes),
        scheduler_cls="dynamo.vllm.instrumented_scheduler.InstrumentedScheduler",
        additional_config={"benchmark": settings["benchmark"]},
    )
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not output.exists():
        if time.monotonic() > deadline:
            sys.exit(f"no result after {DEADLINE_SECONDS} s")
        if processes == "one_process":
            llm.llm_engine.engine_core.engine_core.step()
        else:  # a core process steps by itself, and the file is all that tells the end
            time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
