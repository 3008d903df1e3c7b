"""A whole run on the fake engine in milliseconds: task, workflow, and a learner with a memory.

    run = make_run(workdir, {"rollout.max_head_offpolicyness": 2}, n_prompts=12)
    outcome = loop.train(run)
    run.engine.learner.trained        # uid -> the steps that trained on it

The task: say the last token of the prompt again, then stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.batching.batch import Batch
from rljax.config import io as config_io
from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.configs import base
from rljax.engine import Engine, ExportToSampler, Generator
from rljax.engines.fake import model
from rljax.engines.fake.learner import FakeLearner
from rljax.engines.fake.sampler import FakeSampler, Trouble
from rljax.errors import RewardError
from rljax.loop import Labeled, Run
from rljax.metrics.guardrails import Event
from rljax.metrics.histogram import Histogram
from rljax.metrics.mean import Mean, flatten
from rljax.rollout.evaluation import Evaluation
from rljax.rollout.producer import GroupRunner
from rljax.rollout.trajectories import supervised, trajectory_of
from rljax.sinks import Status
from rljax.types import Group, Prompt, Request, SamplingParams, Trajectory
from rljax.workers.client import WorkerParts, work
from rljax.workers.server import WorkerServer

TOKEN = "between us"
IN_MEMORY = ExportToSampler("memory", Pool("fake"))
STOP, EPOCHS, HIGH, LOW = 0, 40, 40, 16  # the vocabulary: the stop token, then those that spell an epoch and an index
VOCAB = 1 + EPOCHS + HIGH + LOW


class Numbers:
    """Prompts "<epoch>/<index>", in order."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._position = 0

    def __next__(self) -> Prompt:
        epoch, index = divmod(self._position, self._length)
        self._position += 1
        return Prompt(f"{epoch}/{index}", ({"role": "user", "content": str(index)},), {"index": index})

    def __len__(self) -> int:
        return self._length

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._position = state["position"]


def spell(prompt: Prompt) -> list[int]:
    """Spells a prompt's uid in three tokens."""
    epoch, index = map(int, prompt.uid.split("/"))
    return [1 + epoch, 1 + EPOCHS + index // LOW, 1 + EPOCHS + HIGH + index % LOW]


def read_back(token_ids: np.ndarray) -> str:
    """Reads the uid that `spell` spelled."""
    epoch, high, low = (int(t) for t in token_ids[:3])
    return f"{epoch - 1}/{(high - 1 - EPOCHS) * LOW + low - 1 - EPOCHS - HIGH}"


def example(prompt: Prompt) -> Trajectory:
    """Returns the prompt with the right answer."""
    prompt_ids = spell(prompt)
    return supervised(prompt_ids, [prompt_ids[-1], STOP])


class Repeat:
    """Workflow of the task.

    The reward is half a point for the right first token, half for stopping after it, and a tenth
    for odd tokens, so that rewards of a group are never all equal.
    """

    def __init__(self, trouble: Trouble | None = None) -> None:
        self._trouble = trouble

    async def episode(self, generator: Generator, prompt: Prompt, params: SamplingParams, seed: int) -> Trajectory | None:
        prompt_ids = spell(prompt)
        request = Request(f"{prompt.uid}#{seed}", np.array(prompt_ids, np.int32), params, seed)
        completion = await generator.generate(request)
        if self._trouble and self._trouble.random.random() < self._trouble.failure_rate:
            raise RewardError(f"no reward for {prompt.uid}")
        right = float(completion.token_ids[0] == prompt_ids[-1])
        brief = right * (len(completion.token_ids) == 2 and completion.token_ids[1] == STOP)
        odd = float(np.mean(completion.token_ids % 2))
        components = {"right": right, "brief": float(brief), "odd": odd}
        return trajectory_of(prompt_ids, completion, (right + brief) / 2 + odd / 10, components)


class RememberingLearner(FakeLearner):
    """A learner that records which prompts it was trained on at which step, and the largest lag.

    Its checkpoints have the record too.
    """

    def __init__(self, config: Config, model_dir: Path) -> None:
        super().__init__(config, model_dir)
        self.trained: dict[str, list[int]] = {}
        self.most_lag = 0
        self._per_step = config.actor.ppo_n_minibatches

    def update(self, batch: Batch) -> dict[str, Mean]:
        step = self._adam["policy"].steps // self._per_step
        self.most_lag = max(self.most_lag, step - int(batch.versions[batch.loss_mask].min()))
        rows, starts = np.nonzero((batch.segment_ids > 0) & (batch.positions == 0))
        for uid in {read_back(batch.token_ids[row, start:]) for row, start in zip(rows, starts, strict=True)}:
            steps = self.trained.setdefault(uid, [])
            if step not in steps or self._per_step == 1:
                steps.append(step)
        return super().update(batch)

    def save(self, directory: Path) -> None:
        super().save(directory)
        (directory / "trained.json").write_text(json.dumps({"trained": self.trained, "most_lag": self.most_lag}))

    def restore(self, directory: Path) -> None:
        super().restore(directory)
        memory = json.loads((directory / "trained.json").read_text())
        self.trained, self.most_lag = memory["trained"], memory["most_lag"]


class MemorySink:
    """A sink in memory; lines of metrics also go to a file if there is one."""

    def __init__(self, first_step: int = 0, path: Path | None = None) -> None:
        self.first_step = first_step
        self.steps: dict[int, dict[str, float]] = {}
        self.recorded: dict[int, Mapping[str, Histogram]] = {}
        self.samples: list[tuple[int, str]] = []
        self.groups: list[tuple[int, Group, Sequence[np.ndarray]]] = []
        self.evaluations: list[tuple[int, str, str]] = []
        self.events: list[Event] = []
        self.statuses: list[Status] = []
        self._path = path

    def write(self, step: int, metrics: Mapping[str, Mean]) -> None:
        assert step >= max(self.steps, default=0), "steps never go back"
        self.steps.setdefault(step, {}).update(flatten(metrics))
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"step": step} | self.steps[step]) + "\n")

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self.recorded[step] = histograms

    def sample(self, step: int, uid: str, trajectory: Trajectory, advantage: np.ndarray) -> None:
        self.samples.append((step, uid))

    def group(self, step: int, group: Group, advantages: Sequence[np.ndarray]) -> None:
        self.groups.append((step, group, advantages))

    def evaluated(self, step: int, name: str, uid: str, trajectory: Trajectory) -> None:
        self.evaluations.append((step, name, uid))

    def event(self, event: Event) -> None:
        self.events.append(event)

    def status(self, status: Status) -> None:
        self.statuses.append(status)

    def close(self) -> None:
        """Does nothing: no file stays open."""


