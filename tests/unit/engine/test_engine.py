"""Plugins are found by name, asked before anything starts, and paired by a transport that both
have.
"""

import asyncio
import dataclasses
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rljax import engine, entry_points
from rljax.config import io as config_io
from rljax.config.allocation import Allocation, Pool, parse
from rljax.configs import base
from rljax.engine import ExportToDirectory, ExportToSampler, WeightsInDirectory, WeightsInMemory, storage
from rljax.errors import SamplerError, UserError
from rljax.types import Completion, Finish


@dataclasses.dataclass
class NotingLearner:
    """Notes what is done to it."""

    log: list

    def export(self, target):
        self.log.append(("export", target))
        if isinstance(target, ExportToSampler):
            return WeightsInMemory(None)
        target.directory.mkdir(parents=True)
        return WeightsInDirectory(target.directory)

    def close(self):
        self.log.append("learner closed")


@dataclasses.dataclass
class NotingSampler(engine.Sampler):
    """Notes what is done to it."""

    log: list
    version: int = 0

    async def generate(self, request):
        raise AssertionError("nothing is generated here")

    async def pause(self):
        self.log.append("pause")

    async def resume(self):
        self.log.append("resume")

    async def load_weights(self, source, version):
        if version < 0:
            raise ValueError("no such version")
        self.version = version
        self.log.append(("load", source))

    async def close(self):
        self.log.append("sampler closed")


@dataclasses.dataclass
class ThirdParty(engine.Plugin):
    """A plugin as somebody else would write it."""

    transports: tuple[str, ...]
    samples: bool = True
    learns: bool = True
    attaches: bool = False
    formats: tuple[str, ...] = ()
    refused: str = ""
    context: int | None = None
    config_class: type | None = None
    log: list = dataclasses.field(default_factory=list)

    def check(self, config, allocation):
        if self.refused:
            raise UserError(self.refused)

    def context_length(self, config):
        return self.context

    def make_sampler(self, config, pool, model_dir):
        return NotingSampler(self.log)

    def make_learner(self, config, pool, model_dir):
        return NotingLearner(self.log)


@dataclasses.dataclass
class EntryPoint:
    name: str
    value: str
    plugin: ThirdParty

    def load(self):
        return self.plugin


@pytest.fixture
def register(monkeypatch, tmp_path):
    """Registers plugins under names, as if each were installed by a package of its own."""
    points = []
    monkeypatch.setattr(entry_points, "installed", lambda: points)
    monkeypatch.setattr(storage, "memory_backed", lambda: tmp_path)
    monkeypatch.setattr(storage, "SPARE", 0)
    return lambda name, plugin, value="package:PLUGIN": points.append(EntryPoint(name, value, plugin))


CONFIG = config_io.from_dict(base.get_config())


def build(mode: str) -> engine.Engine:
    return engine.build(CONFIG, parse(mode, engine.find_plugin), Path("model"), Path("run"))


def transport(mode: str) -> str:
    return engine.transport_of(CONFIG, parse(mode, engine.find_plugin))


def test_best_transport_that_both_have(register):
    register("one", ThirdParty(("memory", "nccl", "directory")))
    register("two", ThirdParty(("memory", "directory", "nccl")))
    assert transport("one:d1") == "memory"
    assert transport("one:d1+two:d1") == "nccl"  # the sampler's order; memory is for one engine's own arrays
    assert transport("two:d1+one:d1") == "directory"
    pools = parse("one:d3+two:d1", engine.find_plugin)
    assert build("one:d3+two:d1").in_memory == ExportToSampler("nccl", pools.sampler)  # what the learner is told
    assert build("two:d1+one:d1").in_memory is None


def test_a_plugin_may_close_ways(register):
    class Choosy(ThirdParty):
        def routes(self, config, allocation):
            return ("pigeon", "directory")

    register("one", Choosy(("nccl", "directory", "pigeon")))
    register("two", ThirdParty(("nccl", "pigeon", "directory")))
    assert transport("one:d2+two:d1") == "pigeon"


