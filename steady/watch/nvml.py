"""Clocks, temperature, power and throttling of an NVIDIA GPU, from the library of its driver.

NVML (docs.nvidia.com/deploy/nvml-api) through ctypes: it comes with every driver, while its Python
package does not.
"""

import contextlib
import ctypes

import torch

SECONDS_BETWEEN = 1.0  # some readings take a good part of a millisecond
SM_CLOCK, GPU_TEMPERATURE, UNCORRECTED, SINCE_BOOT = 1, 0, 1, 0
# Bits of nvmlClocksEventReasons: the software's and the hardware's.
HEAT, POWER = 0x20 | 0x40, 0x4 | 0x80


class Gpu:
    """One GPU. Raises OSError where there is no driver, ValueError where NVML does not know it."""

    def __init__(self, device: torch.device, library=None):
        self.nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
        uuid = str(torch.cuda.get_device_properties(device).uuid)  # indices may be hidden ones
        self.handle = ctypes.c_void_p()
        asked = self.nvml.nvmlInit_v2() or self.nvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{uuid}".encode(), ctypes.byref(self.handle))
        if asked != 0:
            raise ValueError(f"NVML error {asked} for GPU-{uuid}")

    def read(self) -> dict[str, float]:
        """Columns of metrics.jsonl, without those that this GPU does not report.

        throttled_by_…: 1 if that holds its clocks down at this moment.
        """
        out = {}
        for name, value in {
            "perf/clock_mhz": self.ask("ClockInfo", ctypes.c_uint, SM_CLOCK),
            "machine/gpu_celsius": self.ask("Temperature", ctypes.c_uint, GPU_TEMPERATURE),
            "machine/gpu_watts": self.ask("PowerUsage", ctypes.c_uint),  # in mW
            "machine/gpu_ecc_errors": self.ask(
                "TotalEccErrors", ctypes.c_ulonglong, UNCORRECTED, SINCE_BOOT),
        }.items():
            if value is not None:
                out[name] = value / 1e3 if name.endswith("watts") else value
        reasons = self.ask("CurrentClocksThrottleReasons", ctypes.c_ulonglong)
        if reasons is not None:
            out["machine/gpu_throttled_by_heat"] = int(reasons & HEAT != 0)
            out["machine/gpu_throttled_by_power"] = int(reasons & POWER != 0)
        return out

    def ask(self, what: str, kind, *arguments) -> int | None:
        value = kind()
        with contextlib.suppress(AttributeError):  # a function that this driver lacks
            function = getattr(self.nvml, f"nvmlDeviceGet{what}")
            if function(self.handle, *arguments, ctypes.byref(value)) == 0:
                return value.value
        return None


def open_gpu(device: torch.device) -> Gpu | None:
    """None for other devices, and where NVML does not answer."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        return Gpu(device)
    except (OSError, AttributeError, ValueError):
        return None
