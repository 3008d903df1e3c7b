"""Pages: one self-contained HTML file, of one run or of several compared.

Completions, prompts and names are hostile text. Jinja escapes all of it, data stand in a block that
is not run, and the page's content security policy lets no script run but the two that are in it and
no request leave the page.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2

from rljax.diagnosis import planned
from rljax.diagnosis.finding import Diagnosis, Finding
from rljax.diagnosis.history import REWARD, History
from rljax.diagnosis.report import compare, figures, plans, samples, tables
from rljax.diagnosis.report.charts import StepAxis
from rljax.diagnosis.report.figures import Figure
from rljax.diagnosis.rule import Rule
from rljax.diagnosis.run_files import number_of
from rljax.diagnosis.summaries import checklist
from rljax.diagnosis.thresholds import BASELINE

ABOUT_THE_BREAK = 4  # most figures beside the verdict, that of the reward included
ZOOM = 0.2  # share of the run's RL steps that these show on either side of the break
FEWEST_ZOOMED = 10  # steps on either side

MEDIA = """default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {scripts}"""


def run_page(history: History, diagnosis: Diagnosis, rules: Sequence[Rule]) -> str:
    """Returns the page of one run.

    Args:
      rules: those that the diagnosis was made by.
    """
    rl, first, state = figures.rl_of(history), diagnosis.first, tables.state_of(diagnosis)
    marked = None if first is None else first.step
    axis = StepAxis(int(rl.steps[0]) if len(rl.steps) else 0, rl.last_step, marked, state)
    sections = [(section, _drawn(rl, section.plans, axis)) for section in plans.SECTIONS]
    supervised = history.between(0, history.first_step - 1) if history.rl_steps else history
    if len(supervised.steps):
        steps = StepAxis(int(supervised.steps[0]), int(supervised.steps[-1]))
        sections.append((plans.SUPERVISED, _drawn(supervised, plans.SUPERVISED.plans, steps)))
    histograms = figures.histograms_of(rl, axis)
    about = _about(rl, first, state)
    everything = [*about, *(figure for _, drawn in sections for figure in drawn), *histograms]
    drawn_ids = {figure.id for figure in everything}
    return _render(
        "run.html.j2",
        everything,
        history=history,
        name=history.source.rstrip("/").rpartition("/")[2] or "run",
        standing=tables.standing(history),
        diagnosis=diagnosis,
        state=state,
        first=first,
        links=tables.links(history, diagnosis, rules),
        about=about,
        sections=[(section, drawn) for section, drawn in sections if drawn],
        histograms=histograms,
        not_drawn=[plan for section in plans.SECTIONS for plan in section.plans if plan.id not in drawn_ids],
        samples=samples.pick(history.samples, marked),
        shades=range(-samples.SHADES, samples.SHADES + 1),
        versions=range(samples.VERSIONS),
        checklists=_checklists(history, diagnosis),
        planned=planned.compare(history.plan),
        changed=tables.changed_keys(history.config),
        context=tables.context_rows(history.context),
        metrics=tables.metric_rows(history),
        missing=tables.missing_files(history),
    )


def comparison_page(histories: Mapping[str, History], diagnoses: Mapping[str, Diagnosis]) -> str:
    """Returns the page that compares several runs.

    Args:
      histories: by name, at least two; runs whose configs differ in their seeds alone are a group.
      diagnoses: of the same names.
    """
    comparison = compare.compare(histories)
    drawn = compare.draw(comparison)
    return _render(
        "compare.html.j2",
        [figure for _, several in drawn for figure in several],
        comparison=comparison,
        histories=histories,
        diagnoses=diagnoses,
        states={name: tables.state_of(diagnosis) for name, diagnosis in diagnoses.items()},
        labels={name: group.label for group in comparison.groups for name in group.names},
        titles=compare.FINAL,
        last_steps=int(BASELINE),
        sections=drawn,
    )


def _drawn(history: History, several: Sequence[plans.Plan], axis: StepAxis) -> list[Figure]:
    return [figure for plan in several if (figure := figures.draw(history, plan, axis)) is not None]


def _checklists(history: History, diagnosis: Diagnosis) -> dict[str, list[checklist.Filled]]:
    """Returns the items before, during and after training, filled in."""
    filled = checklist.fill(history, diagnosis)
    return {str(phase): [item for item in filled if item.phase is phase] for phase in checklist.Phase}


def _about(history: History, finding: Finding | None, state: str) -> list[Figure]:
    """Draws the metrics of the evidence around its first step."""
    if finding is None or not history.rl_steps:
        return []
    reach = max(FEWEST_ZOOMED, round(ZOOM * history.rl_steps))
    near = history.between(finding.step - reach, finding.step + reach)
    if not len(near.steps):
        return []
    axis = StepAxis(int(near.steps[0]), int(near.steps[-1]), finding.step, state)
    wanted = map(plans.plan_for, (*finding.series[: ABOUT_THE_BREAK - 1], REWARD, "reward/*"))
    distinct = {plan.id: plan for plan in wanted}
    drawn = (figures.draw(near, plan, axis, prefix="break-") for plan in distinct.values())
    found = [figure for figure in drawn if figure is not None]
    return found[: max(2, len(found) - 1)]  # the components only beside the reward alone


def _render(template: str, drawn: Sequence[Figure], **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rljax.diagnosis.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "counted": counted}
    scripts = [chart_library(), _file("report.js")]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)
    charts = {figure.id: {"spec": figure.chart.spec, "tables": figure.chart.tables} for figure in drawn}
    return environment.get_template(template).render(
        policy=MEDIA.format(scripts=hashes),
        style=_file("report.css"),
        scripts=scripts,
        charts=in_script(charts),
        **values,
    )


def in_script(value: Any) -> str:
    """Encodes a value as JSON that can't end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@functools.cache
def chart_library() -> str:
    """Returns Vega, Vega-Lite and Vega-Embed as one script of about 900 KB (BSD-3-Clause)."""
    import altair
    import vl_convert

    script: str = vl_convert.javascript_bundle(vl_version=altair.SCHEMA_VERSION.lstrip("v").rpartition(".")[0])  # type: ignore[call-arg]
    if "</script" in script.lower():
        raise ValueError("the chart library's script would end its element")
    return script


def _file(name: str) -> str:
    return resources.files("rljax.diagnosis.report").joinpath("templates", name).read_text(encoding="utf-8")


def number(value: Any) -> str:
    """Writes a number with four significant digits; what is none, from a damaged file, as it is."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        return str(value)
    if not math.isfinite(number_of(value)):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def counted(count: int, noun: str) -> str:
    """Writes a count and its noun: 1 rule, 2 rules."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
