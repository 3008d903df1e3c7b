"""An engine that somebody else's package brings has a section of its own, by its entry point
alone.
"""

import dataclasses
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from rljax import entry_points
from rljax.config import checks as config_checks
from rljax.config import io as config_io
from rljax.config.keys import NOT_NEGATIVE, POSITIVE, key, section
from rljax.config.schema import Config, EngineConfig
from rljax.configs import base
from rljax.errors import UserError

MODULE = "engine_of_a_third_party"
SOURCE = '''
import dataclasses
from rljax.config.keys import POSITIVE, key, section
from rljax.config.schema import EngineConfig

@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """What it keeps."""
    blocks: int = key(16, "Blocks of the cache.", POSITIVE)
    kind: str = key("paged", "How it is laid out.", choices=("paged", "flat"))

@dataclasses.dataclass(frozen=True)
class VllmConfig(EngineConfig):
    """A server."""
    max_num_seqs: int = key(256, "Requests decoded at once.", POSITIVE)
    swap: float | None = key(None, "Space on the host. None: what it likes.", unit="GiB")
    cache: CacheConfig = section(CacheConfig)

class Plugin:
    dims, samples, learns, transports, config_class = "dt", True, False, ("directory",), VllmConfig

class Bare:
    config_class = None

PLUGIN, BARE = Plugin(), Bare()
'''


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Installs engines, name by entry point, beside the project's own."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    own = entry_points.installed()

    def install(**values: str) -> None:
        points = [metadata.EntryPoint(name, value, entry_points.GROUP) for name, value in values.items()]
        monkeypatch.setattr(entry_points, "installed", lambda: (*own, *points))

    yield install
    sys.modules.pop(MODULE, None)


@pytest.fixture
def vllm(install):
    install(vllm=f"{MODULE}:PLUGIN")


def read(*overrides: str) -> Config:
    tree = base.get_config().to_dict()
    for override in ("actor.path=model", "train_dataset.path=data", *overrides):
        name, _, text = override.partition("=")
        config_io.apply_override(tree, name, text)
    config = config_io.from_dict(tree)
    config_checks.check(config)
    return config


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as raised:
        read(*overrides)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_an_override_is_read_by_the_engines_own_schema_and_written_and_read_back(vllm):
    config = read("vllm.max_num_seqs=8", "vllm.cache.kind=flat")
    values = config.engines["vllm"]
    assert (values.max_num_seqs, values.swap, values.cache.blocks, values.cache.kind) == (8, None, 16, "flat")
    assert type(values).of(config) is values
    text = config_io.to_json(config)
    assert json.loads(text)["vllm"] == {"max_num_seqs": 8, "swap": None, "cache": {"blocks": 16, "kind": "flat"}}
    assert config_io.from_json(text) == config
    assert config_io.changed(config, [("vllm.max_num_seqs", "9")]).engines["vllm"] == dataclasses.replace(
        values, max_num_seqs=9
    )


def test_a_config_file_sets_its_keys_as_any_others(vllm, tmp_path: Path):
    file = tmp_path / "config.py"
    file.write_text(
        "from rljax.configs import base\n"
        "def get_config():\n"
        "    config = base.get_config()\n"
        "    config.vllm.max_num_seqs = 2 * config.vllm.max_num_seqs\n"
        "    config.vllm.cache.kind = 'flat'\n"
        "    return config\n"
    )
    values = config_io.load(str(file), [("vllm.swap", "4")]).engines["vllm"]
    assert (values.max_num_seqs, values.cache.kind, values.swap) == (512, "flat", 4.0)