def test_no_transport_and_half_an_engine_are_refused(register):
    register("one", ThirdParty(("memory", "nccl")))
    register("two", ThirdParty(("directory",)))
    with pytest.raises(
        UserError, match=r"^allocation_mode: no transport for weights from two \(directory\) to one \(memory, nccl\)$"
    ):
        build("one:d1+two:d1")
    register("server", ThirdParty(("directory",), learns=False))
    with pytest.raises(UserError, match=r"^allocation_mode: server:d1 only samples; training needs both"):
        build("server:d1")


def test_what_samples_needs_a_sampler(register):
    learner, sampler = Pool("two", data=2), Pool("one")
    assert engine.require_sampler(Allocation(sampler, learner)) == sampler
    with pytest.raises(UserError, match=rf"^allocation_mode: {learner} cannot sample$"):
        engine.require_sampler(Allocation(None, learner))
    plugin = ThirdParty(("memory",))
    register("one", plugin)
    assert engine.make_lone_sampler(CONFIG, sampler, Path("model")).log is plugin.log


def test_each_engine_of_the_allocation_prepares_the_process_once(register):
    class Preparing(ThirdParty):
        def prepare(self):
            prepared.append(self)

    prepared = []
    one, two, other = (Preparing(("directory",)) for _ in range(3))
    register("one", one)
    register("two", two)
    register("other", other)
    engine.prepare(Allocation(Pool("one"), Pool("two")))
    assert sorted(map(id, prepared)) == sorted(map(id, (one, two)))
    prepared.clear()
    engine.prepare(Allocation(Pool("one"), Pool("one")))
    assert prepared == [one]


def test_each_engine_is_asked_whether_it_can(register):
    register("one", ThirdParty(("memory",)))
    register("two", ThirdParty(("directory",), refused="two.slots: no such thing"))
    engine.check(CONFIG, Allocation(Pool("one"), Pool("one")))
    with pytest.raises(UserError, match=r"^two\.slots: no such thing$"):
        engine.check(CONFIG, Allocation(Pool("one"), Pool("two")))


def test_publish_by_directory_pauses_loads_resumes_and_leaves_nothing(register):
    register("one", ThirdParty(("directory",)))
    built = build("one:d1")
    asyncio.run(built.publish(7))
    directory = built.publish_dir / "7"
    assert built.sampler.version == 7
    export, load = ("export", ExportToDirectory(directory)), ("load", WeightsInDirectory(directory))
    assert built.sampler.log == [export, "pause", load, "resume"]
    assert [path.name for path in built.publish_dir.iterdir()] == [storage.LOCK]


@pytest.mark.parametrize("broken", ["sampler", "learner"])
def test_what_a_side_raises_in_closing_stops_neither_the_other_nor_the_cleaning_up(register, broken):
    register("one", ThirdParty(("directory",)))
    built = build("one:d1")

    def fail():
        raise OSError("cannot close")

    async def fail_later():
        fail()

    if broken == "sampler":
        built.sampler.close = fail_later
    else:
        built.learner.close = fail
    with pytest.raises(OSError, match="cannot close"):
        asyncio.run(built.close())
    other = {"sampler": "learner closed", "learner": "sampler closed"}[broken]
    assert other in built.sampler.log and not built.publish_dir.exists()


KILLED = """
import os, sys
from pathlib import Path
from rljax.engine import private_directory
directory = private_directory(Path(sys.argv[1]), "publish")
(directory / "3").mkdir()
print(directory, flush=True)
if sys.argv[2] == "lives":
    sys.stdin.read()
os.kill(os.getpid(), 9)
"""


