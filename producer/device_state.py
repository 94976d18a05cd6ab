"""What a device says of its own clocks, read between points: a throttled device shows here before it shows in times."""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CPU_FREQUENCIES = Path("/sys/devices/system/cpu")

Reader = Callable[[], dict[str, float] | None]


def read_cpu(root: Path = CPU_FREQUENCIES) -> dict[str, float] | None:
    """Mean clock of this process's cores in MHz, None where the kernel does not tell (most virtual machines)."""
    files = [root / f"cpu{core}" / "cpufreq" / "scaling_cur_freq" for core in os.sched_getaffinity(0)]
    frequencies = [float(file.read_text()) / 1000 for file in files if file.exists()]
    return {"core_clock_mhz": sum(frequencies) / len(frequencies)} if frequencies else None


def _cuda_reader(index: int) -> Reader:
    """Clock in MHz, temperature in degrees, power in W, and NVML's bit mask of throttle reasons."""
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = devices[index].strip() if index < len(devices) and devices[index] else str(index)
    if visible.isdigit():
        device: Any = pynvml.nvmlDeviceGetHandleByIndex(int(visible))
    else:
        device = pynvml.nvmlDeviceGetHandleByUUID(visible)

    def read() -> dict[str, float] | None:
        state: dict[str, float] = {}
        for name, value in (
            ("sm_clock_mhz", lambda: pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM)),
            ("temperature_c", lambda: pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU)),
            ("power_w", lambda: pynvml.nvmlDeviceGetPowerUsage(device) / 1000),
            ("throttle_reasons", lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)),
        ):
            with contextlib.suppress(pynvml.NVMLError):
                state[name] = float(value())  # type: ignore[no-untyped-call]
        return state or None

    return read


def reader_of(device: str, index: int) -> Reader:
    """A function that reads the state of the visible device `index`; of one that cannot be asked it says None."""
    if device == "cpu":
        return read_cpu
    try:
        return _cuda_reader(index)
    except Exception as error:  # no NVML, no permission, an unknown device: times are measured all the same
        print(f"device state unreadable: {type(error).__name__}: {error}", file=sys.stderr)
        return lambda: None
