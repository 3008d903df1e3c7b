"""doctor --rescore and --critic, on recorded runs of the fake engine."""

import json
from pathlib import Path

import pytest

from tests.unit.experiments.test_train import binary, finish, train

ASYNCHRONOUS = "--config.rollout.max_head_offpolicyness=2"
CRITIC = (
    "--config.actor.adv_estimator=gae",
    "--config.actor.reward_norm.mean_level=none",
    "--config.actor.reward_norm.std_level=none",
    "--config.reward.name=sevenths:reward",
)
REWARD = "def reward(prompt, completion):\n    return sum(map(ord, completion)) % 7 / 7\n"


def doctor(workdir: Path, *arguments: str) -> tuple[int, str, str]:
    return finish(binary("doctor", f"--workdir={workdir}", *arguments))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with a critic whose rate is far too low for it."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "sevenths.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        code, _, err = train(
            folder / "run", ASYNCHRONOUS, *CRITIC, "--config.critic.optimizer.lr=1e-6", "--config.saver.keep_last=9"
        )
        assert code == 0, err
        yield folder / "run"


def test_rescore_says_that_sampler_and_learner_agree(run):
    code, out, err = doctor(run, "--rescore")
    assert code == 0, err
    assert out.splitlines()[-1].startswith("verdict: they hardly differ: ")


def test_rescore_at_another_temperature_of_the_learner_says_that_they_disagree(run):
    code, out, _ = doctor(run, "--rescore", "--json", "--config.gconfig.temperature=0.01")
    found = json.loads(out)["rescore"]
    assert code == 2 and found["verdict"] == "sampler and learner disagree"
    assert sum(figures["tokens"] for figures in found["by_lag"]) > 0 == found["unreached_tokens"]


def test_critic_says_whether_it_can_fit(run):
    """The fake critic sees one token, which is not enough."""
    code, out, _ = doctor(run, "--critic", "--passes=20", "--step=34", "--config.critic.optimizer.lr=0.02")
    assert code == 2
    assert [line.split(",")[1].split(":")[0] for line in out.splitlines() if line.startswith("step 34")] == [
        " critic.optimizer.lr 0.02", " critic.optimizer.lr 0.2", " critic.optimizer.lr 0.002",
    ]  # fmt: skip
    assert out.splitlines()[-1].startswith("verdict: the critic can not fit this batch")


def test_a_run_without_critic_or_without_records_is_one_line(run, tmp_path):
    code, _, err = doctor(run, "--critic", "--config.actor.adv_estimator=grpo")
    assert code == 1 and err == f"error: --critic: the run in {run} has no critic (actor.adv_estimator=gae has one)\n"
    code, _, err = doctor(tmp_path, "--rescore")
    assert code == 1 and err.startswith(f"error: --workdir: {tmp_path} has no flight/") and err.count("\n") == 1