def make_config(overrides: Mapping[str, Any] | None = None) -> Config:
    """Makes a small and fast config; synchronous unless overridden."""
    config = base.get_config()
    settings: dict[str, Any] = {
        "allocation_mode": "fake:d1",
        "gconfig.n_samples": 4,
        "gconfig.max_new_tokens": 4,
        "rollout.max_head_offpolicyness": 0,
        "train_dataset.batch_size": 4,
        "train_dataset.path": "task:trial",
        "valid_dataset.path": "task:trial",
        "actor.optimizer.lr": 0.05,
        "actor.mb_spec.max_tokens_per_row": 32,
        "saver.freq_steps": None,
        "saver.export_final": False,
        "recover.hang_timeout": 60.0,
    }
    with config.ignore_type():
        for key, value in (settings | dict(overrides or {})).items():
            section, _, name = key.rpartition(".")
            node = config
            for part in filter(None, section.split(".")):
                node = node[part]
            node[name] = value
    return config_io.resolve(config_io.from_dict(config))


def make_run(
    workdir: Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    n_prompts: int = 12,
    trouble: Trouble | None = None,
    workflow: Any = None,
    accept: Callable[[Group], bool] = lambda group: True,
    sink: Callable[[int], MemorySink] = MemorySink,
    in_memory: bool = True,
    by_workers: bool = False,
) -> Run:
    """Makes a run of the task over n_prompts per epoch. The same workdir again resumes.

    Args:
      in_memory: publish weights as arrays; else through a directory.
      by_workers: generate in workers: those that attach to the address in WORKDIR/workers.json, as
        `worker` does.
    """
    config = make_config(overrides)
    model_dir = workdir / "model"
    if not model_dir.exists():
        model.make_model(model_dir, VOCAB)
    params = SamplingParams(config.gconfig.max_new_tokens, temperature=config.gconfig.temperature, stop_token_ids=(STOP,))
    workflow = workflow or Repeat(trouble)
    sampler, learner = FakeSampler(config, model_dir, trouble), RememberingLearner(config, model_dir)
    validation = Numbers(n_prompts)
    scratch, address_file = workdir / "server", workdir / "workers.json"
    return Run(
        config=config,
        engine=Engine(sampler, learner, IN_MEMORY if in_memory else None, workdir / "publish"),
        prompts=Numbers(n_prompts),
        workflow=workflow,
        params=params,
        open_sinks=sink,
        workdir=workdir,
        accept=accept,
        labeled=Labeled(Numbers(n_prompts), example),
        evaluations=[Evaluation([next(validation) for _ in range(n_prompts)], Repeat(), params, 1)],
        worker_server=WorkerServer(config, model_dir, token=TOKEN, scratch=scratch, address_file=address_file)
        if by_workers
        else None,
    )


async def worker(
    workdir: Path,
    *,
    address: str = "",
    own_sampler: bool = False,
    workflow: Any = None,
    trouble: Trouble | None = None,
    **options: Any,
) -> None:
    """Runs a worker for the run in workdir until the run ends; waits first until the run listens.

    `options` are those of `rljax.workers.client.work`.

    Args:
      address: the run's address, if known; else it is read from WORKDIR/workers.json.
    """
    told = workdir / "workers.json"
    while not address:
        with contextlib.suppress(OSError, ValueError):
            address = json.loads(told.read_text())["address"]
        await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def build(
        config: Config, tokenizer_dir: Path, model_dir: Path | None, remote: Generator
    ) -> AsyncIterator[WorkerParts]:
        params = SamplingParams(config.gconfig.max_new_tokens, temperature=config.gconfig.temperature, stop_token_ids=(STOP,))
        mine = FakeSampler(config, model_dir, trouble) if model_dir else None
        makes = workflow or Repeat(trouble)
        yield WorkerParts(
            GroupRunner(makes, mine or remote, params, config.gconfig.n_samples, config.seed, lambda group: True), mine
        )

    await work(lambda: (address, TOKEN), build, own_sampler=own_sampler, **options)


async def settle() -> None:
    """Lets every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)
