"""A checkpoint has the state of the run at the call, though the run goes on during the write."""

import asyncio
import dataclasses
import json
from concurrent.futures import Future

import pytest

from rljax.checkpoints.loop_state import LoopState
from rljax.checkpoints.recovery import Recovery
from rljax.metrics.accumulator import Accumulator
from rljax.rollout.buffer import Buffer, Limits
from rljax.rollout.journal import Journals
from rljax.testing.harness import Numbers, example, make_run
from rljax.types import Group

STATE = LoopState(supervised_steps=0, epochs=0, labeled=None, accumulator=Accumulator().state(), written={})
DONE = Future()
DONE.set_result(None)


@pytest.mark.parametrize("wait", [False, True])
def test_a_save_holds_the_instant_it_was_called_at(tmp_path, wait):
    run, accumulator = make_run(tmp_path), Accumulator()
    buffer = Buffer(Numbers(9), Limits(max_lag=9, batch_size=2, max_concurrent=9, prompts=None, groups=None))

    class Slow:
        """A learner in whose save the producer goes on."""

        def save(self, directory):
            accumulator.observe("reward", [2.0])
            buffer.admit()
            run.engine.learner.save(directory)

        def begin_save(self, directory):
            self.save(directory)
            return DONE

    recovery = Recovery(run.config, tmp_path, Slow(), buffer)
    accumulator.observe("reward", [1.0])
    buffer.admit()

    async def save():
        # the write runs in a thread; changing things before it begins is what the producer would do
        work = asyncio.ensure_future(recovery.save(3, dataclasses.replace(STATE, accumulator=accumulator.state()), wait=wait))
        await asyncio.sleep(0)
        accumulator.observe("reward", [3.0])
        await work
        accumulator.observe("reward", [4.0])
        buffer.admit()
        await recovery.close()

    asyncio.run(save())
    saved = json.loads((tmp_path / "checkpoints" / "3" / "loop.json").read_text())
    assert saved["accumulator"]["values"] == {"reward": [1.0]}
    assert saved["book"]["drawn"] == 1 == len(saved["book"]["pending"])


def test_a_journal_of_steps_that_were_undone_is_no_part_of_the_checkpoint_that_replaces_theirs(tmp_path):
    """A killed run may leave the journal of a step whose checkpoint is made anew, with other weights."""
    run = make_run(tmp_path)
    limits = Limits(max_lag=9, batch_size=2, max_concurrent=9, prompts=None, groups=None)

    def recovery():
        return Recovery(run.config, tmp_path, run.engine.learner, Buffer(Numbers(9), limits))

    undone = Buffer(Numbers(9), limits)
    ticket = undone.admit()
    journals = Journals(tmp_path / "journal")
    journals.begin(3, 0)
    journals.append(ticket, Group(ticket.prompt.uid, (example(ticket.prompt),)), accepted=True)
    journals.close()

    async def save_and_restore():
        before, after = recovery(), recovery()
        await before.save(3, STATE, wait=True)
        await before.close()
        found = await after.restore()
        await after.close()
        return found

    state, recovered = asyncio.run(save_and_restore())
    assert state is not None and recovered == {}


def test_groups_that_wait_are_in_a_checkpoint_and_a_rollback_takes_the_newest_it_may(tmp_path):
    run = make_run(tmp_path, {"saver.keep_last": 5})
    limits = Limits(max_lag=9, batch_size=2, max_concurrent=9, prompts=None, groups=None)
    buffer = Buffer(Numbers(9), limits)
    recovery = Recovery(run.config, tmp_path, run.engine.learner, buffer)

    async def scenario():
        for step in (1, 2, 3):
            ticket = buffer.admit()
            buffer.finish(ticket, Group(ticket.prompt.uid, (example(ticket.prompt),)))
            await recovery.save(step, STATE, wait=True)
        found = [await recovery.roll_back(*choice) for choice in (([1, 2, 3], 2), ([1, 3], 2), ([2, 3], 1))]
        again = Recovery(run.config, tmp_path, run.engine.learner, Buffer(Numbers(9), limits))
        await again.restore()
        await again.close()
        await recovery.close()
        return found, again.buffer

    found, restored = asyncio.run(scenario())
    assert [(step, len(entries)) for step, _, entries in found] == [(2, 2), (1, 1), (2, 2)]
    assert [entry.ticket.prompt.uid for entry in restored.entries()] == ["0/0", "0/1", "0/2"]


def test_once_a_checkpoint_is_whole_only_its_journal_takes_groups_and_those_of_checkpoints_that_went_are_gone(tmp_path):
    run = make_run(tmp_path, {"saver.keep_last": 2})
    limits = Limits(max_lag=9, batch_size=2, max_concurrent=9, prompts=None, groups=None)
    buffer = Buffer(Numbers(9), limits)
    recovery = Recovery(run.config, tmp_path, run.engine.learner, buffer)

    def sizes():
        return {int(path.stem): path.stat().st_size for path in (tmp_path / "journal").iterdir()}

    async def scenario():
        await recovery.restore()
        for step in (1, 2, 3, 4):
            await recovery.save(step, STATE, wait=True)
            assert sizes().keys() == {max(step - 1, 1), step}  # and not 0, of the run's beginning
        before = sizes()
        ticket = buffer.admit()
        recovery.journals.append(ticket, Group(ticket.prompt.uid, (example(ticket.prompt),)), accepted=True)
        after = sizes()
        await recovery.close()
        return [step for step in after if after[step] > before[step]]

    assert asyncio.run(scenario()) == [4]
