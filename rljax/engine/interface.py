"""What an engine is made of: generators, samplers and learners.

The loop they serve, in outline (`rljax/loop.py` is the real one):

    engine = build(config, allocation, model_dir, workdir)
    completion = await engine.sampler.generate(request)       # any number at once
    ...
    proximal_logp = engine.learner.score(batch)
    metrics = engine.learner.update(batch)                    # one optimizer step
    await engine.publish(version + 1)                         # in-flight requests go on under the new weights

`Generator` and `Sampler` are base classes: subclass them, and what is optional has a default.
`Learner` is a protocol, for proxies stand in for learners (rljax/multiprocess/leader.py).
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from rljax.batching.batch import Batch
from rljax.engine.weights import ExportTarget, WeightSource
from rljax.metrics.mean import Mean
from rljax.types import Completion, Piece, Request

PortableState = Mapping[str, Mapping[str, np.ndarray]]
"""All that a learner has learned, in no framework's terms: rljax/checkpoints/portable.py has its parts."""


class Generator(abc.ABC):
    """Generates completions: all that workflows, evaluation, producers and workers know of a
    sampler.

    What a workflow does with it:

        completion = await generator.generate(Request("0/17#3", prompt_ids, params, seed))
        reward = judge(completion.token_ids)
        ...                                                # several turns are several requests
        async for piece in generator.stream(request):      # or as they come, to act on a completion while it grows
            text += decode(piece.token_ids)

    Loading weights, pausing and closing belong to the publisher, who holds a `Sampler`.
    """

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """Version of the weights that it generates from now.

        A subclass may have a plain attribute: `version = 0`.
        """

    @abc.abstractmethod
    async def generate(self, request: Request) -> Completion:
        """Samples one completion: token ids in; token ids, log-probs and versions out, one per
        token.

        May be called any number of times at once, from the event loop. Cancelling the call aborts
        the request.

        Raises:
          UserError: a request that can't be done, whoever is asked.
          SamplerError: the request is lost, and may be sent again.
        """

    async def stream(self, request: Request) -> AsyncGenerator[Piece, None]:
        """Yields the completion of `generate` in pieces: by default in one, when all of it is
        there.

        Closing the generator of pieces before the last (`aclose`) aborts the request.
        """
        done = await self.generate(request)
        yield Piece(done.token_ids, done.logp, done.versions, done.finish)


class Sampler(Generator):
    """A generator with weights of its own. The publisher replaces them:

    await sampler.pause()                                  # between two decode steps
    await sampler.load_weights(learner.export(target), version + 1)
    await sampler.resume()                                 # requests in flight go on, under the new weights
    """

    @abc.abstractmethod
    async def pause(self) -> None:
        """Returns once no decode step is running; requests in flight keep their state."""

    @abc.abstractmethod
    async def resume(self) -> None:
        """Goes on with what is in flight, and with requests that came meanwhile."""

    @abc.abstractmethod
    async def load_weights(self, source: WeightSource, version: int) -> None:
        """Swaps weights in place. No cache computed with older weights serves a request that
        starts later.

        Raises UserError for a source that it does not take or can't read; then the old weights
        stay.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Ends all requests in flight with finish `abort` and frees what the sampler has.

        May be repeated.
        """

    # A sampler whose parts die and come back

    async def lacks_weights(self) -> None:
        """Returns when a part is back that waits for weights which only a publish can bring; by
        default never.
        """
        await asyncio.Event().wait()

    # A sampler that shares devices with the learner

    lends: bool = False
    """Whether it gives its memory to the learner during updates, as the config may ask."""

    async def release(self) -> None:
        """Lets go of weights and caches until `reclaim`. What is in flight ends with finish
        `abort`, or waits.

        By default nothing happens: there is nothing that it could let go of.
        """

    async def reclaim(self) -> None:
        """Takes its memory again.

        Nothing is generated before `load_weights` has filled it, and `resume`.
        """


class Learner(Protocol):
    """Trains one policy (and a critic where the algorithm has one). Methods block; the loop calls
    them from a thread.

    Where it lives in several processes (`Plugin.processes`) all of them make the same calls in the
    same order.
    """

    def score(self, batch: Batch) -> np.ndarray:
        """Log-probs of the tokens under the current policy.

        [R, T] float32, nats; 0 where loss_mask is False.
        """
        ...

    def score_reference(self, batch: Batch) -> np.ndarray:
        """The same under the frozen reference policy. Only with kl_ctl > 0."""
        ...

    def score_teacher(self, batch: Batch) -> np.ndarray:
        """The same under the teacher of actor.distill.teacher. Only with one."""
        ...

    def values(self, batch: Batch) -> np.ndarray:
        """Critic's value at each token.

        [R, T] float32, reward units. Only with adv_estimator "gae".
        """
        ...

    def update(self, batch: Batch) -> dict[str, Mean]:
        """One optimizer step of the policy on all rows of the batch (and nothing of the critic)."""
        ...

    def update_critic(self, batch: Batch) -> dict[str, Mean]:
        """One optimizer step of the critic."""
        ...

    def update_supervised(self, batch: Batch) -> dict[str, Mean]:
        """One step of negative log-likelihood weighted by loss_weight, with the warm-up optimizer
        (the policy's for "sft").
        """
        ...

    def export(self, target: ExportTarget) -> WeightSource:
        """Makes the weights ready for whoever the target names: files in a directory, or memory by
        the chosen transport.

        In several processes, rank 0's source is the one that counts. Where its tensors are
        gathered as they are sent, the other ranks take part before they return.
        """
        ...

    def save(self, directory: Path) -> None:
        """Writes parameters, optimizer moments and step under directory, which does not exist yet."""
        ...

    def restore(self, directory: Path) -> None:
        """Raises UserError on a missing, foreign or corrupt checkpoint, leaving the learner as it
        was.
        """
        ...

    def close(self) -> None: ...
