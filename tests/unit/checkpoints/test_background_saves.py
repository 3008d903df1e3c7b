"""Saves that go on beside the steps: a kill at any instant, errors, and who waits for whom.

A copy of the run directory, taken in the middle of a save, is what a kill -9 leaves there: the
kernel has everything that was written.
"""

import asyncio
import json
import os
import shutil
import threading
from concurrent.futures import Future

import pytest

from rljax import loop
from rljax.checkpoints import store
from rljax.checkpoints.loop_state import LoopState
from rljax.checkpoints.recovery import Recovery
from rljax.errors import UserError
from rljax.metrics.accumulator import Accumulator
from rljax.rollout import journal
from rljax.rollout.buffer import Buffer, Limits
from rljax.testing.harness import MemorySink, Numbers, RememberingLearner, example, make_run
from rljax.types import Group

LIMITS = Limits(max_lag=9, batch_size=2, max_concurrent=9, prompts=None, groups=None)


def _state(step):
    """The loop's, told apart by a step."""
    return LoopState(supervised_steps=step, epochs=0, labeled=None, accumulator=Accumulator().state(), written={})


class Held:
    """A learner whose saves are written at once and end when the test says so."""

    def __init__(self, learner):
        self._learner, self.ends = learner, []

    def save(self, directory):
        self._learner.save(directory)

    def begin_save(self, directory):
        self._learner.save(directory)
        self.ends.append(Future())
        return self.ends[-1]

    def restore(self, directory):
        self._learner.restore(directory)


def _recovery(run, directory, learner):
    return Recovery(run.config, directory, learner, Buffer(Numbers(20), LIMITS))


class Scene:
    """A run whose prompts are finished by hand."""

    def __init__(self, tmp_path, keep_last=2):
        self.run = make_run(tmp_path, {"saver.keep_last": keep_last})
        self.learner = Held(self.run.engine.learner)
        self.recovery = _recovery(self.run, tmp_path, self.learner)
        self.finished = []

    def finish(self, *, then=lambda: None):
        """Admits a prompt and finishes it, as the tracker does: journal first, then buffer."""
        buffer = self.recovery.buffer
        ticket = buffer.admit()
        group = Group(ticket.prompt.uid, (example(ticket.prompt),))
        self.recovery.journals.append(ticket, group, accepted=True)
        buffer.finish(ticket, group)
        self.finished.append(ticket.prompt.uid)
        then()

    async def begin(self, step):
        await self.recovery.save(step, _state(step))

    async def end(self, error=None):
        future = self.learner.ends[-1]
        future.set_exception(error) if error else future.set_result(None)
        await self.recovery.settle()


def test_exactly_once_whatever_the_instant_of_a_kill_in_a_background_save(tmp_path, monkeypatch):
    """At every system call of a save that changes a name or syncs, and between its parts."""
    scene, copies = Scene(tmp_path / "run"), []

    def snapshot():
        copies.append((tmp_path / f"copy{len(copies)}", set(scene.finished)))
        shutil.copytree(tmp_path / "run", copies[-1][0])

    def watched(module, name):
        call = getattr(module, name)

        def wrapper(*args, **kwargs):
            if active:
                snapshot()
            return call(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapper)

    active = []
    for name in ("rename", "replace"):
        watched(os, name)
    watched(store, "write_manifest")
    watched(store, "sync_tree")
    watched(store.shutil, "rmtree")
    watched(journal, "read")
    for name in ("begin_beside", "settle", "prune"):
        watched(journal.Journals, name)

    async def scenario():
        await scene.recovery.restore()
        scene.finish()
        await scene.recovery.save(1, _state(1), wait=True)
        scene.finish()
        active.append(True)
        await scene.begin(2)
        scene.finish(then=snapshot)
        scene.finish(then=snapshot)
        await scene.end()
        scene.finish(then=snapshot)
        await scene.begin(3)
        scene.finish(then=snapshot)
        await scene.end()
        active.clear()
        await scene.recovery.close()

    asyncio.run(scenario())
    assert len(copies) > 15
    gone_on_from = set()
    for directory, finished in copies:
        again = _recovery(scene.run, directory, scene.learner)
        state, recovered = asyncio.run(again.restore())
        gone_on_from.add(state.supervised_steps)
        ready = [entry.ticket.prompt.uid for entry in again.buffer.entries()]
        found = [*ready, *(uid for uid, _ in recovered)]
        pending = {ticket["prompt"]["uid"] for ticket in again.buffer.state()["pending"]}
        assert len(found) == len(set(found)) and set(found) >= finished, directory  # none lost, none twice
        assert set(found) <= set(scene.finished) and not pending & set(ready), directory
        asyncio.run(again.close())
    assert gone_on_from == {1, 2, 3}


