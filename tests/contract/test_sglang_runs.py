"""Training runs by the command line, with real SGLang servers on the CPU.

At a lag of 0 the proximal policy is the one that sampled, so `behave_imp_weight` is exp of the
difference between the learner's log-probs and the server's. In float32 it is 1 up to rounding, and
only if the server samples from exactly the learner's weights: at each step the tiny models here
change by several times that bound.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from rljax.testing.models import make_model
from tests.other_families import GATED, made
from tests.shared import REPOSITORY, convert_smollm2, sglang_flags, shared

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MARK = "RLJAX_TEST_RUN"  # in the environment of a run and of all it starts
UPDATE = "ppo_actor/update"
EXACT = 2e-3  # float32: |behave_imp_weight - 1| of any token
# bfloat16 at the server, float32 at the learner: of any token, and of the mean over a batch. Noise of a log-prob is about
# 0.05 nats there, and 0.3 on the rarest token of a few hundred.
NOISE, MEAN_NOISE = 0.5, 0.03


def command(workdir: Path, config: str, flags: dict[str, Any]) -> list[str]:
    servers = sglang_flags()
    arguments = (*servers.pop("sglang.extra_args"), *flags.get("sglang.extra_args", ()))
    settings = servers | {
        "sglang.log_dir": workdir / "servers",
        "stats_logger.live": False,
        "stats_logger.samples_per_step": 1000,
        "saver.export_final": False,
        "recover.hang_timeout": 600.0,
    }
    settings |= flags | {"sglang.extra_args": arguments}
    program = [sys.executable, "-m", "experiments.train", f"--config=configs/{config}.py", f"--workdir={workdir}"]
    return program + [f"--config.{key}={value}" for key, value in settings.items()]


def started(workdir: Path, config: str, flags: dict[str, Any]) -> subprocess.Popen[str]:
    env = os.environ | {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", MARK: str(workdir)}
    return subprocess.Popen(
        command(workdir, config, flags), cwd=REPOSITORY, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finished(process: subprocess.Popen[str], workdir: Path, *, broken: bool = False) -> list[dict[str, float]]:
    """Returns the metrics of a run that succeeds.

    No publish may have been repeated, unless one was broken.
    """
    out = process.communicate()[0]
    assert process.returncode == 0, out
    assert not processes(workdir), out
    assert broken or "through a directory" not in out, out
    return metrics(workdir)


def metrics(workdir: Path) -> list[dict[str, float]]:
    file = workdir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def processes(workdir: Path) -> list[psutil.Process]:
    """Lists all processes of the run, servers and their reapers included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(workdir) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def servers_of(workdir: Path) -> list[psutil.Process]:
    """Lists the servers: the children of the reapers."""
    reapers = [process for process in processes(workdir) if any("reaper.py" in part for part in process.cmdline())]
    return [child for reaper in reapers for child in reaper.children()]


def check(lines: list[dict[str, float]], steps: int, *, lag: int) -> None:
    """Checks that each step is there once, all metrics are finite, and no token is too old."""
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for line in lines:
        assert all(math.isfinite(value) for value in line.values()), line
        assert line["rollout/staleness/max"] <= lag
        assert line[f"{UPDATE}/skipped"] == 0
        assert line[f"{UPDATE}/grad_norm"] > 0  # what is published is not what was there before


def trained(workdir: Path) -> Counter[tuple[int, str]]:
    """Counts the samples of each prompt that each step was trained on."""
    rows = [json.loads(line) for line in (workdir / "samples.jsonl").read_text().splitlines()]
    return Counter((row["step"], row["uid"]) for row in rows)


def check_once(workdir: Path, steps: int, prompts: int, samples: int) -> None:
    """Checks that each prompt has all its samples in one step, and none in another."""
    found = trained(workdir)
    assert len(found) == steps * prompts
    assert len({uid for _, uid in found}) == steps * prompts
    assert set(found.values()) == {samples}


# A tiny model in float32: seconds a step, and exact


TINY = {
    "actor.init_from_scratch": False,
    "actor.dtype": "float32",
    "actor.optimizer.lr": 1e-2,
    "actor.optimizer.lr_scheduler_type": "constant",
    "actor.ppo_n_minibatches": 1,
    "warmup.steps": 0,
    "train_dataset.batch_size": 4,
    "gconfig.n_samples": 4,
    "reward.name": "tests.contract.sglang_reward:reward",
    "sglang.dtype": "float32",
    "sglang.context_length": 512,
    "sglang.extra_args": ("--max-total-tokens", "4096", "--max-running-requests", "16"),
    "evaluator.freq_steps": None,
    "saver.freq_steps": None,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict[str, Any]:
    model = make_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=1024, initializer_range=0.1)
    return TINY | {"actor.path": model}


WAYS = [
    ("sglang:d1+jax:d1", "directory", False),
    ("sglang:d1|jax:d1", "directory", True),
    ("sglang:d1+fsdp:d1", "directory", False),
    ("sglang:d1+fsdp:d1", "gloo", False),
    ("sglang:d1|fsdp:d1", "ipc", True),
]


@pytest.mark.parametrize(("mode", "transport", "lends"), WAYS)
def test_servers_sample_from_the_very_weights_of_the_learner(tmp_path, tiny, mode, transport, lends):
    """Holds for every transport, and for servers that release their memory during the update."""
    steps = 4
    flags = tiny | {
        "allocation_mode": mode,
        "sglang.transport": transport,
        "sglang.release_memory": lends,
        "rollout.max_head_offpolicyness": 0,
        "total_train_steps": steps,
        "gconfig.max_new_tokens": 24,
    }
    lines = finished(started(tmp_path, "quickstart", flags), tmp_path)
    check(lines, steps, lag=0)
    check_once(tmp_path, steps, 4, 4)
    weights = [line[f"{UPDATE}/behave_imp_weight/{end}"] for line in lines for end in ("min", "max")]
    assert max(abs(weight - 1) for weight in weights) < EXACT, weights


