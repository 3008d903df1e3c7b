"""TensorBoard event files in WORKDIR/tensorboard, written by the `tensorboard` package alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rljax.metrics.histogram import Histogram
from rljax.metrics.mean import Mean, flatten, merge
from rljax.sinks import PartialSink, Status


class TensorBoardSink(PartialSink):
    """Sink for TensorBoard: scalars by the names of metrics.jsonl, histograms, the verdict.

    Steps after `first_step` that an earlier process wrote are purged.
    """

    def __init__(self, directory: Path, *, first_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, histogram_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.plugins.text import metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._histogram = event_pb2.Event, summary_pb2.Summary, histogram_pb2.HistogramProto
        self._tensor, self._string = tensor_pb2.TensorProto, types_pb2.DT_STRING
        self._text = metadata.create_summary_metadata(display_name="verdict", description="of the doctor")
        self._verdict = ""
        self._step: int | None = None
        self._means: dict[str, Mean] = {}  # of that step
        self._writer = EventFileWriter(str(directory))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=first_step + 1, session_log=start))

    def write(self, step: int, metrics: Mapping[str, Mean]) -> None:
        """Writes a step's metrics, merged with what that step has already under their names."""
        self._means = merge([self._means, metrics]) if step == self._step else dict(metrics)
        self._step = step
        scalars = flatten({name: self._means[name] for name in metrics})
        self._write(step, [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()])

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        found = {f"{name}/histogram": self._proto(histogram) for name, histogram in histograms.items()}
        self._write(step, [self._summary.Value(tag=name, histo=proto) for name, proto in found.items()])

    def _proto(self, histogram: Histogram) -> Any:
        """Converts a histogram; sums are those of the bins' centers."""
        edges, counts = histogram.edges, histogram.counts
        centers = (edges[:-1] + edges[1:]) / 2
        return self._histogram(
            min=edges[0],
            max=edges[-1],
            num=counts.sum(),
            sum=centers @ counts,
            sum_squares=centers**2 @ counts,
            bucket_limit=edges[1:],
            bucket=counts,
        )

    def _write(self, step: int, values: Sequence[Any]) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def status(self, status: Status) -> None:
        """Writes the verdict as text when it changes, and flushes."""
        if status.verdict != self._verdict:
            self._verdict = status.verdict
            tensor = self._tensor(dtype=self._string, string_val=[status.verdict.encode()])
            self._write(status.step, [self._summary.Value(tag="verdict", metadata=self._text, tensor=tensor)])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
