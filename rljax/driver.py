"""Rollouts from a script: one batch per call, in the script's own thread.

    with Driver.connect(config, model_dir) as driver:     # rollout.addr: a server that runs already
        loader = driver.open_prompts(config.train_dataset)
        workflow = MyWorkflow(driver.tokenizer, driver.rewards)
        for _ in range(10):
            groups = driver.prepare_batch(loader, workflow, should_accept_fn=mixed_rewards)
            ...                                            # a debugger, a notebook cell, a learner

    prepare_batch   the next consumer_batch_size groups; later ones are begun meanwhile
    rollout_batch   one group per given record
    submit, wait    the same in two calls, for several workflows at once

Each call has the workflow and the filter that it is given. The event loop runs while a call does,
and in the thread that called: a breakpoint in a workflow stops in the script's terminal, and
between two calls nothing moves but the sampler. It is the producer and the buffer of a run
(rollout/producer.py, rollout/buffer.py) with the script in the learner's place.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import itertools
import logging
from collections.abc import Coroutine, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from rljax import engine
from rljax.compat import areal_workflow
from rljax.config import checks as config_checks
from rljax.config import io as config_io
from rljax.config.schema import Config, DatasetConfig
from rljax.data import PromptSource, open_prompts
from rljax.data.given_records import Cycle, prompt_of
from rljax.engine import Sampler, WeightsInDirectory
from rljax.errors import UserError
from rljax.hf.spec import read_vocab_size
from rljax.hf.tokenizer import Tokenizer, load_tokenizer
from rljax.metrics.accumulator import Accumulator
from rljax.rewards import RewardPool
from rljax.rewards.check import Records
from rljax.rollout import dump
from rljax.rollout.buffer import Buffer, Limits, Ticket
from rljax.rollout.journal import Journals
from rljax.rollout.producer import Filter, GroupRunner, Producer, RetryingGenerator
from rljax.rollout.tracker import PromptTracker
from rljax.rollout.workflow import Workflow
from rljax.sanity.trial import checked, try_filter
from rljax.types import Group, Prompt, SamplingParams
from rljax.workflows import build_workflow, find_filter, sampling_params, scores_by_rewards, tools_of

T = TypeVar("T")
Record = Prompt | Mapping[str, Any]  # a mapping has the columns of a format of rljax/data/formats.py

SENDING = 0.01  # seconds for requests to leave, so that the sampler works on those of later batches between two calls

log = logging.getLogger(__name__)


class Driver:
    """Generates groups for a script. Its methods block, and belong to one thread.

    Attributes:
      tokenizer, rewards, params: what workflows are made of; the rewards and the sampling
        parameters are those of the config.
    """

    def __init__(self, config: Config, sampler: Sampler, tokenizer: Tokenizer, *, vocab_size: int | None = None) -> None:
        """Starts the reward processes. `connect` makes the sampler and the tokenizer of a config.

        Args:
          config: resolved (rljax/config/io.py).
          sampler: belongs to the driver from now on, which closes it.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.rewards = RewardPool(config.reward)
        self.params: SamplingParams = sampling_params(config.gconfig, tokenizer)
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._loop = asyncio.new_event_loop()
        self._streams: dict[Hashable, _Stream] = {}
        self._sources: dict[int, tuple[Any, Any]] = {}  # by id of a dataloader: the dataloader, its prompts
        self._submitted: dict[int, asyncio.Task[Group | None]] = {}  # by number, what `wait` has not returned
        self._numbers = itertools.count()
        self._room = asyncio.Semaphore(config.max_in_flight)
        self._trials = contextlib.AsyncExitStack()  # a trial of the rewards that goes on
        self._tried: set[Hashable] = set()  # the rewards, and the code of filters, once they were
        self._run(self.rewards.start())

    @classmethod
    def connect(cls, config: Any, model_dir: str | Path | None = None) -> Self:
        """Makes a driver of a config, with the server at `rollout.addr`, or a sampler of its own.

        Args:
          config: a `Config`, or what a config file's `get_config()` returns.
          model_dir: directory with the model's tokenizer and config.json; None for `actor.path`.

        Raises:
          UserError: the config is wrong, or no server answers.
        """
        config = config_io.resolve(config if isinstance(config, Config) else config_io.from_dict(config))
        config_checks.check_values(config)
        directory = model_dir or config.actor.path
        if not directory:
            raise UserError("actor.path: empty, and no model_dir is given (the directory of the server's model)")
        pools = engine.allocate(config)
        pool = engine.require_sampler(pools)
        engine.check(config, dataclasses.replace(pools, learner=None))
        engine.prepare(dataclasses.replace(pools, learner=None))
        tokenizer = load_tokenizer(directory, config.rollout)
        sampler = engine.make_lone_sampler(config, pool, Path(directory))
        return cls(config, sampler, tokenizer, vocab_size=read_vocab_size(directory))

    @property
    def version(self) -> int:
        """Version of the sampler's weights."""
        return self._sampler.version

    def open_prompts(self, dataset: DatasetConfig | None = None) -> PromptSource:
        """Opens a dataset, by default `train_dataset`, as a dataloader. Raises UserError."""
        return open_prompts(
            dataset or self.config.train_dataset,
            seed=self.config.seed,
            tokenizer=self.tokenizer,
            added_tools=tools_of(self.config.rollout),
        )

    def prepare_batch(
        self,
        dataloader: Iterable[Any],
        workflow: Any,
        should_accept_fn: Filter | str | None = None,
    ) -> list[Group]:
        """Returns the next `consumer_batch_size` groups that the filter accepts, oldest first.

        Groups of later batches are begun meanwhile, as far as `rollout.max_head_offpolicyness` and
        `rollout.max_concurrent_rollouts` allow. They belong to this dataloader, workflow and
        filter: a call with others begins its own, and a later call with these gets them. No token
        is more than `max_head_offpolicyness` versions older than the sampler's weights.

        Args:
          dataloader: a `PromptSource`, or an iterable over records or lists of records, which
            begins again after its end.
          workflow: an object with `episode`, or AReaL's `arun_episode`, or a name as
            `rollout.workflow` has it.
          should_accept_fn: a function of a group, plain or async, or a name.

        Raises:
          TooManyFailures: `recover.max_consecutive_failures` groups failed in a row; its cause is
            the first error.
          UserError: the dataloader is empty, the filter rejected too many groups in a row, or the
            rewards fail on records of it, or the filter on a made-up group, before anything is
            begun.
        """
        accept = self._filter(should_accept_fn)
        # A lambda is another object in each call, with the same code
        key = (id(dataloader), workflow if isinstance(workflow, str) else id(workflow), getattr(accept, "__code__", accept))
        if key not in self._streams:
            runner, source = self._runner(workflow, accept), self._source(dataloader)
            self._try(runner, source)
            self._streams[key] = _Stream(self.config, source, runner, self._sampler.version, keep=workflow)
        stream = self._streams[key]
        stream.runner.accept, stream.runner.quit = accept, False
        return self._run(stream.batch(self._sampler.version))

    def rollout_batch(self, data: Iterable[Record], workflow: Any, should_accept_fn: Filter | str | None = None) -> list[Group]:
        """Returns the group of each record, in order, without those that are rejected.

        Raises the error of the first record all of whose episodes fail, and UserError before
        anything is begun if one is no record.
        """
        if isinstance(data, Mapping):
            raise UserError("rollout_batch: a list of records is needed, not one record (submit takes one)")
        tickets = [self._ticket(record) for record in data]
        runner = self._runner(workflow, self._filter(should_accept_fn))
        self._try(runner, [ticket.prompt for ticket in tickets])
        numbers = [self._begin(ticket, runner) for ticket in tickets]
        try:
            groups = self._run(self._collect(numbers))
        except BaseException:  # Ctrl-C too: what is left would be given to a later `wait`
            for number in numbers:
                if (task := self._submitted.pop(number, None)) is not None:
                    task.cancel()
            raise
        return [group for group in groups if group is not None]

    def submit(self, data: Record, workflow: Any, should_accept_fn: Filter | str | None = None) -> int:
        """Begins the group of one record, and returns its number at once.

        It gets on while a call of this driver runs.
        """
        ticket, runner = self._ticket(data), self._runner(workflow, self._filter(should_accept_fn))
        self._try(runner, [ticket.prompt])
        return self._begin(ticket, runner)

    def wait(self, count: int | None = None, timeout: float | None = None) -> list[Group | None]:
        """Waits for submitted groups and returns those that ended first, in the order of `submit`.

        Args:
          count: number of groups; None for all that were submitted.
          timeout: seconds; None to wait as long as it takes.

        Returns:
          Groups; None for one that is rejected.

        Raises:
          TimeoutError: fewer have ended by then; they can be waited for again.
          Exception: what the episodes of a group raised, if all of them failed.
        """
        count = len(self._submitted) if count is None else count
        if not 0 <= count <= len(self._submitted):
            raise UserError(f"wait: {count} groups, and {len(self._submitted)} are submitted")
        return self._run(self._wait(count, timeout))

    def publish(self, directory: str | Path) -> int:
        """Makes the weights of a Hugging Face directory the sampler's, as the next version.

        Returns the version. A server reads only below its `serve.weight_roots`. Raises UserError.
        """
        return self._run(self._publish(Path(directory)))

    def dump(self, directory: str | Path, groups: Sequence[Group]) -> None:
        """Writes groups to a directory, which `rljax replay --batch` trains on."""
        dump.save(Path(directory), groups, self.tokenizer)

    def close(self) -> None:
        """Ends what is in flight, the reward processes and the sampler's requests."""
        if not self._loop.is_closed():
            self._run(self._close())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Parts of the calls ---------------------------------------------------------------------------------------------------

    def _ticket(self, record: Record) -> Ticket:
        number = next(self._numbers)
        return Ticket(number, record if isinstance(record, Prompt) else prompt_of(record, f"submitted/{number}"))

    def _begin(self, ticket: Ticket, runner: GroupRunner) -> int:
        """Begins the group of a ticket, and returns its number."""
        self._submitted[ticket.index] = self._loop.create_task(self._group(runner, ticket))
        return ticket.index

    def _try(self, runner: GroupRunner, source: PromptSource | Cycle | Sequence[Prompt]) -> None:
        """Tries rewards and filter before their first use, as a run does. Raises UserError."""
        self._require_open()
        accept, rewards = runner.accept, self.rewards
        code = getattr(accept, "__code__", accept)
        if code not in self._tried:
            self._run(try_filter(getattr(accept, "__name__", repr(accept)), accept, runner.n_samples))
            self._tried.add(code)
        if rewards in self._tried or not scores_by_rewards(runner.workflow):
            return
        if isinstance(source, PromptSource):
            records = Records.of_stream(source)
        else:
            prompts = [source.first()] if isinstance(source, Cycle) else list(source)
            records = Records(prompts, "record {}".format, "the records")
        if records.prompts:
            trial = checked(rewards, self.config.reward.name, records, self.tokenizer)
            self._run(self._trials.enter_async_context(trial))
            self._tried.add(rewards)

    def _require_open(self) -> None:
        if self._loop.is_closed():
            raise UserError("Driver: it is closed (call it inside its `with` block)")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the event loop, in this thread, until `work` is done."""
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            work.close()
            raise UserError("Driver: called inside a running event loop, as a notebook has it (run the script by itself)")
        if self._loop.is_closed():
            work.close()
        self._require_open()
        task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(task)
        finally:
            task.cancel()  # after Ctrl-C; otherwise it is done

    def _runner(self, workflow: Any, accept: Filter) -> GroupRunner:
        config = self.config
        generator = RetryingGenerator(
            self._sampler,
            timeout=config.request_timeout,
            retries=config.rollout.request_retries,
            lost=lambda error: log.warning("%s", error),
        )
        samples = config.gconfig.n_samples
        parts = self._workflow(workflow), generator, self.params, samples, config.seed, accept
        return GroupRunner(*parts, timeout=config.episode_timeout, vocab_size=self._vocab_size)

    def _workflow(self, workflow: Any) -> Workflow:
        if isinstance(workflow, str):
            parts: dict[str, Any] = {"tokenizer": self.tokenizer, "rewards": self.rewards, "params": self.params}
            return build_workflow(workflow, arguments=self.config.rollout.workflow_args, **parts)
        if isinstance(workflow, type):
            name = workflow.__name__
            raise UserError(f"workflow: {name} is a class (give an object: {name}(driver.tokenizer, driver.rewards))")
        if hasattr(workflow, "arun_episode") and not hasattr(workflow, "episode"):
            return areal_workflow.ArealWorkflow(workflow, self.params)
        if not inspect.iscoroutinefunction(getattr(workflow, "episode", None)):
            name = type(workflow).__name__
            raise UserError(f"workflow: {name} has no 'async def episode' (see rljax/rollout/workflow.py)")
        return cast(Workflow, workflow)

    def _filter(self, accept: Filter | str | None) -> Filter:
        if accept is None or isinstance(accept, str):
            return find_filter(accept, mask_no_eos=self.config.actor.mask_no_eos)
        return accept

    def _source(self, dataloader: Iterable[Any]) -> Any:
        """Returns the prompts of a dataloader: one stream, whatever workflows draw from it."""
        if id(dataloader) not in self._sources:
            source = dataloader if isinstance(dataloader, PromptSource) else Cycle(dataloader)
            self._sources[id(dataloader)] = dataloader, source
        return self._sources[id(dataloader)][1]

    async def _group(self, runner: GroupRunner, ticket: Ticket) -> Group | None:
        """Generates a group; None if it is rejected. Raises the first error if all episodes fail."""
        async with self._room:
            result = await runner.run(ticket)
        if result.failures and not result.trajectories:
            raise result.failures[0].error
        return Group(ticket.prompt.uid, result.trajectories) if result.wanted else None

    async def _wait(self, count: int, timeout: float | None) -> list[Group | None]:
        async with asyncio.timeout(timeout):
            while len(done := [number for number, task in self._submitted.items() if task.done()]) < count:
                waiting = [task for task in self._submitted.values() if not task.done()]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return await self._collect(done[:count])

    async def _collect(self, numbers: Sequence[int]) -> list[Group | None]:
        if numbers:
            await asyncio.wait([self._submitted[number] for number in numbers])
        tasks = [self._submitted.pop(number) for number in numbers]
        await asyncio.gather(*tasks, return_exceptions=True)  # asyncio logs an exception that nobody looked at
        return [task.result() for task in tasks]

    async def _publish(self, directory: Path) -> int:
        version = self._sampler.version + 1
        await self._sampler.pause()
        try:
            await self._sampler.load_weights(WeightsInDirectory(directory), version)
        finally:
            await self._sampler.resume()
        return version

    async def _close(self) -> None:
        producers = [stream.producer for stream in self._streams.values() if stream.producer is not None]
        tasks = [task for task in (*producers, *self._submitted.values()) if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._trials.aclose()
        await self.rewards.close()
        await self._sampler.close()


class _Stream:
    """Batches of one dataloader by one workflow and filter: a buffer and its producer."""

    def __init__(self, config: Config, source: Any, runner: GroupRunner, version: int, keep: Any) -> None:
        """
        Args:
          version: the sampler's.
          keep: held as long as the stream, for its id names the stream.
        """
        limits = Limits(
            max_lag=config.rollout.max_head_offpolicyness,
            batch_size=config.batch_size,
            max_concurrent=config.max_in_flight,
            prompts=None,
            groups=None,
            stale_policy=config.rollout.stale_policy,
        )
        self.runner = runner
        self.producer: asyncio.Task[None] | None = None
        self._keep = keep
        self._given = False  # the script has a batch
        self._buffer = Buffer(source, limits)
        self._buffer.follow(version)
        self._accumulator = Accumulator()
        self._tracker = PromptTracker(
            config,
            buffer=self._buffer,
            journals=Journals(Path()),  # none is begun, so nothing is written
            recovered={},
            accumulator=self._accumulator,
            beat=lambda _: None,
        )

    async def batch(self, version: int) -> list[Group]:
        """Takes the next batch, at this version of the sampler. Raises what ended the producer."""
        buffer = self._buffer
        buffer.follow(version)
        if self._given:  # the batch before is done with: at lag 0 nothing is begun while the script has it
            self._given = False
            buffer.make_room()
        if self.producer is None or self.producer.done():
            producer = Producer(self.runner, buffer, self._tracker, self._accumulator)
            self.producer = asyncio.create_task(producer.run(), name="producer")
        while not buffer.waits_for and not self.producer.done():
            await asyncio.sleep(0)
        await asyncio.sleep(SENDING)
        while True:
            change = buffer.change()
            if (entries := buffer.take()) is not None:
                self._given = True
                return [entry.group for entry in entries]
            if self.producer.done():
                self.producer.result()
            await asyncio.wait([self.producer, change], return_when=asyncio.FIRST_COMPLETED)
