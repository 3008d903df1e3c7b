"""A recorded step made again by the command line: the same metrics on its own engine to the bit, on
the other within the bound; and what is not there is one line.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.experiments.test_train import REPOSITORY, SYNCHRONOUS, binary, finish, train

ASYNCHRONOUS = "--config.rollout.max_head_offpolicyness=2"
NO_VERDICT = "--config.stats_logger.verdict=False"  # which would have steps and checkpoints kept
LAST = 34  # step of the run: 4 of the warm-up and 30 of RL, a checkpoint every third


def replay(workdir: Path, *arguments: str) -> tuple[int, str, str]:
    return finish(binary("replay", f"--workdir={workdir}", *arguments))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("runs") / "recorded"
    code, _, err = train(workdir, ASYNCHRONOUS, "--config.actor.ppo_n_minibatches=2", "--config.saver.keep_last=3", NO_VERDICT)
    assert code == 0, err
    return workdir


def test_a_step_made_again_has_the_recorded_metrics(run):
    before = sorted(path for path in run.rglob("*"))
    code, out, err = replay(run, f"--step={LAST - 1}")  # 33 is a checkpoint, 30 the one before
    assert code == 0, err
    found = re.findall(r"^step (\d+): equal: all (\d+) metrics to the bit$", out, re.MULTILINE)
    assert [int(step) for step, _ in found] == [31, 32, 33] and all(int(count) > 30 for _, count in found)
    assert re.search(r"^ppo_actor/update/loss +\S+ +\S+  0$", out, re.MULTILINE)
    assert sorted(path for path in run.rglob("*")) == before  # it is only read


def test_a_step_that_differs_is_status_2_and_its_metrics_are_named(run):
    code, out, _ = replay(run, f"--step={LAST}", "--config.gconfig.temperature=2.0")
    assert code == 2 and re.search(r"^ppo_actor/behave_log_ratio_p01 .* BEYOND$", out, re.MULTILINE)
    assert re.search(rf"^step {LAST}: differs: \d+ of \d+ metrics beyond 1e-05; ", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--step=2"], r"--step: 2 is not recorded in .* \(steps that can be made again: 31-34\)"),
        (["--step=20"], r"--step: no checkpoint up to step 19 has all batches .* \(steps that can be made again: 31-34\)"),
        (["--step=0"], r"flag --step=0: .*"),
        (["--step=34", "--config.allocation_mode=sglang:d1"], r"allocation_mode: sglang:d1 cannot learn"),
    ],
)
def test_a_step_that_can_not_be_made_again_is_one_line(run, arguments, line):
    code, out, err = replay(run, *arguments)
    assert code == 1 and out == "" and re.fullmatch(f"error: {line}\n", err), err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], r"--batch: missing .*--step, a step of the run in --workdir\)"),
        (["--debug", "--batch=b", "--config=quickstart"], r"--debug: has no meaning without --step"),
        (["--step=3", "--batch=b"], r"--batch: excludes --step .*"),
        (["--step=3", "--config=quickstart"], r"--config: has no meaning with --step .*"),
    ],
)
def test_flags_that_would_be_passed_over_are_one_line(tmp_path, arguments, line):
    code, out, err = replay(tmp_path, *arguments)
    assert code == 1 and out == "" and re.fullmatch(f"error: {line}\n", err), err


def test_a_directory_without_records_is_one_line(tmp_path):
    code, _, err = replay(tmp_path, "--step=3")
    assert code == 1 and err == f"error: --workdir: {tmp_path} has no flight/ (a run writes it unless flight.steps is 0)\n"


def test_the_debugger_stops_before_the_step_with_everything_at_hand(run):
    command = [sys.executable, "-m", "experiments.replay", f"--workdir={run}", f"--step={LAST}", "--debug"]
    said = "p len(groups), sorted(scores), type(learner).__name__\np replayer.make(record).step\nq\n"
    done = subprocess.run(command, cwd=REPOSITORY, input=said, capture_output=True, text=True, check=False, timeout=240)
    assert "(4, ['advantage', 'proximal_logp'], 'FakeLearner')" in done.stdout, done.stderr
    assert f"\n(Pdb) {LAST}\n" in done.stdout


# On real engines

SMALL = (
    "--config.train_dataset.batch_size=8",
    "--config.jax.slots=32",
    "--config.total_train_steps=8",
    "--config.reward.name=sevenths:reward",
    "--config.actor.ppo_n_minibatches=2",
)
KINDS = {
    "groups": (ASYNCHRONOUS,),
    "critic and reference": (
        SYNCHRONOUS,
        "--config.actor.adv_estimator=gae",
        "--config.actor.reward_norm.mean_level=none",
        "--config.actor.reward_norm.std_level=none",
        "--config.critic.optimizer.lr=1e-3",
        "--config.actor.kl_ctl=0.1",
    ),
}
REWARD = "def reward(prompt, completion):\n    return sum(map(ord, completion)) % 7 / 7\n"  # any model differs in it
ENGINES = {"jax": "--config.allocation_mode=jax:d1", "fsdp": "--config.allocation_mode=jax:d1+fsdp:d1"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("own", "other"), [("jax", "fsdp"), ("fsdp", "jax")])
def test_a_step_made_again_on_either_engine(own, other, kind, tmp_path, monkeypatch):
    """Makes the last step of a run of 4 + 8 again, from the checkpoint at 9."""
    (tmp_path / "sevenths.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    workdir = tmp_path / "run"
    code, _, err = train(workdir, *SMALL, *KINDS[kind], ENGINES[own])
    assert code == 0, err
    (workdir / "checkpoints" / "12").rename(tmp_path / "last")
    last = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 12 and last["ppo_actor/update/grad_norm"] > 0
    code, out, err = replay(workdir, "--step=12")
    assert code == 0, err
    assert re.findall(r"^step (\d+): equal: all \d+ metrics to the bit$", out, re.MULTILINE) == ["10", "11", "12"], out
    code, out, err = replay(workdir, "--step=12", ENGINES[other])
    assert code == 0, out + err
    assert re.search(r"^step 12: equal within 3e-05: ", out, re.MULTILINE), out