def test_a_save_that_fails_leaves_the_one_before_and_its_journal(tmp_path):
    scene = Scene(tmp_path)

    async def scenario():
        await scene.recovery.restore()
        await scene.recovery.save(1, _state(1), wait=True)
        await scene.begin(2)
        scene.finish()
        with pytest.raises(UserError, match="the disk is full"):
            await scene.end(UserError("the disk is full"))
        scene.finish()
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]
        await scene.begin(2)  # tried again
        await scene.end()
        await scene.recovery.close()

    asyncio.run(scenario())
    assert {record.ticket.prompt.uid for record in journal.read(tmp_path / "journal" / "1.journal")} == {"0/0", "0/1"}
    assert scene.recovery.checkpoints.steps() == [1, 2]
    assert journal.read(tmp_path / "journal" / "2.journal") == []  # nothing of the first try


def test_one_save_at_a_time_and_those_before_stay_until_it_is_whole(tmp_path):
    scene = Scene(tmp_path, keep_last=1)

    async def scenario():
        await scene.recovery.restore()
        await scene.begin(1)
        second = asyncio.create_task(scene.begin(2))
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(scene.learner.ends) == 1 and scene.recovery.checkpoints.steps() == []
        scene.learner.ends[0].set_result(None)
        await second
        assert scene.recovery.checkpoints.steps() == [1]  # 2 is written, but not whole
        await scene.end()
        assert scene.recovery.checkpoints.steps() == [2]
        await scene.recovery.save(2, _state(2), score=0.5)  # of the same state: only its score is new
        assert len(scene.learner.ends) == 2
        await scene.recovery.close()

    asyncio.run(scenario())
    assert json.loads((tmp_path / "checkpoints" / "2" / "manifest.json").read_text())["score"] == 0.5


def test_a_checkpoint_of_undone_steps_gives_way_before_its_journal_does(tmp_path):
    """A killed process had made it; it did not load, and the run came to its step again."""
    scene = Scene(tmp_path)

    async def scenario():
        await scene.recovery.restore()
        for step in (1, 2):
            await scene.begin(step)
            await scene.end()
        again = _recovery(scene.run, tmp_path, scene.learner)
        (tmp_path / "checkpoints" / "2" / "loop.json").write_text("{}")
        await again.restore()
        await again.save(2, _state(2))
        assert again.checkpoints.steps() == [1]
        scene.learner.ends[-1].set_result(None)
        await again.settle()
        assert again.checkpoints.steps() == [1, 2]
        await again.close()
        await scene.recovery.close()

    asyncio.run(scenario())


class Slow(RememberingLearner):
    """Writes its saves in a thread, and ends the write after `lasting` more updates or a while."""

    lasting = 2

    def __init__(self, *args):
        super().__init__(*args)
        self.saves = []  # updates until each can end, and what ends it
        self.overlapped = 0

    def begin_save(self, directory):
        self.save(directory)
        end, written = threading.Event(), Future()
        self.saves.append([self.lasting, end])

        def write():
            end.wait(0.2)  # the run may wait for this save, and then there is no update
            written.set_result(None)

        threading.Thread(target=write).start()
        return written

    def update(self, batch):
        for save in self.saves:
            save[0] -= 1
            self.overlapped += not save[1].is_set()
            if save[0] <= 0:
                save[1].set()
        return super().update(batch)


