"""Training runs whose servers are killed: nothing lost, nothing twice, no token of wrong weights.

The servers are our own, in other processes. At a lag of 0 the behavior policy is the proximal one,
so the weight between them is 1 unless a token was made by other weights than its version says: a
restarted server has the initial ones.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rljax import loop
from rljax.engine import Engine
from rljax.engine.rank import LOOPBACK, free_port
from rljax.engines.http import health
from rljax.engines.http.client import HttpSampler
from rljax.engines.http.plugin import attach
from rljax.engines.http.remote import Remote, ServerLost, inspect
from rljax.testing.harness import MemorySink, Repeat, make_run
from tests.shared import REPOSITORY

DELAY = 0.02  # seconds a token at most, that a kill may fall between two
PROMPTS, EPOCHS = 16, 2  # 128 episodes, 16 a step
KILL_AT, HOLD_AT = 20, 80  # episodes begun when a server is killed, and when the run waits until it is back


class Servers:
    """Processes at fixed ports. Also `Replicas`, for a sampler that restarts them itself."""

    def __init__(self, model_dir: Path, count: int) -> None:
        self._model_dir = model_dir
        self.ports = [free_port(LOOPBACK) for _ in range(count)]
        self.processes = [self.start(port) for port in self.ports]
        for port in self.ports:
            answers(port)

    def start(self, port: int) -> subprocess.Popen[bytes]:
        program = Path(__file__).with_name("serve_fake.py")
        command = [sys.executable, program, self._model_dir, str(port), str(DELAY)]
        return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})

    def kill(self, index: int) -> None:
        self.processes[index].kill()
        self.processes[index].wait()

    def died(self, index: int) -> str | None:
        return None if self.processes[index].poll() is None else f"server {index} was killed"

    def restart(self, index: int) -> Remote:
        self.processes[index] = self.start(self.ports[index])
        return answers(self.ports[index])

    def version(self, index: int) -> int:
        """Returns the version of the weights; -1 while the server doesn't answer."""
        try:
            return inspect(f"http://127.0.0.1:{self.ports[index]}", None)[1]
        except ServerLost:
            return -1

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def answers(port: int) -> Remote:
    """Waits until a server answers."""
    for _ in range(600):
        try:
            base = f"http://127.0.0.1:{port}"
            return Remote(base, inspect(base, None)[0], None)
        except ServerLost:
            subprocess.run(["sleep", "0.05"], check=True)
    raise AssertionError("the server did not start")


class Killing(Repeat):
    """Kills server 0 while an episode is being generated.

    Another process restarts it, or the run does, or nothing. If it is restarted, the run doesn't
    end before the server has taken part again.
    """

    def __init__(self, servers: Servers, restarted_by: str) -> None:
        super().__init__()
        self._servers, self._restarted_by, self._begun = servers, restarted_by, 0
        self.back: asyncio.Task[None] | None = None

    async def episode(self, sampler, prompt, params, seed):
        self._begun += 1
        if self._begun == KILL_AT:
            self.back = asyncio.create_task(self._kill())
        if self._begun > HOLD_AT:
            await self.back
        return await super().episode(sampler, prompt, params, seed)

    async def _kill(self) -> None:
        await asyncio.sleep(DELAY)
        await asyncio.to_thread(self._servers.kill, 0)
        if self._restarted_by == "somebody else":
            await asyncio.sleep(0.3)
            await asyncio.to_thread(self._servers.restart, 0)
        while self._restarted_by != "nobody" and self._servers.version(0) < 1:
            await asyncio.sleep(0.05)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(health, "INTERVAL", 0.5)


@pytest.mark.parametrize(
    ("count", "restarted_by", "max_lag"),
    [
        (1, "somebody else", 0),
        (1, "the run", 0),
        (2, "nobody", 0),
        (2, "somebody else", 0),
        (2, "the run", 0),
        (1, "the run", 2),
    ],
)
def test_a_server_killed_mid_run_costs_no_trajectory_and_never_serves_old_weights(tmp_path, count, restarted_by, max_lag):
    sinks: list[MemorySink] = []
    overrides = {"total_train_epochs": EPOCHS, "rollout.max_head_offpolicyness": max_lag, "actor.optimizer.lr": 0.5}
    run = make_run(
        tmp_path,
        overrides,
        n_prompts=PROMPTS,
        in_memory=False,
        sink=lambda step: sinks.append(MemorySink(step)) or sinks[-1],
    )
    servers = Servers(tmp_path / "model", count)
    try:
        workflow = Killing(servers, restarted_by)
        sampler = sampler_of(run.config, servers, ours=restarted_by == "the run")
        learner = run.engine.learner
        run = dataclasses.replace(run, engine=Engine(sampler, learner, None, tmp_path / "publish"), workflow=workflow)
        outcome = loop.train(run)
        if restarted_by == "somebody else":  # the run's own have ended with it
            assert servers.version(0) == outcome.version
    finally:
        servers.close()
    steps = PROMPTS * EPOCHS // 4
    assert outcome == loop.Outcome(steps, steps, finished=True)
    assert learner.trained.keys() == {f"{epoch}/{index}" for epoch in range(EPOCHS) for index in range(PROMPTS)}
    assert all(len(trained) == 1 for trained in learner.trained.values())
    assert learner.most_lag <= max_lag
    lines = sinks[-1].steps
    assert list(lines) == list(range(1, steps + 1))
    assert sum(line["rollout/dropped"] for line in lines.values()) == 0
    assert all(np.isfinite(value) for line in lines.values() for value in line.values())
    if max_lag == 0:  # else a group that waited for a server may have become too old, and was generated again
        assert sum(line["rollout/stale"] + line["rollout/again"] for line in lines.values()) == 0
        weights = [line[f"ppo_actor/update/behave_imp_weight/{end}"] for line in lines.values() for end in ("min", "max")]
        np.testing.assert_allclose(weights, 1.0, atol=1e-5)
    assert not list(tmp_path.glob("publish/*"))


def sampler_of(config, servers: Servers, *, ours: bool) -> HttpSampler:
    if ours:
        return HttpSampler([answers(port) for port in servers.ports], version=0, replicas=servers)
    address = ",".join(f"127.0.0.1:{port}" for port in servers.ports)
    return attach(dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, addr=address)))
