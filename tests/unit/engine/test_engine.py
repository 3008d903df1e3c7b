"""Plugins are found by name, asked before anything starts, and paired by a transport that both have."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from rljax import engine, entry_points
from rljax.config import io as config_io
from rljax.config.allocation import Allocation, Pool, parse
from rljax.configs import base
from rljax.errors import SamplerError, UserError


@dataclasses.dataclass
class NotingLearner:
    """Notes what is done to it."""

    log: list

    def export(self, directory):
        self.log.append(("export", directory))
        if directory is not None:
            directory.mkdir(parents=True)
        return engine.WeightSource(directory=directory)

    def close(self):
        self.log.append("learner closed")


@dataclasses.dataclass
class NotingSampler:
    """Notes what is done to it."""

    log: list
    version: int = 0

    async def pause(self):
        self.log.append("pause")

    async def resume(self):
        self.log.append("resume")

    async def load_weights(self, source, version):
        if version < 0:
            raise ValueError("no such version")
        self.version = version
        self.log.append(("load", source.directory))

    async def close(self):
        self.log.append("sampler closed")


@dataclasses.dataclass
class ThirdParty:
    """A plugin as somebody else would write it."""

    transports: tuple[str, ...]
    dims: str = "d"
    samples: bool = True
    learns: bool = True
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
    monkeypatch.setattr(engine, "memory_backed", lambda: tmp_path)
    return lambda name, plugin, value="package:PLUGIN": points.append(EntryPoint(name, value, plugin))


CONFIG = config_io.from_dict(base.get_config())


def build(mode: str) -> engine.Engine:
    return engine.build(CONFIG, parse(mode, engine.find_plugin), Path("model"), Path("run"))


def test_best_transport_that_both_have(register):
    register("one", ThirdParty(("memory", "nccl", "directory")))
    register("two", ThirdParty(("memory", "directory", "nccl")))
    assert build("one:d1").transport == "memory"
    assert build("one:d1+two:d1").transport == "nccl"  # the sampler's order; memory is for one engine's own arrays
    assert build("two:d1+one:d1").transport == "directory"


def test_a_plugin_may_close_ways(register):
    class Choosy(ThirdParty):
        def routes(self, config, allocation):
            return ("pigeon", "directory")

    register("one", Choosy(("nccl", "directory", "pigeon")))
    register("two", ThirdParty(("nccl", "pigeon", "directory")))
    assert build("one:d2+two:d1").transport == "pigeon"


def test_no_transport_and_half_an_engine_are_refused(register):
    register("one", ThirdParty(("memory", "nccl")))
    register("two", ThirdParty(("directory",)))
    with pytest.raises(
        UserError, match=r"^allocation_mode: no way for weights from two \(directory\) to one \(memory, nccl\)$"
    ):
        build("one:d1+two:d1")
    register("server", ThirdParty(("directory",), learns=False))
    with pytest.raises(UserError, match=r"^allocation_mode: server:d1 only samples; training needs both"):
        build("server:d1")


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
    assert built.sampler.log == [("export", directory), "pause", ("load", directory), "resume"]
    assert list(built.publish_dir.iterdir()) == []


def test_a_killed_run_leaves_no_weights_in_memory(register, tmp_path):
    register("one", ThirdParty(("directory",)))
    killed = build("one:d1")
    (killed.publish_dir / "3").mkdir(parents=True)
    again = build("one:d1")
    assert again.publish_dir == killed.publish_dir and not again.publish_dir.exists()
    asyncio.run(again.publish(4))
    assert again.publish_dir.stat().st_mode & 0o777 == 0o700  # weights are nobody else's to read
    asyncio.run(again.close())
    assert again.sampler.log[-2:] == ["sampler closed", "learner closed"]
    assert list(tmp_path.iterdir()) == []


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
        if source.directory is None or not self.directories:
            self.log.append(("half a load", source.directory))
            raise SamplerError("the server is gone")
        await super().load_weights(source, version)


class WithBreaking(ThirdParty):
    def make_sampler(self, config, pool, model_dir):
        return Breaking(self.log)


def test_a_publish_that_a_server_breaks_is_done_through_a_directory_with_nothing_sampled_in_between(register):
    """Servers that got some of the weights would sample from a mixture, and call it the old version."""
    register("one", WithBreaking(("nccl",)))
    built = build("one:d1")
    asyncio.run(built.publish(7))
    assert built.sampler.version == 7
    directory = built.publish_dir / "7"
    steps = ["pause", ("half a load", None), ("export", directory), ("load", directory), "resume"]
    assert built.sampler.log == [("export", None), *steps]
    assert list(built.publish_dir.iterdir()) == []


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


@pytest.mark.parametrize(
    ("context", "row", "most", "culprit"),
    [(64, 128, 63, "one.context_length=64"), (200, 128, 96, "max_tokens_per_row=128"), (128, 128, 127, "one.context_length")],
)
def test_room_for_a_prompt_is_what_context_and_row_leave(register, context, row, most, culprit):
    """A completion ends where the context does, so the longest trajectory is min(prompt + 32, context)."""
    register("one", ThirdParty((), context=context))
    register("two", ThirdParty(()))
    config = config_io.changed(CONFIG, [("actor.mb_spec.max_tokens_per_row", str(row)), ("gconfig.max_new_tokens", "32")])
    room, why = engine.room_for_prompt(config, Allocation(sampler=Pool("one"), learner=Pool("one")))
    assert room == most and culprit in why
    fits = [n for n in range(1, 300) if n < context and min(n + 32, context) <= row]
    assert room == max(fits)
    assert engine.room_for_prompt(config, Allocation(sampler=Pool("two"), learner=None))[0] == row - 32