def assert_every_prompt_once(run):
    assert {uid: len(steps) for uid, steps in run.engine.learner.trained.items()} == {f"0/{i}": 1 for i in range(24)}


def _slow_run(directory, overrides=None, learner=Slow, sinks=None):
    def sink(first):
        sinks.append(MemorySink(first))
        return sinks[-1]

    run = make_run(directory, {"saver.freq_steps": 1, "saver.keep_last": 1} | (overrides or {}), sink=sink, n_prompts=24)
    run.engine.learner = learner(run.config, directory / "model")
    return run


def test_steps_go_on_beside_a_save_and_say_what_they_waited(tmp_path):
    sinks = []
    run = _slow_run(tmp_path, {"saver.freq_steps": 2}, sinks=sinks)
    assert loop.train(run).finished
    assert run.engine.learner.overlapped > 0
    assert_every_prompt_once(run)
    written = {name for line in sinks[0].steps.values() for name in line}
    assert {"timeperf/save", "timeperf/save_wait", "timeperf/save_background"} <= written
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["6"]  # whole at the end


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("every, at, before", [(2, 4, 2), (4, 6, 4)], ids=["on the way", "at the end"])
def test_a_failing_save_ends_the_run_alike_in_the_background_and_before_it(tmp_path, background, every, at, before):
    error = UserError("checkpoint: could not write it: No space left on device")

    class Fails(Slow):
        def save(self, directory):
            super().save(directory)
            if not self.beside and directory.parent.name == f".{at}.tmp":
                raise error

        def begin_save(self, directory):
            self.beside = True
            written = super().begin_save(directory)
            self.beside = False
            if directory.parent.name != f".{at}.tmp":
                return written
            failed = Future()
            failed.set_exception(error)
            return failed

        beside = False

    sinks = []
    run = _slow_run(tmp_path, {"saver.background": background, "saver.freq_steps": every}, learner=Fails, sinks=sinks)
    with pytest.raises(UserError, match=rf"^{error}$"):
        loop.train(run)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(before)]
    assert max(sinks[0].steps) - at in ((0, 1) if background else (0,))  # before the step after the next
    run = _slow_run(tmp_path, {"saver.freq_steps": every}, sinks=sinks)
    assert loop.train(run).finished and sinks[1].first_step == before
    assert_every_prompt_once(run)


@pytest.mark.parametrize("lag", [0, 2])
def test_exactly_once_after_a_kill_beside_any_update(tmp_path, monkeypatch, lag):
    """Each update is one beside which saves go on; the run goes on from what the disk has then."""
    copies, still = [], threading.RLock()  # no name changes while a copy is made: a kill sees one instant

    def locked(name):
        call = getattr(os, name)

        def wrapper(*args, **kwargs):
            with still:
                return call(*args, **kwargs)

        monkeypatch.setattr(os, name, wrapper)

    for name in ("rename", "replace", "unlink", "remove", "rmdir"):  # pathlib and shutil look them up here
        locked(name)

    class Copied(Slow):
        def update(self, batch):
            with still:
                copies.append(tmp_path / f"copy{len(copies)}")
                shutil.copytree(tmp_path / "run", copies[-1])
            return super().update(batch)

    overrides, sinks = {"rollout.max_head_offpolicyness": lag}, []
    loop.train(_slow_run(tmp_path / "run", overrides, learner=Copied, sinks=sinks))
    for directory in copies:
        run = _slow_run(directory, overrides, learner=RememberingLearner, sinks=sinks)
        assert loop.train(run).finished
        assert_every_prompt_once(run)