@pytest.mark.parametrize(
    ("family", "settings", "transport"),
    [("Phi3", {}, "gloo"), ("Olmo2", {}, "directory"), ("Mistral", {"head_dim": 8}, "gloo")],
)
def test_servers_sample_from_the_very_weights_of_another_family(tmp_path, family, settings, transport):
    """Holds for families that rljax has no implementation of: SGLang and transformers have one each."""
    made(family, GATED | settings, tmp_path / "model")
    steps = 3
    flags = TINY | {
        "actor.path": tmp_path / "model",
        "allocation_mode": "sglang:d1+fsdp:d1",
        "sglang.transport": transport,
        "rollout.max_head_offpolicyness": 0,
        "total_train_steps": steps,
        "gconfig.max_new_tokens": 24,
    }
    lines = finished(started(tmp_path / "run", "quickstart", flags), tmp_path / "run")
    check(lines, steps, lag=0)
    weights = [line[f"{UPDATE}/behave_imp_weight/{end}"] for line in lines for end in ("min", "max")]
    assert max(abs(weight - 1) for weight in weights) < EXACT, weights


@pytest.mark.parametrize(("servers", "learner", "transport"), [(1, "jax", "directory"), (2, "fsdp", "gloo")])
def test_a_killed_server_costs_nothing_and_comes_back_with_the_present_weights(tmp_path, tiny, servers, learner, transport):
    """Kills a server by SIGKILL in the middle of a step.

    The run waits for its only server; of two, the other one takes over until it is back.
    """
    flags = tiny | {
        "allocation_mode": f"sglang:d{servers}+{learner}:d1",
        "sglang.transport": transport,
        "rollout.max_head_offpolicyness": 0,
        "total_train_steps": 1000,  # it is stopped, two steps after the server is back
        "gconfig.max_new_tokens": 120,
        "actor.mb_spec.max_tokens_per_row": 512,
    }
    process = started(tmp_path, "quickstart", flags)
    try:
        wait_for(lambda: len(metrics(tmp_path)) >= 2, process)
        servers_of(tmp_path)[0].kill()
        wait_for(lambda: starts(tmp_path, servers) > servers, process)
        back = len(metrics(tmp_path))
        wait_for(lambda: len(metrics(tmp_path)) >= back + 2, process)
        process.terminate()
        lines = finished(process, tmp_path, broken=True)
    finally:
        process.kill()
    check(lines, len(lines), lag=0)
    check_once(tmp_path, len(lines), 4, 4)
    weights = [line[f"{UPDATE}/behave_imp_weight/{end}"] for line in lines for end in ("min", "max")]
    assert max(abs(weight - 1) for weight in weights) < EXACT, weights


def starts(workdir: Path, servers: int) -> int:
    """Counts how often a server became ready."""
    logs = [workdir / "servers" / f"sglang-{index}.log" for index in range(servers)]
    return sum(log.read_text().count("The server is fired up") for log in logs if log.exists())


# SmolLM2-135M-Instruct on GSM8K, asynchronously: what a user runs, as small as it goes


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    return convert_smollm2(tmp_path_factory.mktemp("models") / "smollm2")


@pytest.mark.parametrize(
    ("mode", "transport"),
    [
        pytest.param("sglang:d1+fsdp:d1", "gloo", marks=pytest.mark.show),
        pytest.param("sglang:d1+fsdp:d1", "directory", marks=pytest.mark.show),
        ("sglang:d1+jax:d1", "directory"),
    ],
)
def test_smollm2_takes_asynchronous_steps_on_gsm8k(tmp_path, smollm2, mode, transport):
    """Takes two steps at a lag of at most 1.

    Log-probs of a bfloat16 server agree with those of a float32 learner.
    """
    flags = {
        "allocation_mode": mode,
        "sglang.transport": transport,
        "sglang.dtype": "bfloat16",
        "sglang.context_length": 512,
        "sglang.extra_args": ("--max-total-tokens", "8192", "--max-running-requests", "8"),
        "actor.path": smollm2,
        "actor.entropy_coef": 1e-3,  # most groups have equal rewards, and give no gradient
        "actor.optimizer.lr": 1e-6,  # Adam's first step at 1e-5 moves single log-probs by 0.5 nats, more than the noise
        "actor.mb_spec.max_tokens_per_row": 512,
        "train_dataset.path": shared("data/gsm8k"),
        "train_dataset.batch_size": 2,
        "rollout.max_head_offpolicyness": 1,
        "gconfig.n_samples": 2,
        "gconfig.max_new_tokens": 32,
        "total_train_steps": 2,
    }
    lines = finished(started(tmp_path, "smollm2_gsm8k", flags), tmp_path)
    check(lines, 2, lag=1)
    check_once(tmp_path, 2, 2, 2)
    assert {int(line["rollout/staleness/max"]) for line in lines} == {0, 1}
    for line in lines:
        low, mean, high = (line[f"{UPDATE}/behave_imp_weight/{name}"] for name in ("min", "avg", "max"))
        assert math.exp(-NOISE) < low <= high < math.exp(NOISE) and abs(mean - 1) < MEAN_NOISE, (low, mean, high)


def wait_for(happened: Any, process: subprocess.Popen[str], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)
