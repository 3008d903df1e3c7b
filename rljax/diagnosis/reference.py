"""Writes docs/doctor.md from the rules: a section of each, by its id.

python -m rljax.diagnosis.reference > docs/doctor.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rljax.diagnosis.finding import Link
from rljax.diagnosis.importers.tables import SOURCES, Renamed
from rljax.diagnosis.rule import Rule
from rljax.diagnosis.rules import OWN

_INTRODUCTION = """\
# The doctor: which link of the loop broke first

Written by `python -m rljax.diagnosis.reference` from the rules (`rljax/diagnosis/rules/`); don't edit it.

Reward is a late symptom. `rljax doctor` reads what a run recorded, judges every link of the loop by rules, and says
which one broke first, with figures and steps, likely causes in order, and the next experiment to run.

```bash
python -m experiments.doctor --workdir=runs/quickstart            # finished, live or torn
python -m experiments.doctor --workdir=runs/quickstart --watch    # says when the verdict changes, until the run ends
python -m experiments.doctor --workdir=runs/a,runs/b,runs/c       # several seeds: verdicts, rewards with 95% intervals
python -m experiments.doctor --diff runs/a runs/b                 # config, seed, code, packages, hardware, protocol
python -m experiments.doctor --workdir=runs/a --checklist         # before, during and after training
python -m experiments.doctor --workdir=runs/a --rescore           # log-probs of recorded tokens, by the weights that drew them
python -m experiments.doctor --workdir=runs/a --critic            # can the critic fit one recorded batch?
python -m experiments.doctor --workdir=runs/a --audit=audit --score=package.module:function
python -m experiments.doctor --workdir=runs/a --private=RESULT.json    # beside a private split's reward
python -m experiments.doctor --log=export.csv --source=trl        # a log of another trainer
```

`--json` prints any of these as JSON; of a run it is `{"standing", "verdict", "first_break": {"rule", "link", "step",
"evidence", "causes", "next"}, "findings", "unjudged", "run"}`, and `first_break` is null if no link is broken.

The first line begins with the run's standing:

| standing | meaning | exit status |
| --- | --- | --- |
| `HEALTHY` | No link is broken or under strain. Rules of the reward and of the policy had what they need. | 0 |
| `NOT JUDGED` | Nothing was found, but metrics or steps for judging the reward or the policy are missing. | 0 |
| `WARNING` | A link is under strain. | 0 |
| `BROKEN` | A link is broken. | 2 |
| `FAILED` | An error, a guardrail or a kill ended the run; the reason follows, then what the rules found before. | 2 |

The line of a healthy run says how many rules it is too short for. Bad input has exit status 1.

## Severities

| severity | meaning | exit status |
| --- | --- | --- |
| `note` | Worth knowing. Healthy runs have some. | 0 |
| `warning` | A link is under strain, or a sign has innocent explanations: look before trusting the run. | 0 |
| `broken` | A link does not do its job: what the run learns is not what was meant. | 2 |

## Order

The finding with the earliest first evidence wins, among those that are broken. Onsets within SIMULTANEOUS steps of each
other, or three percent of the run, count as the same time; then the order of links decides: LINKS. A symptom, such as a
reward that falls, yields to every other break that came before it or about then: it is a consequence.

Single noisy steps don't speak: a rule wants four of five steps in a row, medians, or a Mann-Kendall trend of block
means; rewards are compared in standard errors from the number of episodes. Exceptions say so: a value that is not
finite, a token that no sampler drew, a KL divergence of a nat in one step.

What has passed is a note: a share of clipped tokens, of truncated completions or of failed episodes that was beyond its bound
for a while, and is not in the last ten steps, if no reward was lost. The same of a KL divergence; and in the first
twenty steps of a run, where the policy has most to learn, a large one is a warning until it has lasted for thirty.

