"""Makes a recorded step again, from the checkpoint before it: experiments.replay with --step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rljax.experiments import recorded_run

if TYPE_CHECKING:
    from rljax.experiments.recorded_run import MakeReplayer
    from rljax.flight.comparison import Comparison
    from rljax.flight.recording import Recording, StepRecord
    from rljax.flight.replayer import Remade

DIFFERS = 2  # exit status


def remake(workdir: Path, step: int, *, debug: bool) -> None:
    """Makes a step again and prints its metrics beside the recorded ones.

    Exits with status 2 if they differ.

    Args:
      debug: stop in the debugger before the step.
    """
    from rljax.flight.recording import Recording

    recording = Recording(workdir)
    record = recording.read(step)
    recorded_run.replay(workdir, recording, step, lambda make_replayer: _remake(recording, record, make_replayer, debug))


def _remake(recording: Recording, record: StepRecord, make_replayer: MakeReplayer, debug: bool) -> None:
    from rljax.flight.comparison import compare

    config = recorded_run.changed(record.config)

    def compared(remade: Remade) -> Comparison:
        return compare(recording.metrics(remade.step), remade.metrics, dtype=config.actor.dtype, steps=replayer.distance)

    def report(remade: Remade) -> None:
        print(f"step {remade.step}: {compared(remade).verdict}", flush=True)

    replayer = make_replayer(on_made=report)
    replayer.go_to(record.header.parent, record.config)
    if debug:
        learner, groups, scores = replayer.learner, record.groups, record.scores  # at hand in the debugger
        print("`replayer.make(record)` makes the step; learner, config, groups and scores are here too", flush=True)
        breakpoint()
        del learner, groups, scores
    comparison = compared(replayer.make(record))
    replayer.close()
    print(f"\n{comparison.table()}\n\nstep {record.header.step}: {comparison.verdict}")
    if not comparison.holds:
        sys.exit(DIFFERS)
