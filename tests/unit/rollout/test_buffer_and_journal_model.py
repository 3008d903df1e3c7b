"""Buffer and journal against a plain model, with a kill or a rollback between any two operations:
exactly once and the lag bound.

The model is sets of prompt indices and a copy of them at each checkpoint. It knows nothing of
heaps and files; it says what must be true: where every prompt is, what may be admitted, what comes
next, what a killed process leaves behind.
"""

import copy
import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from rljax.rollout import journal
from rljax.rollout.buffer import Buffer, Limits
from rljax.rollout.journal import Journals
from rljax.testing.harness import Numbers
from rljax.types import Finish, Group, Trajectory

EPOCH, EPOCHS = 7, 2


def group_of(ticket, versions):
    ids = np.arange(len(versions) + 1, dtype=np.int32)
    mask = ids > 0
    stamped = np.array([-1, *versions], np.int32)
    trajectory = Trajectory(ids, mask, np.zeros(len(ids), np.float32), stamped, float(ticket.index), {}, Finish.STOP)
    return Group(ticket.prompt.uid, (trajectory,))


class Model:
    """Progress of a run so far.

    A kill undoes all of it, back to the last checkpoint.
    """

    def __init__(self):
        self.version = 0
        self.undone = 0  # versions that don't count: of undone steps, and of rollbacks
        self.floor = 0  # version of the last rollback: nothing older is trained on
        self.drawn = 0
        self.running = {}  # index -> ticket
        self.again = []  # indices, first to be admitted first
        self.ready = {}  # index -> versions of its trained tokens
        self.attempts = Counter()  # times a prompt failed or grew stale: each is another draw
        self.rejected = set()
        self.dropped = set()
        self.trained = []  # (index, version it was trained at, versions of its tokens)