def test_a_killed_run_leaves_no_weights_in_memory_and_a_living_one_keeps_its_own(register, tmp_path):
    register("one", ThirdParty(("directory",)))
    killed, living = (
        subprocess.Popen(
            [sys.executable, "-c", KILLED, tmp_path, end], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for end in ("killed", "lives")
    )
    left, kept = (Path(process.stdout.readline().strip()) for process in (killed, living))
    killed.wait()
    built = build("one:d1")
    assert kept.exists() and not left.exists() and built.publish_dir.parent == tmp_path
    asyncio.run(built.publish(4))
    assert built.publish_dir.stat().st_mode & 0o777 == 0o700  # weights are nobody else's to read
    asyncio.run(built.close())
    assert built.sampler.log[-2:] == ["sampler closed", "learner closed"]
    living.communicate()
    build("one:d1").learner.close()
    assert not kept.exists() and not built.publish_dir.exists()


def test_a_directory_that_others_made_first_takes_no_weights(register, tmp_path):
    register("one", ThirdParty(("directory",)))
    built = build("one:d1")
    storage.remove_private(built.publish_dir)
    (tmp_path / "elsewhere").mkdir()
    built.publish_dir.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"^rollout\.publish_dir: .* belongs to others, or they can write to it"):
        asyncio.run(built.publish(1))
    built.publish_dir.unlink()
    built.publish_dir.mkdir()
    built.publish_dir.chmod(0o777)
    with pytest.raises(UserError, match="belongs to others"):
        asyncio.run(built.publish(1))


def test_a_place_that_is_too_small_is_named_before_anything_is_made(monkeypatch, tmp_path):
    """The usual memory of a container, 64 MB, beside a model of 300 MB, and a disk that is as small."""
    small, large, usage = tmp_path / "small", tmp_path / "large", shutil.disk_usage(tmp_path)
    small.mkdir()
    large.mkdir()
    monkeypatch.setattr(storage, "memory_backed", lambda: small)
    free = {small: 64 << 20, large: 2 << 30}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free[Path(path)]))
    monkeypatch.setattr(storage.tempfile, "gettempdir", lambda: str(large))
    place = functools.partial(storage.publish_parent, workdir=tmp_path, here=True, needed=300 << 20)
    assert place("") == large
    for configured in (str(small), ""):
        monkeypatch.setattr(storage.tempfile, "gettempdir", lambda: str(small))
        with pytest.raises(UserError, match=r"^rollout\.publish_dir: .*/small has 64 MB free, .* need 616 MB there"):
            place(configured)
    with pytest.raises(UserError, match="no such directory: /nowhere"):
        place("/nowhere")


def test_servers_elsewhere_get_weights_below_the_workdir(tmp_path):
    place = functools.partial(storage.publish_parent, "", tmp_path, needed=0)
    assert place(here=False) == tmp_path and place(here=True) == storage.memory_backed()
    plugin = engine.find_plugin("http")
    for address, here in (("127.0.0.1:1,localhost:2", True), ("127.0.0.1:1,10.0.0.4:2", False)):
        assert plugin.is_here(config_io.changed(CONFIG, [("rollout.addr", address)])) == here


def test_a_full_place_is_named(register):
    """safetensors' own error has the system's words, and no name."""

    class Full(ThirdParty):
        def make_learner(self, config, pool, model_dir):
            learner = super().make_learner(config, pool, model_dir)
            learner.export = lambda target: (_ for _ in ()).throw(
                RuntimeError("I/O error: No space left on device (os error 28)")
            )
            return learner

    register("one", Full(("directory",)))
    built = build("one:d1")
    with pytest.raises(
        UserError, match=rf"^rollout\.publish_dir: {built.publish_dir}: No space left on device for the weights"
    ):
        asyncio.run(built.publish(1))


def test_publish_that_fails_resumes_the_sampler(register):
    register("one", ThirdParty(("memory",)))
    built = build("one:d1")
    with pytest.raises(ValueError, match="no such version"):
        asyncio.run(built.publish(-1))
    assert built.sampler.log[-1] == "resume"


