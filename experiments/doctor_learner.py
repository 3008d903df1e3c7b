"""Examinations of a run that need its learner: experiments.doctor with --rescore or --critic."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljax.errors import UserError
from rljax.experiments import recorded_run

if TYPE_CHECKING:
    from rljax.experiments.recorded_run import MakeReplayer
    from rljax.flight.critic_fit import CriticFit
    from rljax.flight.recording import Recording
    from rljax.flight.rescore import Rescored

RATES = (1.0, 10.0, 0.1)  # learning rates of the critic to try until one fits, as factors of the run's own


@dataclasses.dataclass(frozen=True)
class Examination:
    """Result of an examination."""

    json: Mapping[str, Any]
    text: str
    broken: bool  # a link of the loop is


def rescore(workdir: Path, step: int | None) -> Examination | None:
    """Scores a step's tokens again by the weights that drew them: why are weights away from 1?

    Args:
      step: None for the newest whose tokens' weights can all be restored.

    Returns:
      None in a follower of a learner of several processes.
    """
    from rljax.flight import rescore as library
    from rljax.flight.recording import Recording

    recording = Recording(workdir)
    record = recording.read(library.newest_step(recording) if step is None else step)

    def work(make_replayer: MakeReplayer) -> Rescored:
        replayer = make_replayer()
        found = library.rescore(recording, replayer, record)
        replayer.close()
        return found

    found = recorded_run.replay(workdir, recording, record.header.step, work)
    if found is None:
        return None
    return Examination(
        found.json(), "\n".join(found.lines()), found.cause in (library.Cause.DISAGREEMENT, library.Cause.OTHER_WEIGHTS)
    )


def fit_critic(workdir: Path, step: int | None, passes: int) -> Examination | None:
    """Trains the critic alone on a step's batch: can it fit?

    Args:
      step: None for the newest that can be made again.
      passes: over the batch.

    Returns:
      Broken if the critic can't with the run's own learning rate; None in a follower of a learner
      of several processes.
    """
    from rljax.flight.critic_fit import Fit
    from rljax.flight.recording import Recording

    recording = Recording(workdir)
    chosen = recording.newest() if step is None else step
    if recorded_run.changed(recording.config(recording.header(chosen))).actor.adv_estimator != "gae":
        raise UserError(f"--critic: the run in {workdir} has no critic (actor.adv_estimator=gae has one)")
    well = (Fit.FITS, Fit.NOTHING)

    def work(make_replayer: MakeReplayer) -> list[CriticFit]:
        found: list[CriticFit] = []
        for factor in RATES:
            found.append(_fit(recording, chosen, make_replayer, factor, passes))
            if found[-1].fit in well:
                break
        return found

    found = recorded_run.replay(workdir, recording, chosen, work)
    if found is None:
        return None
    tree = {"step": chosen, "verdict": _verdict(found), "fits": [fit.json() for fit in found]}
    text = [f"step {chosen}, critic.optimizer.lr {fit.lr:g}: the critic {fit.fit}\n" + "\n".join(fit.lines()) for fit in found]
    return Examination(tree, "\n\n".join([*text, f"verdict: {_verdict(found)}"]), found[0].fit not in well)


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
    return found


def _verdict(found: list[CriticFit]) -> str:
    from rljax.flight.critic_fit import Fit

    first, last = found[0], found[-1]
    if first.fit is Fit.NOTHING:
        return "the returns of this batch have nothing that a critic could explain: look at the reward"
    if first.fit is Fit.FITS:
        return "the critic can fit; where it does not in the run, the returns move faster than it follows"
    scale = f"; returns are {first.scale:.3g} times as large as values: actor.reward_scaling" if first.scale > 10 else ""
    if last.fit is Fit.FITS:
        return f"the critic can fit, but not with its learning rate: critic.optimizer.lr={last.lr:g}{scale}"
    return f"the critic can not fit this batch: look at its targets, its masks and critic.eps_clip_value{scale}"