What a rule needs and a run did not record is listed as not judged, never passed over. Steps that a
[rollback](runtime.md#rollback) undid are judged by `policy.guardrails` alone: their lines stay in the files, and the run that
goes on is not made of them.

A run whose `status.json` says that it runs has failed if its process is gone. On the same machine the kernel tells; from
another host the file does, which a living run touches every half minute: after ten minutes without that, it counts as lost.

## False alarms

The thresholds marked "tuned" were set on half of a library of broken and healthy runs, and judged on the other half:
[how often the doctor is right](doctor_table.md), by fault, healthy run and rule. None of the 22 healthy runs of the
judging half got more than a `note`. Three of them, `guess_number`, `guess_number_agent` and `retry`, were looked at when
rules were changed; the 19 others say that fewer than 15 in 100 such runs have a false alarm, with 95% confidence (0.85 to the
power of 19 is 0.05). They are small: sums and a game of several turns, by several algorithms, workflows and kinds of
training. For others the rate is not known.

As they went on, judged at every second step, 40 of the 44 healthy runs never had more than a note; two had a warning that
the reward does not move, before it did; and the two of `guess_number`, whose reward fell by half and came back, were broken
when it had fallen (`python -m experiments.bench.broken_runs --live=tests/data/runs`).

The rules that audit for reward hacking are signs to read samples by, not proofs: a reward that pays for something that
rises together with the task escapes them, and a task that wants long or uniform completions can raise them. With held-out
reward that improves they are notes; without evaluations, warnings.

## Live

A run judges itself as it goes on (`rljax/diagnosis/live.py`), for at most 1% of its time, by its metrics, its guardrails'
actions and up to a thousand of its samples: the screen, TensorBoard and W&B say the verdict. `guard.rules` gives an action to a
rule.

## The reward audit

`--audit=DIR` writes `DIR/audit.md` and `DIR/audit.json`: gains of training and held-out reward; length, repetition,
refusals, tool calls and the most common opening of early and late samples; the samples with the highest and the lowest
reward and some at random. `--score` names an independent score, a function of the texts of prompt and completion;
samples that it ranks otherwise than the reward does are laid out too. It reads `samples.jsonl`, which has
`stats_logger.samples_per_step` samples of each step.

## The private set

Evaluate a policy on prompts that nothing was chosen by, and compare with the validation reward of the same policy, that of the
checkpoint's step or the last one:

```bash
python -m experiments.evaluate --workdir=runs/a --split=private_test    # writes runs/a/evaluations/RESULT.json
python -m experiments.doctor --workdir=runs/a --private=runs/a/evaluations/RESULT.json
```

`--private` may also name the directory of a run that evaluated it, as one of no steps (`total_train_steps=0`,
`actor.path=runs/a/export`, `valid_dataset.split=private_test`).

## A rule of your own

A package with an entry point of the group `rljax.rules` that names a `Rule`, or a list of them, adds to these:

```python
from rljax.diagnosis.evidence import above
from rljax.diagnosis.finding import Severity
from rljax.diagnosis.rule import rule


@rule(
    "environment.tests_flaky",
    "The unit tests that score answers give different results for the same answer.",
    needs=("reward/flaky",),
    least=5,
    causes=("tests depend on time or order",),
    next="run each answer's tests twice",
)
def flaky(history):
    return above(history["reward/flaky"], 0.02, Severity.BROKEN)
```

`history["x"]` is the mean of a metric by step (`rljax/diagnosis/history.py`); a rule whose `needs` are missing is not
judged.
"""
_RULES = """\
## The rules

{count} rules. Commands say `CONFIG` for the run's config, `WORKDIR` for its directory.
"""
_LOGS = """\
## Logs of other trainers

`--format`: `wandb-csv` (the export of a panel, or of a run's history), `tensorboard` (an event file, or the directory of
one run's), `jsonl` (an object per line, `{"step": 1, "reward": 0.5}` or, as verl's file logger writes them,
`{"step": 1, "data": {"critic/score/mean": 0.5}}`; a list of such objects; or the HF Trainer's `trainer_state.json`); `auto`
goes by the file's name. `--source`: `auto` takes the trainer that knows most of the names. The step is the first of `step`,
`train/global_step`, `training/global_step`, `trainer/global_step`, `global_step`, `Step`, `_step`, `training_step`,
`iteration` that is there. Prefixes `train/` and `eval/` of the HF Trainer's callbacks are undone. A log of several runs is
refused: name one of them. A last line or event may be half written; one that is damaged before is refused.

Evidence, causes and next experiments are in the trainer's own names and keys. Rules that need a metric which its log
lacks are listed as not judged; a metric that the trainer has no name for is named as rljax records it.
"""


def page() -> str:
    """Returns the text of docs/doctor.md."""
    links = ", ".join(str(link) for link in Link)
    parts = [_INTRODUCTION.replace("LINKS", links).replace("SIMULTANEOUS", "three"), _RULES.format(count=len(OWN))]
    for link in Link:
        rules = [rule for rule in OWN if rule.link is link]
        parts += [f"### {str(link).capitalize()}\n", *(_section(rule) for rule in rules)]
    parts.append(_LOGS)
    parts += [_table(name, source.table) for name, source in SOURCES.items() if source.table]
    return "\n".join(parts)


def _section(rule: Rule) -> str:
    lines = [f"#### {rule.id}", "", rule.meaning, ""]
    if rule.needs:
        lines.append(f"- needs {_codes(rule.needs)}{_least(rule)}")
    lines += [f"- threshold {bound!r} {bound.unit}: {bound.origin}" for bound in rule.bounds]
    lines += [f"- likely causes: {'; '.join(_plain(cause) for cause in rule.causes)}", f"- next: {_plain(rule.next)}"]
    if rule.symptom:
        lines.append("- a symptom: yields to other breaks")
    return "\n".join([*lines, ""])


def _least(rule: Rule) -> str:
    return f", {rule.least} steps or more" if rule.least > 1 else ""


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _plain(text: str) -> str:
    """Escapes what Markdown would take for emphasis."""
    return re.sub(r"(?<=\w)_(?=\w)", r"\_", text).replace("*", r"\*")


def _table(name: str, table: Sequence[Renamed]) -> str:
    rows = [f"| `{renamed.readable}` | `{renamed.name}`{_factor(renamed)} |" for renamed in table]
    return "\n".join(
        [f"### Names of {name}\n", "| theirs | ours |", "| --- | --- |", *(row.replace("\\d+", "N") for row in rows), ""]
    )


def _factor(renamed: Renamed) -> str:
    return "" if renamed.factor == 1 else f", times {renamed.factor:g}"


if __name__ == "__main__":
    print(page(), end="")