class Breaking(NotingSampler):
    """Takes no weights from memory; from directories as many times as it is told."""

    directories = 1

    async def load_weights(self, source, version):
        if not isinstance(source, WeightsInDirectory) or not self.directories:
            self.log.append("half a load")
            raise SamplerError("the server is gone")
        await super().load_weights(source, version)


class WithBreaking(ThirdParty):
    def make_sampler(self, config, pool, model_dir):
        return Breaking(self.log)


def test_a_publish_that_a_server_breaks_is_done_through_a_directory_with_nothing_sampled_in_between(register):
    """Servers that got some of the weights would sample from a mixture, and call it the old
    version.
    """
    register("one", WithBreaking(("nccl",)))
    built = build("one:d1")
    asyncio.run(built.publish(7))
    assert built.sampler.version == 7
    directory = built.publish_dir / "7"
    export, load = ("export", ExportToDirectory(directory)), ("load", WeightsInDirectory(directory))
    steps = ["pause", "half a load", export, load, "resume"]
    assert built.sampler.log == [("export", ExportToSampler("nccl", Pool("one"))), *steps]
    assert [path.name for path in built.publish_dir.iterdir()] == [storage.LOCK]


def test_where_the_directory_fails_too_nothing_is_sampled_any_more(register):
    register("one", WithBreaking(("nccl",)))
    built = build("one:d1")
    built.sampler.directories = 0
    with pytest.raises(SamplerError, match="the server is gone"):
        asyncio.run(built.publish(7))
    assert "resume" not in built.sampler.log and built.sampler.version == 0


@pytest.mark.parametrize("lends", [False, True])
def test_a_sampler_lends_its_memory_while_the_learner_updates_if_the_config_wants_it(register, lends):
    class Lending(NotingSampler):
        async def release(self):
            self.log.append("release")

        async def reclaim(self):
            self.log.append("reclaim")

    class Sampling(ThirdParty):
        def make_sampler(self, config, pool, model_dir):
            sampler = Lending(self.log)
            sampler.lends = lends
            return sampler

    register("one", Sampling(("memory",)))
    built = build("one:d1")

    async def step(fails: bool) -> None:
        async with built.learning():
            built.sampler.log.append("update")
            if fails:
                raise ValueError

    asyncio.run(step(fails=False))
    assert built.sampler.log == (["release", "update", "reclaim"] if lends else ["update"])
    with pytest.raises(ValueError):
        asyncio.run(step(fails=True))
    assert built.sampler.log[-1] == ("reclaim" if lends else "update")


def test_unknown_engine_names_the_installed(register):
    register("one", ThirdParty(()))
    with pytest.raises(UserError, match=r"no engine named 'won' \(installed: one\)"):
        engine.find_plugin("won")


def test_a_name_registered_twice_is_an_error_unless_it_is_the_same_object(register):
    plugin = ThirdParty(())
    register("one", plugin)
    register("one", plugin)
    assert engine.find_plugin("one") is plugin
    register("one", plugin, value="elsewhere:PLUGIN")
    with pytest.raises(UserError, match="the engine name 'one' is registered twice"):
        engine.find_plugin("one")


def test_an_entry_point_that_is_no_plugin_or_cannot_be_loaded_is_named(register):
    class Absent(EntryPoint):
        def load(self):
            raise ImportError("No module named 'gone'")

    register("one", object())
    with pytest.raises(UserError, match=r"^allocation_mode: the engine 'one' is a object, not an rljax.engine.Plugin$"):
        engine.find_plugin("one")
    entry_points.installed().append(Absent("two", "gone:PLUGIN", None))
    with pytest.raises(UserError, match=r"^allocation_mode: the engine 'two' can't be loaded from gone:PLUGIN: ImportError"):
        engine.find_plugin("two")
    register("three", ThirdParty((), formats=("paper",)))
    assert engine.portable_plugin("paper") is engine.find_plugin("three")  # another engine's trouble is its own
    assert engine.portable_plugin("stone") is None


