"""What a device says of its own clocks, read between points: a throttled device shows here before it shows in times."""

import contextlib
import functools
import operator
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from producer.devices import named_gpus

CPU_FREQUENCIES = Path("/sys/devices/system/cpu")

Reader = Callable[[], dict[str, float] | None]


def read_cpu(root: Path = CPU_FREQUENCIES) -> dict[str, float] | None:
    """Mean clock of this process's cores in MHz, None where the kernel does not tell (most virtual machines)."""
    files = [root / f"cpu{core}" / "cpufreq" / "scaling_cur_freq" for core in os.sched_getaffinity(0)]
    frequencies = [float(file.read_text()) / 1000 for file in files if file.exists()]
    return {"core_clock_mhz": sum(frequencies) / len(frequencies)} if frequencies else None


def _nvml_devices(pynvml: Any, indices: range) -> list[Any]:
    """Handles of the visible devices `indices`; CUDA counts as NVML does under CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    names = named_gpus(os.environ) or ()
    visible = [names[index] if index < len(names) else str(index) for index in indices]
    return [
        pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
        for name in visible
    ]


def _cuda_reader(indices: range) -> Reader:
    """Slowest clock in MHz, highest temperature in degrees, power of all in W, and NVML's throttle reasons of any."""
    from vllm.third_party import pynvml

    nvml: Any = pynvml
    nvml.nvmlInit()
    devices = _nvml_devices(nvml, indices)

    def any_of(masks: list[int]) -> int:
        return functools.reduce(operator.or_, masks)

    def read() -> dict[str, float] | None:
        state: dict[str, float] = {}
        for name, one, all_of in (
            ("sm_clock_mhz", lambda device: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM), min),
            ("temperature_c", lambda device: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU), max),
            ("power_w", lambda device: nvml.nvmlDeviceGetPowerUsage(device) / 1000, sum),
            ("throttle_reasons", nvml.nvmlDeviceGetCurrentClocksThrottleReasons, any_of),
        ):
            with contextlib.suppress(nvml.NVMLError):
                state[name] = float(all_of([one(device) for device in devices]))
        return state or None

    return read


def reader_of(device: str, indices: range) -> Reader:
    """A function that reads the state of the visible devices `indices`; of those that cannot be asked it says None."""
    if device == "cpu":
        return read_cpu
    try:
        return _cuda_reader(indices)
    except Exception as error:  # no NVML, no permission, an unknown device: times are measured all the same
        print(f"device state unreadable: {type(error).__name__}: {error}", file=sys.stderr)
        return lambda: None
