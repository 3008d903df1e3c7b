"""Says which link of a run's loop broke first, with the evidence.

    python -m experiments.doctor --workdir=runs/quickstart         # finished, live or torn
    python -m experiments.doctor --workdir=runs/a --watch          # as it goes on
    python -m experiments.doctor --workdir=runs/a,runs/b,runs/c    # several seeds together
    python -m experiments.doctor --diff runs/a runs/b              # what differs between them
    python -m experiments.doctor --log=wandb.csv --source=trl      # a log of TRL's or verl's
    python -m experiments.doctor --workdir=runs/a --audit=out --score=package.module:function
    python -m experiments.doctor --workdir=runs/a --checklist
    python -m experiments.doctor --workdir=runs/a --private=runs/a/evaluations/RESULT.json
    python -m experiments.doctor --workdir=runs/a --rescore     # do sampler and learner agree?
    python -m experiments.doctor --workdir=runs/a --critic      # can the critic fit a batch?

docs/doctor.md has the rules, severities and false alarms. Exit status 0: no link is broken, or
nothing could be judged; 2: a link is broken, or the run failed; 1: bad input. --json prints any of
these as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from rljax.errors import UserError
from rljax.experiments import main

WORKDIR = flags.DEFINE_string("workdir", None, "Directory of a run; several with commas between.")
WATCH = flags.DEFINE_bool(
    "watch", False, "Read again as the run goes on, and say the verdict when it changes; until the run ends."
)
INTERVAL = flags.DEFINE_float("interval", 5.0, "With --watch: seconds between two readings.", lower_bound=0.0)
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of text.")
DIFF = flags.DEFINE_bool("diff", False, "Say what differs between two runs, given as arguments.")
LOG = flags.DEFINE_string("log", None, "Log of another trainer, instead of --workdir.")
FORMAT = flags.DEFINE_string("format", "auto", "With --log: wandb-csv, tensorboard, jsonl; auto goes by the name.")
SOURCE = flags.DEFINE_string("source", "auto", "With --log: trl, verl, rljax; auto goes by the names of metrics.")
AUDIT = flags.DEFINE_string("audit", None, "Directory to write the reward-hacking audit to: figures and samples to read.")
SCORE = flags.DEFINE_string(
    "score", None, "With --audit: package.module:function of (prompt, completion) texts, an independent score."
)
CHECKLIST = flags.DEFINE_bool("checklist", False, "Fill in the checklists before, during and after training.")
PRIVATE = flags.DEFINE_string(
    "private", None, "Result of experiments.evaluate on a private set, or a directory, to compare with validation."
)
RESCORE = flags.DEFINE_bool("rescore", False, "Score tokens of a recorded step again by the weights that drew them.")
CRITIC = flags.DEFINE_bool("critic", False, "Train the critic alone on the batch of a recorded step: can it fit?")
STEP = flags.DEFINE_integer("step", None, "With --rescore or --critic: the step; unset: the newest.", lower_bound=1)
PASSES = flags.DEFINE_integer("passes", 100, "With --critic: passes over the batch.", lower_bound=1)

BROKEN = 2  # exit status
REST = 4.0  # seconds between readings of --watch per second of reading: a long run takes long to read
# Flags that go together, and what they do; --json goes with all of them
MODES = {
    "--diff": ("diff",),
    "--log": ("log", "format", "source"),
    "several runs": ("workdir",),
    "--rescore and --critic": ("workdir", "rescore", "critic", "step", "passes"),
    "--watch": ("workdir", "watch", "interval"),
    "one run": ("workdir", "checklist", "audit", "score", "private"),
}


def run() -> None:
    arguments = main.arguments_from_flags()
    if arguments and not DIFF.value:
        raise main.unexpected(arguments[0])
    workdirs = main.run_directories([WORKDIR.value or ""])
    if DIFF.value:
        _check_flags("--diff")
        _diff(arguments)
    elif LOG.value is not None:
        _check_flags("--log")
        _judge_log(Path(LOG.value))
    elif not workdirs:
        raise UserError("--workdir: missing (the directory of a run; or --log, or --diff A B)")
    elif len(workdirs) > 1:
        _check_flags("several runs")
        _summarize(workdirs)
    elif RESCORE.value or CRITIC.value:
        _check_flags("--rescore and --critic")
        _examine(workdirs[0])
    elif WATCH.value:
        _check_flags("--watch")
        _watch(workdirs[0])
    else:
        _check_flags("one run")
        _judge(workdirs[0])


def _check_flags(mode: str) -> None:
    """Raises UserError for a flag without a value, or one without a meaning in a mode."""
    for name in dict.fromkeys(name for names in MODES.values() for name in names):
        if main.FLAGS[name].present and name not in MODES[mode]:
            raise UserError(f"--{name}: has no meaning with {mode}")
        if main.FLAGS[name].value == "":
            raise UserError(f"--{name}: missing (nothing follows the =)")
    if SCORE.value is not None and AUDIT.value is None:
        raise UserError("--score: has no meaning without --audit (the directory to write the audit to)")
    if RESCORE.value and CRITIC.value:
        raise UserError("--critic: excludes --rescore (run one after the other)")


def _judge(workdir: Path) -> None:
    from rljax.diagnosis import History, diagnose
    from rljax.diagnosis.summaries import audit, checklist, private, render

    history = History.load(workdir)
    diagnosis = diagnose(history)
    tree, parts = diagnosis.json(), [render.text(diagnosis)]
    if CHECKLIST.value:
        filled = checklist.fill(history, diagnosis)
        tree["checklist"] = [item.json() for item in filled]
        parts.append(checklist.text(filled))
    if PRIVATE.value is not None:
        report = private.report(history, private.read(Path(PRIVATE.value)))
        tree["private"] = report.json()
        parts.append(str(report))
    if AUDIT.value is not None:
        audit.write(audit.audit(history, _score()), Path(AUDIT.value))
        tree["audit"] = AUDIT.value
        parts.append(f"The audit is in {Path(AUDIT.value) / 'audit.md'}.")
    _say(tree, "\n\n".join(parts))
    _exit(diagnosis.is_bad)


def _score() -> Any:
    from rljax.config.registry import resolve

    return None if SCORE.value is None else resolve("--score", SCORE.value, {}, "score", ("prompt", "completion"))


def _judge_log(path: Path) -> None:
    from rljax.diagnosis import diagnose, importers
    from rljax.diagnosis.summaries import render

    diagnosis = diagnose(importers.read(path, FORMAT.value, SOURCE.value))
    _say(diagnosis.json(), render.text(diagnosis))
    _exit(diagnosis.is_bad)


def _summarize(workdirs: list[Path]) -> None:
    from rljax.diagnosis import History
    from rljax.diagnosis.summaries import seeds

    summary = seeds.summarize([History.load(workdir) for workdir in workdirs])
    _say(summary.json(), seeds.text(summary))
    _exit(any(outcome.diagnosis.is_bad for outcome in summary.outcomes))


def _watch(workdir: Path) -> None:
    """Says the verdict when it changes, until the run ends or is found killed."""
    from rljax.diagnosis import Diagnosis, History, diagnose
    from rljax.diagnosis.summaries import render

    diagnosis: Diagnosis | None = None
    waits = False
    while True:
        began = time.monotonic()
        try:
            history = History.load(workdir)
        except UserError:
            if diagnosis is not None or not workdir.is_dir():
                raise
            if not waits:
                print(f"{workdir} has no step of a run yet: waiting for the first", file=sys.stderr, flush=True)
            waits = True
            time.sleep(INTERVAL.value)
            continue
        before, diagnosis = diagnosis, diagnose(history)
        if not diagnosis.says_as(before):
            _say(diagnosis.json(), f"step {history.last_step}: {diagnosis.verdict()}", compact=True)
        if history.state != "running":
            break
        time.sleep(max(INTERVAL.value, REST * (time.monotonic() - began)))
    if not JSON.value:
        print(f"\n{render.text(diagnosis)}")
    _exit(diagnosis.is_bad)


def _examine(workdir: Path) -> None:
    """Examines a recorded step with the learner of its time (docs/debugging.md)."""
    from rljax.experiments import doctor_learner

    found = {}
    if RESCORE.value:
        found["rescore"] = doctor_learner.rescore(workdir, STEP.value)
    if CRITIC.value:
        found["critic"] = doctor_learner.fit_critic(workdir, STEP.value, PASSES.value)
    made = {name: examination for name, examination in found.items() if examination is not None}
    _say({name: e.json for name, e in made.items()}, "\n\n".join(e.text for e in made.values()))
    _exit(any(e.broken for e in made.values()))


def _diff(arguments: tuple[str, ...]) -> None:
    from rljax.diagnosis import History
    from rljax.diagnosis.summaries import compare

    if len(arguments) != 2:
        raise UserError(f"--diff: takes two directories of runs, got {len(arguments)}")
    ours, theirs = (History.load(Path(argument), flag="--diff") for argument in arguments)
    found = compare.differences(ours, theirs)
    lines = [f"{history.source} has no {name}" for history in (ours, theirs) for name in compare.unrecorded(history)]
    for about in dict.fromkeys(difference.about for difference in found):
        lines += [about, *(f"  {difference}" for difference in found if difference.about == about)]
    _say({"differences": [difference.json() for difference in found]}, "\n".join(lines) or "nothing that is recorded differs")


def _say(tree: Mapping[str, Any], text: str, *, compact: bool = False) -> None:
    print(json.dumps(tree, indent=None if compact else 2, ensure_ascii=False) if JSON.value else text, flush=True)


def _exit(broken: bool) -> None:
    if broken:
        sys.exit(BROKEN)


if __name__ == "__main__":
    main.run_main(run, takes_arguments=True)