def test_a_config_that_says_nothing_of_it_has_its_defaults_where_it_runs(vllm):
    silent = read("allocation_mode=vllm:d1+jax:d1")
    assert not silent.engines
    resolved = config_io.resolve(silent)
    assert list(resolved.engines) == ["jax", "vllm"] and resolved.engines["vllm"].max_num_seqs == 256
    assert type(resolved.engines["vllm"]).of(silent) == resolved.engines["vllm"]
    assert config_io.from_json(config_io.to_json(resolved)) == resolved == config_io.resolve(resolved)
    assert "vllm" not in config_io.resolve(read()).engines


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("vllm.max_num_seqs=x", "vllm.max_num_seqs: expected an integer, got 'x'"),
        ("vllm.max_num_seqs=0", "vllm.max_num_seqs: must be positive, not 0"),
        ("vllm.cache.blocks=-1", "vllm.cache.blocks: must be positive, not -1"),
        ("vllm.cache.kind=pagd", "vllm.cache.kind: no such value: 'pagd' (did you mean paged?)"),
        ("vllm.max_num_seq=1", "vllm.max_num_seq: no such key (did you mean max_num_seqs)"),
        ("vllm.cache.x=1", "vllm.cache.x: no such key (known: blocks, kind)"),
        ("max_num_seqs=1", "max_num_seqs: no such key (did you mean vllm.max_num_seqs)"),
        ("vlm.max_num_seqs=1", "vlm: no such key (did you mean vllm)"),
        ("vllm=1", "vllm: a section; set one of its keys: vllm.max_num_seqs, vllm.swap, vllm.cache"),
        ("vllm.swap.x=1", "vllm.swap.x: vllm.swap is a value, not a section"),
    ],
)
def test_bad_values_and_names_are_refused_as_those_of_any_key(vllm, override, message):
    assert refusal(override) == message


def test_an_engine_that_is_not_installed_has_no_section():
    message = refusal("vllm.max_num_seqs=8")
    assert message.startswith("vllm: no such key (known: ")
    assert message.endswith(f"; installed engines: {', '.join(entry_points.names())})")
    with pytest.raises(UserError, match=r"^vllm: no such key"):
        config_io.from_dict(base.get_config().to_dict() | {"vllm": {"max_num_seqs": 8}})


@pytest.mark.parametrize(
    ("point", "message"),
    [
        (f"{MODULE}:BARE", "other: the engine other has no settings"),
        ("no_such_module:PLUGIN", "other: the engine 'other' can't be loaded from no_such_module:PLUGIN: ModuleNotFoundError"),
        (f"{MODULE}:NOTHING", "AttributeError"),
    ],
)
def test_what_is_wrong_with_an_engine_is_said_only_where_its_section_is_used(install, point, message):
    install(other=point)
    assert message in refusal("other.x=1")
    assert "did you mean gconfig.temperature" in refusal("actor.temperature=1.0")  # its trouble is not another key's
    assert read().seed == 1


def test_an_author_who_forgets_to_declare_is_told(install, monkeypatch):
    install(vllm=f"{MODULE}:PLUGIN", actor=f"{MODULE}:PLUGIN")
    plugin = entry_points.load("vllm")

    @dataclasses.dataclass(frozen=True)
    class Undeclared(EngineConfig):
        x: int = 1

    class Undecorated(EngineConfig):
        x: int = key(1, "Nothing.", POSITIVE)

    @dataclasses.dataclass(frozen=True)
    class Foreign:
        x: int = key(1, "Nothing.", NOT_NEGATIVE)

    for schema, message in [(Undeclared, "vllm.x: .*without"), (Undecorated, "config_class"), (Foreign, "config_class")]:
        monkeypatch.setattr(type(plugin), "config_class", schema)
        with pytest.raises(UserError, match=message):
            config_io.from_dict(base.get_config().to_dict() | {"vllm": {"x": 2}})
    with pytest.raises(UserError, match=r"^actor: an engine can't have the name of a key"):
        config_io.resolve(read("allocation_mode=actor:d1"))


def test_sections_of_sections_keep_the_defaults_of_their_place():
    @dataclasses.dataclass(frozen=True)
    class Inner:
        n: int = key(1, "A number.", POSITIVE)

    @dataclasses.dataclass(frozen=True)
    class Outer:
        first: Inner = section(Inner)
        second: Inner = section(Inner, n=2)

    assert (Outer().first.n, Outer().second.n) == (1, 2)


def test_sections_can_not_be_changed():
    config = config_io.resolve(read())
    with pytest.raises(TypeError):
        config.engines["jax"] = None  # type: ignore[index]


def test_only_a_section_that_is_used_imports_its_engine_and_never_a_framework():
    """Lists imported modules in a new process: without engines, and with all sections."""
    script = """
import sys
from rljax.config import engine_sections, io
from rljax.configs import base
config = io.from_dict(base.get_config())
assert not [name for name in sys.modules if name.startswith("rljax.engines")], "a plugin was imported"
tree = base.get_config()
tree.jax.slots = 8
io.from_dict(tree)
assert "rljax.engines.jax.plugin" in sys.modules and "rljax.engines.cuda.plugin" not in sys.modules
for name in ("fsdp", "sglang", "http", "fake"):
    engine_sections.find(name)
found = {"jax", "jaxlib", "flax", "torch", "sglang", "transformers"} & set(sys.modules)
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
