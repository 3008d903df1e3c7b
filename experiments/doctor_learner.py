"""Examinations of a recorded run that need its learner: experiments.doctor with --rescore or --critic."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rljax.errors import UserError
from rljax.experiments import recorded_run

if TYPE_CHECKING:
    from rljax.experiments.recorded_run import MakeReplayer
    from rljax.flight.critic_fit import CriticFit
    from rljax.flight.recording import Recording

BROKEN = 2  # exit status
RATES = (1.0, 10.0, 0.1)  # learning rates of the critic to try, as factors of the run's, until one fits


def rescore(workdir: Path, step: int | None) -> None:
    """Scores a step's tokens again by the weights that drew them, and prints why weights are away from 1.

    Exits with status 2 if sampler and learner disagree.

    Args:
      step: None for the newest whose tokens' weights can all be restored.
    """
    from rljax.flight import rescore as library
    from rljax.flight.recording import Recording

    recording = Recording(workdir)
    step = library.newest_step(recording) if step is None else step
    record = recording.read(step)

    def work(make_replayer: MakeReplayer) -> None:
        replayer = make_replayer()
        found = library.rescore(recording, replayer, record)
        replayer.close()
        print("\n".join(found.lines()))
        if found.cause is library.Cause.DISAGREEMENT:
            sys.exit(BROKEN)

    recorded_run.replay(workdir, recording, step, work)


def fit_critic(workdir: Path, step: int | None, passes: int) -> None:
    """Trains the critic alone on a step's batch, and prints whether it can fit.

    Exits with status 2 if it can't with the run's own learning rate.

    Args:
      step: None for the newest that can be made again.
      passes: over the batch.
    """
    from rljax.flight.critic_fit import Fit
    from rljax.flight.recording import Recording

    recording = Recording(workdir)
    step = recording.newest() if step is None else step
    if recorded_run.changed(recording.config(recording.header(step))).actor.adv_estimator != "gae":
        raise UserError(f"--critic: the run in {workdir} has no critic (actor.adv_estimator=gae has one)")

    def work(make_replayer: MakeReplayer) -> None:
        found: list[CriticFit] = []
        for factor in RATES:
            found.append(_fit(recording, step, make_replayer, factor, passes))
            if found[-1].fit in (Fit.FITS, Fit.NOTHING):
                break
        print(_verdict(found))
        if found[0].fit not in (Fit.FITS, Fit.NOTHING):
            sys.exit(BROKEN)

    recorded_run.replay(workdir, recording, step, work)


def _fit(recording: Recording, step: int, make_replayer: MakeReplayer, factor: float, passes: int) -> CriticFit:
    """Fits the critic as it was before the step, with its learning rate times a factor."""
    from rljax.flight.critic_fit import fit_critic, for_fitting

    record = recording.read(step)
    before = make_replayer()
    before.go_to(record.header.parent, record.config)
    config = for_fitting(recorded_run.changed(record.config), factor)
    learner = before.with_config(config)
    found = fit_critic(learner, config, record.groups, passes)
    learner.close()
    print(f"step {step}, critic.optimizer.lr {found.lr:g}: the critic {found.fit}")
    print("".join(f"  {line}\n" for line in found.lines()), flush=True)
    return found


def _verdict(found: list[CriticFit]) -> str:
    from rljax.flight.critic_fit import Fit

    first, last = found[0], found[-1]
    if first.fit is Fit.NOTHING:
        return "verdict: the returns of this batch have nothing that a critic could explain: look at the reward"
    if first.fit is Fit.FITS:
        return (
            "verdict: the critic can fit: if it does not in the run, returns move faster than it follows (critic.optimizer.lr)"
        )
    scale = f"; returns are {first.scale:.3g} times as large as values: actor.reward_scaling" if first.scale > 10 else ""
    if last.fit is Fit.FITS:
        return f"verdict: the critic can fit, but not with its learning rate: critic.optimizer.lr={last.lr:g}{scale}"
    return f"verdict: the critic can not fit this batch: look at its targets, masks and critic.eps_clip_value{scale}"
