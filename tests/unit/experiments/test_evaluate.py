"""The binaries evaluate, export and check, each as a user calls it, on a run of the fake engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
RUN = (
    "--config=configs/quickstart.py", "--config.allocation_mode=fake:d1", "--config.warmup.steps=2",
    "--config.total_train_steps=4", "--config.train_dataset.batch_size=4", "--config.gconfig.n_samples=2",
    "--config.evaluator.freq_steps=2", "--config.evaluator.max_prompts=8", "--config.reward.workers=1",
    "--config.evaluator.best=eval-rollout/reward", "--config.valid_datasets.small.task.digits=1",
    "--config.train_dataset.limit=60",
)  # fmt: skip
# Warm-up teaches digits and training takes them back: the best checkpoint is the first
FALLS = (
    "--config.reward.name=tests.unit.rewards.example_rewards:digits", "--config.actor.reward_scaling=-1",
    "--config.warmup.optimizer.lr=3", "--config.actor.optimizer.lr=3",
)  # fmt: skip


def binary(name: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"experiments.{name}", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)


def done(name: str, *arguments: str) -> str:
    finished = binary(name, *arguments)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "run"
    done("train", *RUN, *FALLS, f"--workdir={directory}")
    return directory


def uses(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "evaluations" / "uses.jsonl").read_text().splitlines()]


def test_a_checkpoint_is_evaluated_by_the_runs_own_config(workdir):
    """The score of the last evaluation in training, again; both sets; the use is recorded."""
    before = uses(workdir)
    assert {(use["purpose"], use["name"]) for use in before} == {("best", ""), ("training", "small")}
    (tree,) = json.loads(done("evaluate", f"--workdir={workdir}", "--json", "--sets=valid_dataset"))["results"]
    last = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
    assert tree["policy"]["step"] == last["step"] == 6
    assert tree["estimates"]["avg@1"]["value"] == pytest.approx(last["eval-rollout/reward/avg"])
    assert len(tree["prompts"]) == 8 and tree["protocol"]["split"] == "test"
    assert tree["protocol_digest"] == next(use["protocol"] for use in before if not use["name"])
    assert "the best checkpoint was chosen by it" in tree["uses"]["warning"]
    assert uses(workdir)[: len(before)] == before
    assert [(use["purpose"], use["step"]) for use in uses(workdir)[len(before) :]] == [("evaluate", 6)]
    samples = Path(tree["file"]).with_suffix(".samples.jsonl").read_text().splitlines()
    assert len(samples) == 8 and json.loads(samples[0])["prompt"].endswith("=")


@pytest.mark.slow
def test_two_policies_are_compared_under_one_protocol_only(workdir, tmp_path):
    files = []
    for step in ("best", "4"):
        out = done("evaluate", f"--workdir={workdir}", f"--step={step}", "--sets=small", f"--out={tmp_path / step}", "--json")
        files.append(json.loads(out)["results"][0]["file"])
    out = done("evaluate", "--compare", *files)
    assert "over 8 prompts" in out and "verdict: " in out
    flags = (f"--workdir={workdir}", "--step=best", "--sets=small", f"--out={tmp_path}", "--split=public_test", "--json")
    other = json.loads(done("evaluate", *flags))["results"][0]["file"]
    refused = binary("evaluate", "--compare", files[0], other)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("error: --compare: results of different protocols do not compare: ")
    assert "split: 'test', 'public_test'" in refused.stderr


def test_the_best_checkpoint_is_exported_as_at_the_end_of_the_run(workdir, tmp_path):
    out = done("export", f"--workdir={workdir}", "--step=best", f"--out={tmp_path / 'best'}")
    assert out.startswith(f"{tmp_path / 'best'}: step 2")
    found, kept, last = (path / "bigram.safetensors" for path in (tmp_path / "best", workdir / "best", workdir / "export"))
    assert found.read_bytes() == kept.read_bytes() != last.read_bytes()
    again = binary("export", f"--workdir={workdir}", "--step=best", f"--out={tmp_path / 'best'}")
    assert again.returncode == 1 and "is not empty" in again.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        ("evaluate", ["--workdir=nowhere"], "error: --workdir: no config.json of a run in nowhere"),
        ("evaluate", [], "error: --workdir: missing (the directory of a run; or --config"),
        ("evaluate", ["configs"], "error: configs: unexpected argument (--workdir=configs)"),
        ("export", ["--workdir=nowhere", f"--out={__file__}"], f"error: --out: {__file__} is a file"),
        ("evaluate", ["--config=quickstart"], "error: --out: missing"),
        ("evaluate", [*RUN, "--out=x", "--sets=small,nope"], "error: --sets: no such set: nope (there: valid_dataset, small)"),
        ("evaluate", ["--compare", "a.json"], "error: --compare: takes two results"),
        ("evaluate", ["--compare", "a.json", "b.json"], "error: a.json: no such file"),
        ("export", ["--out=x"], "error: --workdir: missing"),
        ("compare", ["--config=quickstart", "--other=nowhere"], "error: nowhere: no such model directory"),
        ("export", ["--workdir=nowhere"], "error: --out: missing"),
    ],
)
def test_bad_input_is_one_line_and_status_one(name, arguments, line):
    finished = binary(name, *arguments)
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[-1].startswith(line), finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evaluate", "rollout"])
def test_a_reward_that_fails_on_every_record_is_one_line_before_anything_is_sampled(name, tmp_path):
    reward = "tests.unit.rewards.example_rewards:fails"
    finished = binary(name, *RUN, f"--out={tmp_path / 'out'}", f"--config.reward.name={reward}")
    line = finished.stderr.splitlines()[-1]
    assert finished.returncode == 1 and line.startswith(f"error: reward.name: {reward} fails on 'The answer is 0.' to task:")
    assert "LookupError: The answer is 0. (example_rewards.py:" in line and "on 2 more records" in line


def test_check_says_whether_a_run_may_start():
    ready = done("check", *RUN, "--rollouts=2")
    assert ready.splitlines()[-1] == "verdict: ready, 1 warning" and "a test split: its score is optimistic" in ready
    assert "good     reward: gold answers earn 1 on average" in ready and "rollouts: 4 episodes" in ready


def test_check_names_every_error_and_ends_with_status_one():
    refused = binary("check", *RUN, "--json", "--config.reward.name=gsm8k", "--config.valid_dataset.split=train")
    tree = json.loads(refused.stdout)
    errors = {finding["part"]: finding["line"] for finding in tree["findings"] if finding["severity"] == "error"}
    assert refused.returncode == 1 and not tree["ready"]
    assert "8 of 8 validation prompts are also trained on" in errors["train_dataset, valid_dataset"]
    assert "gsm8k reads the field" in errors["reward.name"]


def test_check_makes_the_workflow_of_an_environment_too():
    """Its rewards are not tried, and its arguments can be as wrong as others."""
    workflow = ["--config.rollout.workflow=environment", "--config.rollout.workflow_args.credit=turns"]
    refused = binary("check", *RUN, *workflow)
    assert refused.returncode == 1
    assert "rollout.workflow_args.credit: 'turns' is neither episode nor turn" in refused.stdout
