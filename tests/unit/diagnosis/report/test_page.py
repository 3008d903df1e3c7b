"""The page: its numbers are those that the run recorded, and nothing in it can run or be fetched."""

import base64
import dataclasses
import functools
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser

import altair
import numpy as np
import pytest

from rljax.diagnosis import Diagnosis, Finding, History, Link, Severity, all_rules, diagnose
from rljax.diagnosis.report import comparison_page, plans, run_page, tables
from rljax.diagnosis.report.page import number
from tests.unit.diagnosis.report.conftest import HOSTILE, STEPS


class Parsed(HTMLParser):
    """Elements of a page as a browser sees them: scripts, attributes that fetch, ids and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict, str]] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.ids: list[str] = []
        self.charts: list[str] = []
        self.policy = ""
        self.text: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.addresses += [given[name] for name in ("src", "href", "action", "data") if name in given]
        self.handlers += [name for name in given if name.startswith("on")]
        self.ids += [given["id"]] if "id" in given else []
        self.charts += [given["data-chart"]] if "data-chart" in given else []
        self.policy = given["content"] if given.get("http-equiv") == "Content-Security-Policy" else self.policy
        self._inside = tag
        if tag == "script":
            self.scripts.append((given, ""))

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            given, text = self.scripts[-1]
            self.scripts[-1] = (given, text + data)
        elif self._inside != "style":
            self.text.append(data)


@pytest.fixture(scope="module")
def history(workdir) -> History:
    return History.load(workdir)


@pytest.fixture(scope="module")
def page(history) -> str:
    return page_of(history)


def page_of(history: History) -> str:
    rules = all_rules()
    return run_page(history, diagnose(history, rules), rules)


@functools.cache
def charts_of(page: str) -> dict:
    ((_, text),) = (script for script in Parsed(page).scripts if script[0].get("id") == "charts")
    return json.loads(text)


def test_every_number_of_a_curve_is_the_one_that_was_recorded(workdir, page):
    """Each line of metrics.jsonl against the figures of a run so short that a point is a step."""
    recorded = {entry.pop("step"): entry for entry in map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())}
    compared = 0
    for section in (*plans.SECTIONS, plans.SUPERVISED):
        for plan in section.plans:
            chart = charts_of(page).get(plan.id)
            if chart is None or plan.kind == "areas":
                continue
            points = chart["tables"]["points"]
            for name, label in plan.metrics.items():
                if name.endswith("*"):
                    continue
                drawn = {
                    step: (value, low, high)
                    for step, series, value, low, high in zip(
                        *(points[field] for field in ("step", "series", "value", "low", "high")), strict=True
                    )
                    if series == label
                }
                expected = {}
                for step, entry in recorded.items():
                    ends = [entry.get(f"{name}/{end}", entry.get(name)) for end in ("avg", "min", "max")]
                    if ends[0] is not None:
                        expected[step] = tuple(float(f"{value:.6g}") for value in ends)
                supervised = section is plans.SUPERVISED
                if not name.startswith("eval-"):  # that of the initial policy, at step 2, is drawn too
                    expected = {step: values for step, values in expected.items() if (step <= 2) == supervised}
                assert drawn == expected, name
                compared += len(drawn)
    assert compared > 15 * STEPS


def test_shares_of_lags_and_phases_are_those_recorded(history, page):
    charts = charts_of(page)
    for figure, names in (("lag", history.names("rollout/lag_")), ("phases", [f"timeperf/{p}" for p in plans.PHASES])):
        points = charts[figure]["tables"]["points"]
        total = {}
        for step, value in zip(points["step"], points["value"], strict=True):
            total[step] = total.get(step, 0.0) + value
        recorded = np.nansum([history.rl.series.get(name, np.zeros(len(history.rl.steps))) for name in names], axis=0)
        np.testing.assert_allclose([total[step] for step in history.rl.steps], recorded, rtol=1e-4)


def test_every_figure_has_its_place_and_every_place_its_figure(page):
    parsed = Parsed(page)
    assert sorted(parsed.charts) == sorted(charts_of(page)) and len(set(parsed.ids)) == len(parsed.ids)
    assert {"reward", "lag", "idle", "histogram-rollout-reward", "supervised-loss"} <= set(parsed.charts)


def test_hostile_samples_are_text(workdir, history, page):
    """All of the markup that samples, guard actions and components hold comes back as text."""
    parsed = Parsed(page)
    assert len(parsed.scripts) == 3 and parsed.handlers == []
    assert all("window.broken" not in text for _, text in parsed.scripts)
    shown = "".join(parsed.text)
    assert shown.count("<script>window.broken = 1</script>") >= 10
    assert HOSTILE.replace("\x00", "\ufffd") in shown.replace("\x00", "\ufffd")


def test_hostile_names_of_metrics_components_and_files_are_text(history):
    name = "reward/" + HOSTILE
    hostile = dataclasses.replace(
        history,
        series={**history.series, name: np.ones(len(history.steps))},
        samples=[{**sample, "uid": HOSTILE, "components": {HOSTILE: 1.0}, "finish": HOSTILE} for sample in history.samples],
        context=[{HOSTILE: {HOSTILE: HOSTILE}}],
        status={"state": HOSTILE, "error": HOSTILE},
        source=f"runs/{HOSTILE}",
    )
    page = page_of(hostile)
    parsed = Parsed(page)
    assert len(parsed.scripts) == 3 and parsed.handlers == []
    assert any(HOSTILE in label for label in charts_of(page)["components"]["tables"]["points"]["series"])


def test_no_request_leaves_the_page_and_no_other_script_runs(page):
    parsed = Parsed(page)
    assert all(address.startswith(("#", "data:")) for address in parsed.addresses)
    allowed = set(re.findall(r"'sha256-([^']+)'", parsed.policy))
    running = [text for given, text in parsed.scripts if given.get("type") != "application/json"]
    assert {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in running} == allowed
    assert parsed.policy.startswith("default-src 'none'") and "unsafe-inline" not in parsed.policy.partition("script-src")[2]
    assert not re.search(r"@import|url\(", re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1])


@pytest.mark.parametrize("failure", ["", "guard.collapse: no reward"])
@pytest.mark.parametrize("lacking", ["", "no RL steps"])
def test_a_run_that_failed_or_was_not_judged_is_not_called_healthy(history, failure, lacking):
    diagnosis = Diagnosis((), {}, {}, lacking=lacking, failure=failure)
    text = "".join(Parsed(run_page(history, diagnosis, all_rules())).text)
    assert ("HEALTHY:" in text) is not bool(failure or lacking)
    assert failure in text and ("NOT JUDGED:" in text) is bool(lacking)


def test_no_link_of_a_run_without_rl_steps_is_ok():
    empty = History(np.zeros(0, np.int64), {})
    assert {link.state for link in tables.links(empty, diagnose(empty), all_rules())} <= {"unjudged", "note"}


def test_the_verdict_and_its_evidence_come_first_and_the_break_is_on_every_figure(history):
    series = ("ppo_actor/update/approx_kl", "rollout/staleness")
    finding = Finding(
        "policy.kl", Link.POLICY, Severity.BROKEN, 11, ("first line", "second line"), series, ("a cause",), "an experiment"
    )
    note = Finding("reward.variance", Link.REWARD, Severity.NOTE, 3, ("third line",))
    diagnosis = Diagnosis((finding, note), {"critic.scale": "its metrics"}, {})
    page = run_page(history, diagnosis, all_rules())
    text = "".join(Parsed(page).text)
    words = (
        "BROKEN:",
        *finding.evidence,
        *finding.causes,
        finding.next,
        "Around the first break",
        "Other findings",
        *note.evidence,
    )
    places = [text.index(word) for word in words]
    assert places == sorted(places)
    for figure, chart in charts_of(page).items():
        if not figure.startswith("supervised"):
            assert chart["tables"]["mark"]["step"] == [finding.step], figure
    assert {figure for figure in charts_of(page) if figure.startswith("break-")} == {
        *("break-kl", "break-rollout-staleness", "break-reward")
    }


def test_a_torn_and_an_old_run_directory_name_what_they_lack(workdir, tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    whole = (workdir / "metrics.jsonl").read_bytes()
    (old / "metrics.jsonl").write_bytes(whole[:-40])  # the last line is half written
    sample = json.loads((workdir / "samples.jsonl").read_text().splitlines()[0])
    del sample["pieces"], sample["advantages"]
    (old / "samples.jsonl").write_text(json.dumps(sample) + '\n{"step": 3, "pro')
    text = "".join(Parsed(page_of(History.load(old))).text)
    assert "did not record its tokens apart" in text
    for name in ("histograms.jsonl", "config.json", "context.json", "status.json"):
        assert name in text


def test_a_whole_run_directory_lacks_only_what_no_sink_of_it_wrote(page):
    assert "Files that the run directory lacks" in page and "histograms.jsonl" not in page and "context.json" in page


def test_every_chart_is_vega_lite(page):
    for chart in charts_of(page).values():
        altair.LayerChart.from_dict(chart["spec"])  # raises what its schema refuses


def test_a_run_with_no_step_of_rl_and_one_with_no_step_at_all_have_a_page(workdir, tmp_path):
    first, *_ = (workdir / "metrics.jsonl").read_text().splitlines()
    for name, content in (("supervised", first + "\n"), ("empty", "")):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "metrics.jsonl").write_text(content)
        page = page_of(History.load(directory))
        assert set(Parsed(page).charts) == set(charts_of(page))
        assert ("supervised-loss" in charts_of(page)) == (name == "supervised")


def test_the_size_of_a_page_does_not_grow_with_the_run():
    def long(n: int) -> History:
        values = np.sin(np.arange(n))
        names = [name for section in plans.SECTIONS for plan in section.plans for name in plan.metrics if "*" not in name]
        return History(np.arange(1, n + 1), {f"{name}/{end}": values for name in names for end in ("avg", "min", "max")})

    short, longer = (len(page_of(long(n))) for n in (2_000, 20_000))
    assert longer < 1.05 * short < 5e6


def test_the_comparison_has_every_run_and_the_intervals(workdir, tmp_path):
    copy = tmp_path / "again"
    shutil.copytree(workdir, copy)
    histories = {name: History.load(path) for name, path in (("first", workdir), ("again", copy))}
    diagnoses = {name: diagnose(history) for name, history in histories.items()}
    page = comparison_page(histories, diagnoses)
    parsed = Parsed(page)
    assert len(parsed.scripts) == 3 and sorted(parsed.charts) == sorted(charts_of(page))
    means = charts_of(page)["reward-rollout-reward"]["tables"]["means"]
    rewards = histories["first"].rl["rollout/reward"]
    np.testing.assert_allclose(means["value"], rewards.values, rtol=1e-5)
    assert means["low"] == means["high"] == means["value"]  # of equal runs
    text = "".join(parsed.text)
    assert "first" in text and "again" in text and all(d.verdict() in text for d in diagnoses.values())


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf"), 10**400, {}, [1.0], "many", True])
def test_whatever_stands_for_a_number_in_a_damaged_file_has_a_place_on_the_page(history, value):
    events = [{"step": 1, "guard": "max_approx_kl", "metric": "x", "value": value, "bound": value, "action": "skip"}] * 2
    damaged = dataclasses.replace(history, guard=events)
    rules = all_rules()
    assert "max_approx_kl" in run_page(damaged, diagnose(damaged, rules), rules)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    assert number(value) == ("–" if value is None or is_number else str(value))
