"""How much memory a step needs beyond what was there before it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile


class StepMemory:
    """Measure the peak of torch's allocator inside the ``with`` block, minus its value at the start.

    Whatever exists before (parameters, optimizer state, the sample) does not count; activations, gradients and
    workspaces that torch allocates do.

    Parameters
    ----------
    device : torch.device
        CPU: the profiler's memory events. CUDA: the allocator's own statistics.

    Attributes
    ----------
    peak_bytes : int
        The measurement, after the block.

    Examples
    --------
    >>> with StepMemory(torch.device("cpu")) as memory:
    ...     total = (torch.ones(1024) + torch.ones(1024)).sum()
    >>> memory.peak_bytes == 3 * 1024 * 4 or memory.peak_bytes == 3 * 1024 * 4 + 4
    True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak_bytes = 0

    def __enter__(self) -> StepMemory:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
        else:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._start
            return
        self._profile.__exit__(kind, error, trace)
        if error is None:
            self.peak_bytes = _peak_of(self._profile)


def _peak_of(recorded: profile) -> int:
    # The exported trace is the public form of the single events; the profiler's tables sum them per operator.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    changes.sort(key=lambda event: (event["ts"], event["args"]["Ev Idx"]))
    peak = total = 0
    for change in changes:
        total += change["args"]["Bytes"]
        peak = max(peak, total)
    return peak
