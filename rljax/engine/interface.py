"""Interfaces of an engine: generators, samplers and learners.

The loop that uses them, in outline (`rljax/loop.py` is the real one):

    engine = build(config, allocation, model_dir, workdir)
    completion = await engine.sampler.generate(request)       # any number at once
    ...
    proximal_logp = engine.learner.score(batch)
    metrics = engine.learner.update(batch)                    # one optimizer step
    await engine.publish(version + 1)                         # in-flight requests go on

`Generator` and `Sampler` are base classes: subclass them, and optional methods have a default.
`Learner` is a protocol, because proxies stand in for learners (rljax/multiprocess/leader.py).
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import numpy as np

from rljax.batching.batch import Batch
from rljax.engine.weights import ExportTarget, WeightSource
from rljax.metrics.mean import Mean
from rljax.types import Completion, Piece, Request

PortableState = Mapping[str, Mapping[str, np.ndarray]]
"""A learner's state in no framework's terms: part -> name -> array. rljax/checkpoints/portable.py has the parts."""


class Generator(abc.ABC):
    """Source of completions: the part of a sampler that workflows, evaluation and workers use.

    The loop it serves, in outline (rljax/rollout/producer.py), with any number of episodes at once:

        for prompt in prompts:
            trajectory = await workflow.episode(generator, prompt, params, seed)

    An episode uses it like this:

        completion = await generator.generate(Request("0/17#3", prompt_ids, params, seed))
        reward = judge(completion.token_ids)
        ...                                                # several turns: several requests
        async for piece in generator.stream(request):      # or in pieces, as it grows
            text += decode(piece.token_ids)

    Loading weights, pausing and closing belong to the publisher, who has the `Sampler`.
    """

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """Version of the current weights.

        A subclass may have a plain attribute: `version = 0`.
        """

    @abc.abstractmethod
    async def generate(self, request: Request) -> Completion:
        """Samples one completion: token ids, and a log-prob and a version per token.

        May be called any number of times at once, from the event loop. Cancelling the call aborts
        the request.

        Raises:
          UserError: the request is invalid; no sampler could complete it.
          PromptTooLong: a UserError where the prompt leaves no room in the context.
          SamplerError: the request is lost, and may be sent again.
          RequestLost: a SamplerError where that was tried already.
        """

    async def stream(self, request: Request) -> AsyncGenerator[Piece, None]:
        """Yields the completion of `generate` in pieces; by default in one piece, at the end.

        Closing the generator of pieces before the last one (`aclose`) aborts the request.
        """
        done = await self.generate(request)
        yield Piece(done.token_ids, done.logp, done.versions, done.finish)


class Sampler(Generator):
    """A generator with weights of its own, which the publisher replaces.

    Example:

        await sampler.pause()     # between two decode steps
        await sampler.load_weights(learner.export(target), version + 1)
        await sampler.resume()    # requests in flight go on, under the new weights
    """

    @abc.abstractmethod
    async def pause(self) -> None:
        """Returns once no decode step is running; requests in flight keep their state."""

    @abc.abstractmethod
    async def resume(self) -> None:
        """Continues the requests in flight, and starts those that came meanwhile."""

    @abc.abstractmethod
    async def load_weights(self, source: WeightSource, version: int) -> None:
        """Replaces the weights in place.

        No cache computed with older weights serves a request that starts later.

        Raises:
          UserError: the sampler does not take this source or can't read it; the old weights stay.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Ends all requests in flight with finish `abort` and frees the sampler's resources.

        May be repeated.
        """

    # Samplers whose parts may die and come back

    async def lacks_weights(self) -> None:
        """Returns once a restarted part of the sampler waits for a publish; by default never."""
        await asyncio.Event().wait()

    @property
    def memory_peak(self) -> int | None:
        """Most bytes in use so far on the fullest of its devices; by default None: it can't tell."""
        return None

    # Samplers that share devices with the learner

    lends: bool = False
    """True if the config asks it to give its memory to the learner during updates."""

    async def release(self) -> None:
        """Frees weights and caches until `reclaim`.

        Requests in flight end with finish `abort`, or wait. By default it does nothing.
        """

    async def reclaim(self) -> None:
        """Allocates the memory again.

        Nothing is generated before `load_weights` has filled it, and `resume`.
        """


class Learner(Protocol):
    """Trains one policy (and a critic where the algorithm has one).

    Methods block; the loop calls them from a thread. A learner in several processes
    (`Plugin.processes`) gets the same calls in the same order in all of them.
    """

    def score(self, batch: Batch) -> np.ndarray:
        """Returns log-probs of the tokens under the current policy.

        [R, T] float32, nats; 0 where loss_mask is False.
        """
        ...

    def score_reference(self, batch: Batch) -> np.ndarray:
        """Scores as `score` does, under the frozen reference policy. Only with kl_ctl > 0."""
        ...

    def score_teacher(self, batch: Batch) -> np.ndarray:
        """Scores as `score` does, under the teacher of actor.distill.teacher. Only with one."""
        ...

    def values(self, batch: Batch) -> np.ndarray:
        """Returns the critic's value at each token.

        [R, T] float32, reward units. Only with adv_estimator "gae".
        """
        ...

    def update(self, batch: Batch) -> dict[str, Mean]:
        """Takes one optimizer step of the policy on all rows of the batch; the critic stays.

        It is not taken if the gradient is not finite (metric `skipped`), or if the metrics break a
        bound of `guard` whose action is "skip" (metric `out_of_bounds`, of runs with such bounds).
        """
        ...

    def update_critic(self, batch: Batch) -> dict[str, Mean]:
        """Takes one optimizer step of the critic."""
        ...

    def update_supervised(self, batch: Batch) -> dict[str, Mean]:
        """Takes one supervised step: negative log-likelihood weighted by loss_weight.

        It uses the warm-up's optimizer, or the policy's for "sft".
        """
        ...

    def scale_lr(self, factor: float) -> None:
        """Multiplies the learning rates of later steps by `factor`, relative to their schedules.

        1 at the start; neither `save` nor `restore` has to do with it.
        """
        ...

    def export(self, target: ExportTarget) -> WeightSource:
        """Makes the weights available as the target asks: in files, or in memory by its transport.

        In several processes rank 0's source counts. If its tensors are gathered as they are sent,
        the other ranks take part before they return.
        """
        ...

    def save(self, directory: Path) -> None:
        """Writes parameters, optimizer moments and step to `directory`, which does not exist yet."""
        ...

    def begin_save(self, directory: Path) -> Future[None]:
        """Saves the learner as it is at the call, and returns before it is written.

        Whatever changes the learner may be called meanwhile, and waits for a copy where it needs
        one. One at a time.

        Returns:
          A future that is done when everything is written, in all processes of the learner. It
          raises UserError as `save` does.
        """
        ...

    def restore(self, directory: Path) -> None:
        """Reads what `save` or `begin_save` wrote.

        Raises UserError on a missing, foreign or corrupt checkpoint; the learner stays as it was.
        """
        ...

    def close(self) -> None: ...
