"""The engine of docs/engines.md: installed outside the tree, under the samplers' contract, in a
run with its own setting.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import REPOSITORY

PACKAGE = REPOSITORY / "tests/third_party/rljax_bigram"
PAGE = REPOSITORY / "docs/engines.md"
WEIGHT = "ppo_actor/update/behave_imp_weight"

CONFIG = """
from rljax.configs import quickstart

def get_config():
    config = quickstart.get_config()
    config.allocation_mode = "bigram:d1+fake:d1"
    config.rollout.max_head_offpolicyness = 0
    config.warmup.steps = 8
    config.warmup.optimizer.lr = 0.5
    config.total_train_steps = 15
    config.train_dataset.batch_size = 4
    config.gconfig.n_samples = 4
    config.actor.optimizer.lr = 0.2
    config.reward.name = "sevens:reward"
    config.saver.freq_steps = None
    config.evaluator.freq_steps = None
    config.reward.workers = 1
    return config
"""

REWARD = """
def reward(prompt, completion):
    return completion.count("7") / max(len(completion), 1)
"""  # what a table of bigrams can learn


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder into which pip has installed a copy of the package, with no index and nothing of
    the tree in it.
    """
    source, target = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("target")
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("BUILD", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    done = subprocess.run([*pip, f"--target={target}", str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [path for path in target.iterdir() if path.name == "rljax"]
    return target


def python(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), str(REPOSITORY), str(cwd)])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


def train(installed: Path, workdir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    config = workdir.with_suffix(".py")
    config.write_text(CONFIG)
    (workdir.parent / "sevens.py").write_text(REWARD)
    flags = [f"--config={config}", f"--workdir={workdir}", *(f"--config.{override}" for override in overrides)]
    return python(installed, workdir.parent, "-m", "experiments.train", *flags)


def test_the_page_shows_the_package_as_it_is():
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    for name in ("pyproject.toml", "rljax_bigram.py", "test_rljax_bigram.py"):
        assert (PACKAGE / name).read_text() in blocks, name
    assert len((PACKAGE / "rljax_bigram.py").read_text().splitlines()) < 80


def test_the_installed_engine_keeps_the_contract_of_samplers(installed, tmp_path):
    shutil.copy(PACKAGE / "test_rljax_bigram.py", tmp_path)
    done = python(installed, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_rljax_bigram.py")
    assert done.returncode == 0, done.stdout + done.stderr
    passed, skipped = (int(re.search(rf"(\d+) {what}", done.stdout)[1]) for what in ("passed", "skipped"))
    assert passed >= 20 and skipped < passed / 3, done.stdout


@pytest.mark.parametrize("uniform", [0.0, 0.5])
def test_a_run_trains_with_it_and_samples_as_its_setting_says(installed, tmp_path, uniform):
    """With a share u of the uniform distribution, p / ((1 - u) p + u / V) is 1 at u = 0, and at
    most 1 / (1 - u).
    """
    done = train(installed, tmp_path / "run", f"bigram.uniform={uniform}")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "config.json").read_text())["bigram"] == {"uniform": uniform}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if f"{WEIGHT}/avg" in line]
    assert len(trained) == 15
    rewards = [line["rollout/reward/avg"] for line in trained]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, rewards
    for line in trained:
        low, high = line[f"{WEIGHT}/min"], line[f"{WEIGHT}/max"]
        if uniform:
            assert low < 0.9 and 1.1 < high < 1 / (1 - uniform) + 1e-5
        else:
            assert 1 - 1e-5 < low <= high < 1 + 1e-5


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("bigram.uniform=2", "bigram.uniform: must be in [0, 1], not 2"),
        ("bigram.unifrom=0.1", "bigram.unifrom: no such key (did you mean uniform"),
        ("evaluator.top_k=5", "allocation_mode: the engine bigram has no stop, top_p or top_k"),
        ("allocation_mode=fake:d1+bigram:d1", "bigram cannot learn"),
    ],
)
def test_bad_input_is_refused_in_a_line(installed, tmp_path, override, said):
    done = train(installed, tmp_path / "run", override)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