class BufferAndJournal(RuleBasedStateMachine):
    @initialize(
        max_lag=st.integers(0, 3),
        batch=st.integers(1, 3),
        concurrent=st.integers(1, 8),
        policy=st.sampled_from(["drop", "mask"]),
    )
    def start(self, max_lag, batch, concurrent, policy):
        self.directory = Path(tempfile.mkdtemp())
        self.limits = Limits(max_lag, batch, concurrent, EPOCH * EPOCHS, None, policy)
        self.model = Model()
        self.writing = None  # a checkpoint that is not whole yet
        self.buffer, self.log = Buffer(Numbers(EPOCH), self.limits), Journals(self.directory)
        self.recovered = self.log.begin(0, 0)
        self.born = {}  # (index, attempt) -> version at admission
        self.saved = None  # version of the checkpoint
        self.checkpoint = copy.deepcopy(self.model), None, 0, {}  # also its state, ready groups, and what its journal has

    def teardown(self):
        if hasattr(self, "buffer"):
            self._to_the_end()
            self.log.close()
            shutil.rmtree(self.directory)

    # What a run does

    @rule(n=st.integers(1, 4))
    def admit(self, n):
        for _ in range(n):
            self._admit()

    def _admit(self):
        model, ticket = self.model, self.buffer.admit()
        accepted = len(model.trained) + len(model.ready)
        room = min(
            self.limits.max_concurrent - len(model.running),
            (self.limits.max_lag + model.version - model.undone + 1) * self.limits.batch_size - accepted - len(model.running),
        )
        left = bool(model.again) or model.drawn < EPOCH * EPOCHS
        assert (ticket is not None) == (room > 0 and left)
        if ticket is None:
            return
        if model.again:
            assert ticket.index == model.again.pop(0)
        else:
            assert ticket.index == model.drawn
            model.drawn += 1
        assert ticket.prompt.uid == f"{ticket.index // EPOCH}/{ticket.index % EPOCH}"
        assert ticket.attempt == model.attempts[ticket.index]
        model.running[ticket.index] = ticket
        self.born[ticket.index, ticket.attempt] = model.version
        if (record := self.recovered.pop((ticket.prompt.uid, ticket.attempt), None)) is not None:
            self._end(ticket, record.group)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data(), accepted=st.sampled_from([True, True, True, False]))
    def finish(self, data, accepted):
        ticket = self._some_running(data)
        versions = range(self.born[ticket.index, ticket.attempt], self.model.version + 1)
        self._finish(ticket, data.draw(st.lists(st.sampled_from(versions), min_size=1, max_size=3).map(sorted)), accepted)

    def _finish(self, ticket, versions, accepted):
        group = group_of(ticket, versions)
        self.log.append(ticket, group, accepted=accepted)
        for model, _, _, journaled in filter(None, (self.checkpoint, self.writing)):
            if group.trajectories[0].versions.max() <= model.version:
                journaled[ticket.prompt.uid, ticket.attempt] = accepted
        self._end(ticket, group if accepted else None)

    def _end(self, ticket, group):
        del self.model.running[ticket.index]
        if group is None:
            self.buffer.reject(ticket)
            self.model.rejected.add(ticket.index)
        else:
            self.buffer.finish(ticket, group)
            self.model.ready[ticket.index] = group.trajectories[0].versions[1:].tolist()
            self._age()

    @precondition(lambda self: self.model.running)
    @rule(data=st.data(), dropped=st.booleans())
    def fail(self, data, dropped):
        ticket = self._some_running(data)
        del self.model.running[ticket.index]
        if dropped:
            self.buffer.drop(ticket)
            self.model.dropped.add(ticket.index)
        else:
            self.buffer.requeue(ticket, own_fault=True)
            self.model.again.append(ticket.index)
            self.model.attempts[ticket.index] += 1

    @precondition(lambda self: self.model.running)
    @rule(rounds=st.integers(1, 4))
    def everyone_but_a_straggler(self, rounds):
        """The oldest prompt in flight stays there while others are admitted, finished and trained
        on: so it grows stale.
        """
        straggler = min(self.model.running)
        for _ in range(rounds):
            self._admit()
            for ticket in [t for index, t in self.model.running.items() if index != straggler]:
                self._finish(ticket, [self.model.version], accepted=True)
            self.train()

    def _some_running(self, data):
        return self.model.running[data.draw(st.sampled_from(sorted(self.model.running)))]

    @rule()
    def train(self):
        model, entries = self.model, self.buffer.take()
        over = not model.running and not model.again and model.drawn == EPOCH * EPOCHS
        size = self.limits.batch_size if len(model.ready) >= self.limits.batch_size else len(model.ready) if over else 0
        if not size:
            assert entries is None
            return
        oldest_first = sorted(model.ready, key=lambda index: (min(model.ready[index]), index))[:size]
        assert [entry.index for entry in entries] == oldest_first
        for entry in entries:
            (trajectory,) = entry.group.trajectories
            assert trajectory.reward == entry.index  # its own group, not another's
            versions = trajectory.versions[trajectory.loss_mask].tolist()
            assert versions == model.ready.pop(entry.index) and min(versions) >= model.floor
            model.trained.append((entry.index, model.version, versions))
        self.buffer.publish()
        model.version += 1
        self._age()

    def _age(self):
        """The stale policy, as the config documents it."""
        floor = self.model.version - self.limits.max_lag
        for index in sorted(self.model.ready, key=lambda i: (min(self.model.ready[i]), i)):
            fresh = [v for v in self.model.ready[index] if v >= floor]
            if len(fresh) < len(self.model.ready[index]) and (self.limits.stale_policy == "drop" or not fresh):
                del self.model.ready[index]
                self.model.again.append(index)
                self.model.attempts[index] += 1
            else:
                self.model.ready[index] = fresh

    @precondition(lambda self: self.writing is None and self.model.version != self.saved)
    @rule()
    def begin_save(self):
        """The run goes on, and may be killed, before the checkpoint is whole."""
        state, entries = json.loads(json.dumps(self.buffer.state())), self.buffer.entries()
        shares = self.model.version == self.checkpoint[0].version  # with the beginning of the run
        self.log.begin_beside(self.model.version, self.model.version)
        journal.write_entries(self.directory / "writing", entries)
        self.writing = copy.deepcopy(self.model), state, len(entries), self.checkpoint[3] if shares else {}

    @precondition(lambda self: self.writing is not None)
    @rule()
    def finish_save(self):
        (self.directory / "writing").rename(self.directory / "ready")
        self.checkpoint, self.writing = self.writing, None
        self.saved = self.checkpoint[0].version
        self.log.settle(self.saved)
        self.log.prune([self.saved])

    @precondition(lambda self: self.writing is not None)
    @rule()
    def fail_save(self):
        self.log.abandon(self.writing[0].version)
        self.writing = None

    @rule(torn=st.binary(max_size=30))
    def kill(self, torn):
        """The process is gone in the middle of a write; another one takes over."""
        model, state, ready, journaled = self.checkpoint
        with (self.directory / f"{model.version}.journal").open("ab") as file:
            file.write(torn)
        self.log.close()
        self.writing = None
        self.buffer, self.log = Buffer(Numbers(EPOCH), self.limits), Journals(self.directory)
        if state is not None:
            self.buffer.restore(state, journal.read_entries(self.directory / "ready", ready))
        self.recovered = self.log.begin(model.version, model.version)
        assert {key: record.group is not None for key, record in self.recovered.items()} == journaled
        self.model = copy.deepcopy(model)
        self.model.again = sorted([*self.model.running, *self.model.again])
        self.model.running = {}

    @precondition(lambda self: self.checkpoint[1] is not None)
    @rule()
    def roll_back(self):
        """A guardrail undoes the steps since the checkpoint; all that was not trained on is void."""
        if self.writing is not None:
            self.finish_save()
        then, state, ready, _ = self.checkpoint
        now, self.model = self.model, copy.deepcopy(then)
        self.buffer.roll_back(state, journal.read_entries(self.directory / "ready", ready))
        model = self.model
        model.version = model.floor = now.version + 1
        model.undone = model.version - (then.version - then.undone)
        model.again = sorted([*model.running, *model.again, *model.ready])
        model.attempts.update(model.again)
        model.running, model.ready = {}, {}
        self.recovered.clear()
        self.begin_save()
        self.finish_save()

    # What must be true

    @invariant()
    def every_prompt_is_in_one_place(self):
        if not hasattr(self, "buffer"):
            return
        model = self.model
        trained = [index for index, _, _ in model.trained]
        places = [*trained, *model.ready, *model.running, *model.again, *model.rejected, *model.dropped]
        assert sorted(places) == list(range(model.drawn)), "lost or doubled"
        buffer = self.buffer
        assert (buffer.version, buffer.drawn, buffer.consumed) == (model.version, model.drawn, len(trained))
        assert (buffer.running, buffer.ready) == (len(model.running), len(model.ready))
        assert [entry.index for entry in buffer.entries()] == sorted(model.ready, key=lambda i: (min(model.ready[i]), i))

    @invariant()
    def nothing_trained_on_was_too_old(self):
        if hasattr(self, "buffer"):
            for _, at, versions in self.model.trained:
                assert at - min(versions) <= self.limits.max_lag, "stale"

    def _to_the_end(self):
        """Whatever happened, the run can be brought to its end, and then every prompt was dealt
        with once.
        """
        for _ in range(40 * EPOCH * EPOCHS):
            self._admit()
            for ticket in list(self.model.running.values()):
                self._finish(ticket, [self.model.version], accepted=True)
            self.train()
            if self.buffer.complete and not self.buffer.ready:
                break
        self.every_prompt_is_in_one_place()
        self.nothing_trained_on_was_too_old()
        done = sorted([i for i, _, _ in self.model.trained] + [*self.model.rejected, *self.model.dropped])
        assert done == list(range(EPOCH * EPOCHS))


def _settings(histories):
    return settings(
        max_examples=histories, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )


def test_lag_bound_and_exactly_once_over_random_histories_with_kills():
    run_state_machine_as_test(BufferAndJournal, settings=_settings(150))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_lag_bound_and_exactly_once_over_ten_thousand_random_histories():
    run_state_machine_as_test(BufferAndJournal, settings=_settings(10_000))
