"""A learner of three ranks under the contract of all learners: leader's proxy and two followers.

The ranks are threads here; in tests/unit/multiprocess they are processes.
"""

import contextlib
import itertools
import socket
import threading
from concurrent.futures import Future

import pytest

from rljax.engine.rank import LOOPBACK, ProcessRank, free_port
from rljax.engines.fake.collective import Collective
from rljax.engines.fake.learner import FakeLearner
from rljax.errors import UserError
from rljax.multiprocess.follower import serve
from rljax.multiprocess.followers import Followers
from rljax.multiprocess.leader import DistributedLearner
from rljax.testing.learner_batches import config_of
from rljax.testing.learner_contract import LearnerContract

SIZE = 3
_numbers = itertools.count()


class Ranks:
    """Followers in threads, and the leader's proxy."""

    def __init__(self, config, model_dir) -> None:
        coordinator = f"{LOOPBACK}:{free_port(LOOPBACK)}"
        self.lost: list[str] = []
        self.followers = Followers(
            silence=60.0, explain=lambda rank: ("", ""), on_trouble=lambda: None, on_failure=lambda failure: None
        )

        def learner_of(rank: int) -> FakeLearner:
            return FakeLearner(config, model_dir, Collective(ProcessRank(rank, SIZE, coordinator=coordinator)))

        for rank in range(1, SIZE):
            ours, theirs = socket.socketpair()

            def follower(theirs=theirs, rank=rank) -> None:
                watch = lambda method, bitten: contextlib.nullcontext()  # noqa: E731
                serve(theirs, lambda fields: learner_of(rank), watch=watch, lost=self.lost.append)
                theirs.close()

            threading.Thread(target=follower, daemon=True).start()
            self.followers.add(ours, rank, f"thread {next(_numbers)}")
        self.learner = DistributedLearner(self.followers, self.followers.call_all("make", local=lambda: learner_of(0)))


class TestFakeRanks(LearnerContract):
    has_schedules = False

    @pytest.fixture(autouse=True)
    def _all_are_sound(self):
        self.made: list[Ranks] = []
        yield
        for ranks in self.made:
            assert ranks.followers.failure is None and not ranks.lost
            ranks.learner.close()

    def test_a_save_that_one_rank_cannot_end_fails_with_its_line(self, model_dir, tmp_path, monkeypatch):
        def begin_save(self, directory):
            future = Future()
            future.set_exception(UserError("the disk is full")) if self._peers.rank == 1 else None  # the others never end
            return future

        monkeypatch.setattr(FakeLearner, "begin_save", begin_save)
        with pytest.raises(UserError, match=r"^rank 1: the disk is full$"):
            self.make(config_of(), model_dir).begin_save(tmp_path / "saved").result(timeout=30)

    def make(self, config, model_dir):
        self.made.append(Ranks(config, model_dir))
        return self.made[-1].learner
