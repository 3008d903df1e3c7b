"""Parts that a run is made of, and how it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rljax import tracing
from rljax.config.schema import Config
from rljax.engine import Engine
from rljax.metrics.mean import Mean
from rljax.process.watchdog import Watchdog
from rljax.rollout.buffer import PromptSource
from rljax.rollout.evaluation import Evaluation
from rljax.rollout.producer import Filter
from rljax.rollout.workflow import Workflow
from rljax.sinks import Sink, Status
from rljax.types import Prompt, SamplingParams, Trajectory
from rljax.workers.server import WorkerServer


@dataclasses.dataclass(frozen=True)
class Labeled:
    """Labeled examples for a supervised warm-up or SFT, with a data position of their own."""

    prompts: PromptSource
    encode: Callable[[Prompt], Trajectory]  # makes a labeled example of a prompt


@dataclasses.dataclass(frozen=True)
class Run:
    """Parts that a run is made of. `config` is resolved (rljax/config/io.py)."""

    config: Config
    engine: Engine
    prompts: PromptSource
    workflow: Workflow
    params: SamplingParams
    open_sinks: Callable[[int], Sink]  # takes the number of finished steps; cuts what files say of later steps
    workdir: Path
    accept: Filter = lambda group: True  # rollout.should_accept_fn
    vocab_size: int | None = None  # of the model; None to leave token ids unchecked
    labeled: Labeled | None = None
    evaluations: Sequence[Evaluation] = ()  # one per validation set
    worker_server: WorkerServer | None = None  # leases prompts to rollout workers; None: this process generates
    before: Status | None = None  # of the run in workdir when this process began; None of a new one, or where nobody kept it
    take_metrics: Callable[[], dict[str, Mean]] = dict  # metrics of the reward processes since the last call
    watchdog: Watchdog | None = None  # armed by whoever started the run; None: the loop has one of its own

    def watched(self) -> AbstractContextManager[Watchdog]:
        """Returns the context in which the run is ended if it hangs."""
        if self.watchdog is not None:
            return nullcontext(self.watchdog)
        return Watchdog(self.config.recover.hang_timeout, self.workdir / "hang.txt")

    def traced(self) -> AbstractContextManager[None]:
        """Returns the context of the run: traced to WORKDIR/trace.json, if the config says so."""
        rollout = self.config.rollout
        if not rollout.enable_rollout_tracing:
            return nullcontext()
        return tracing.to_file(self.workdir / "trace.json", int(rollout.max_trace_mb * 2**20))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """End of a run.

    `finished` is False if it was stopped. It was saved then, and the same command resumes it.
    """

    step: int
    version: int
    finished: bool
    stopped_by: int | None = None  # number of the signal that stopped it