def test_an_engine_that_only_learns_or_only_samples_says_so(register):
    register("idle", engine.Plugin())
    plugin, pool = engine.find_plugin("idle"), Pool("idle", data=2)
    with pytest.raises(UserError, match=r"^allocation_mode: idle cannot sample \(.*SAMPLER:d1\+idle:d2\)$"):
        plugin.make_sampler(CONFIG, pool, Path())
    with pytest.raises(UserError, match=r"^allocation_mode: idle cannot learn \(.*idle:d2\+LEARNER:d1\)$"):
        plugin.make_learner(CONFIG, pool, Path())


def test_servers_that_run_already_are_those_of_the_engine_that_attaches(register):
    addressed = dataclasses.replace(CONFIG, rollout=dataclasses.replace(CONFIG.rollout, addr="10.0.0.1:1"))

    def sampler(mode: str) -> Pool:
        return engine.allocate(dataclasses.replace(addressed, allocation_mode=mode)).sampler

    register("one", ThirdParty(("directory",)))
    with pytest.raises(UserError, match=r"^rollout\.addr: no engine attaches to servers"):
        sampler("one:d4")
    register("near", ThirdParty(("directory",), attaches=True, learns=False))
    assert sampler("one:d4") == Pool("near")
    register("far", ThirdParty(("directory",), attaches=True, learns=False))
    with pytest.raises(UserError, match=r"^rollout\.addr: several engines attach to servers: far, near \(name the one"):
        sampler("one:d4")
    assert sampler("far:d1+one:d1") == Pool("far")


def test_a_target_reaches_other_processes_as_it_is():
    for target in (ExportToDirectory(Path("/a/b")), ExportToSampler("nccl", Pool("one", data=2, tensor=4))):
        assert engine.target_from_json(json.loads(json.dumps(target.to_json()))) == target
    assert engine.target_from_json(ExportToDirectory(Path("here")).to_json()) == ExportToDirectory(Path.cwd() / "here")


def test_what_a_generator_and_a_sampler_need_not_write():
    """A stream is the completion in one piece; nothing is lent; nothing ever lacks weights."""
    done = Completion(np.array([3], np.int32), np.array([-1.0], np.float32), np.array([4], np.int32), Finish.STOP)

    class Least(NotingSampler):
        async def generate(self, request):
            return done

    async def run() -> None:
        sampler = Least([])
        (piece,) = [piece async for piece in sampler.stream(None)]
        assert (piece.token_ids, piece.logp, piece.versions) == (done.token_ids, done.logp, done.versions)
        assert piece.finish is Finish.STOP
        assert not sampler.lends
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sampler.lacks_weights(), 0.01)

    asyncio.run(run())


def test_what_a_generator_must_write_is_missed_when_it_is_made():
    class Forgotten(engine.Generator):
        version = 0

    with pytest.raises(TypeError, match=r"abstract method '?generate"):
        Forgotten()


@pytest.mark.parametrize(
    ("context", "row", "most", "culprit"),
    [(64, 128, 63, "one.context_length=64"), (200, 128, 96, "max_tokens_per_row=128"), (128, 128, 127, "one.context_length")],
)
def test_room_for_a_prompt_is_what_context_and_row_leave(register, context, row, most, culprit):
    """A completion ends where the context does, so the longest trajectory is min(prompt + 32,
    context).
    """
    register("one", ThirdParty((), context=context))
    register("two", ThirdParty(()))
    config = config_io.changed(CONFIG, [("actor.mb_spec.max_tokens_per_row", str(row)), ("gconfig.max_new_tokens", "32")])
    room, why = engine.room_for_prompt(config, Allocation(sampler=Pool("one"), learner=Pool("one")))
    assert room == most and culprit in why
    fits = [n for n in range(1, 300) if n < context and min(n + 32, context) <= row]
    assert room == max(fits)
    assert engine.room_for_prompt(config, Allocation(sampler=Pool("two"), learner=None))[0] == row - 32
