"""Hardware counters of a GPU over time: CUPTI's PM sampling, and what a trace comes to.

Needs the packages cupti-python (13.4) and nvidia-cuda-cupti (13.5; the toolkit's own 13.0 refuses
the call), and the right to read performance counters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
SM = "sm__cycles_active.avg.pct_of_peak_sustained_elapsed"
# The tensor pipe does not fit the same pass; its name differs between chips.
TENSOR = (
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
)
INTERVAL_NS = 5000
IDLE = 1.0  # per cent of the peak under which a sample counts as idle
MOST = 200000  # samples of one trace: a second


@dataclass
class Trace:
    """start, end: ns of each sample; values: [samples, metrics], per cent of the peak."""

    metrics: list[str]
    start: np.ndarray
    end: np.ndarray
    values: np.ndarray

    def column(self, metric: str) -> np.ndarray:
        return self.values[:, self.metrics.index(metric)]

    def busy(self) -> Trace:
        """From the first sample of the first metric that is not idle to the last: what lies before
        and behind is the caller's, waiting for the sampler."""
        active = np.flatnonzero(self.values[:, 0] > IDLE)
        if not len(active):
            return self
        cut = slice(active[0], active[-1] + 1)
        return Trace(self.metrics, self.start[cut], self.end[cut], self.values[cut])

    def figures(self, metric: str) -> dict[str, float]:
        """Mean in per cent of the peak, share of idle samples, longest idle stretch in us."""
        values, idle = self.column(metric), self.column(metric) < IDLE
        longest, since = 0.0, None
        for i, quiet in enumerate(idle):
            if quiet and since is None:
                since = self.start[i]
            if not quiet:
                since = None
            elif since is not None:
                longest = max(longest, float(self.end[i] - since) / 1e3)
        return {
            "mean_percent": float(values.mean()), "idle_share": float(idle.mean()),
            "longest_gap_us": longest, "samples": len(values),
        }  # fmt: skip


def sample(
    work: Callable[[], float | None], metrics: list[str], interval_ns: int = INTERVAL_NS
) -> Trace:
    """Run `work` under the sampler; its busy time, less the seconds at the beginning that it
    returns, if any. A CUDA context must exist. RuntimeError or ImportError where
    counters cannot be had; ValueError where the metrics do not fit one pass."""
    from cupti import pm_sampling

    collector = pm_sampling.Collector(device_index=0)
    collector.enable()
    try:
        collector.configure(
            metrics=metrics, sampling_interval=interval_ns, hardware_buffer_size=512 << 20
        )
        collector.start()
        skipped = work() or 0.0
        collector.stop()
        data = collector.decode(max_samples=MOST)
        rows = [(s.start_timestamp, s.end_timestamp, *s.metric_values) for s in data]
    finally:
        collector.disable()
    table = np.array(rows, np.float64).reshape(-1, 2 + len(metrics))
    trace = Trace(metrics, table[:, 0], table[:, 1], table[:, 2:]).busy()
    kept = trace.start >= trace.start[0] + skipped * 1e9
    return Trace(metrics, trace.start[kept], trace.end[kept], trace.values[kept])


def sample_tensor(work: Callable[[], float | None]) -> Trace | None:
    """A pass with the first tensor metric that this chip knows, the first of the trace's; None
    where it knows none."""
    for metric in TENSOR:
        try:
            return sample(work, [metric, SM])
        except (ValueError, RuntimeError):
            continue
    return None
