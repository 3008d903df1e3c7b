"""Files that a user's function depends on: its digest changes where an edit of one can change its
results.
"""

import importlib
import sys
from pathlib import Path

import pytest

from rljax.config import digests, registry
from rljax.config.sources import Sources
from rljax.testing.harness import make_config

# A package "mine": its reward is in rewards.py, what that uses in parsing.py, and what that uses in deeper.py.
DEEPER = """
from mine import rewards  # a circle
scale = 2
def factor():
    return 3
def unused():
    return 4
"""
PARSING = """
import json, os
import numpy as np
import mine.deeper as deep
from .deeper import scale as scaling
LEAST = 1
UNUSED = 1
def helper(text):
    return LEAST * len(text) * deep.factor() * scaling
def unused(text):
    return UNUSED
class Base:
    def score(self, text):
        return helper(text) + 10
"""
WAYS = {  # each defines reward(prompt, completion)
    "from .x import f": "from .parsing import helper\ndef reward(p, c): return helper(c)",
    "from .x import f as g": "from .parsing import helper as g\ndef reward(p, c): return g(c)",
    "from package import f": "from mine import again\ndef reward(p, c): return again(c)",
    "from . import x": "from . import parsing\ndef reward(p, c): return parsing.helper(c)",
    "from package import x": "from mine import parsing as q\ndef reward(p, c): return q.helper(c)",
    "import package.x": "import mine.parsing\ndef reward(p, c): return mine.parsing.helper(c)",
    "import package.x as y": "import mine.parsing as y\ndef reward(p, c): return y.helper(c)",
    "import package": "import mine\ndef reward(p, c): return mine.again(c)",
    "from x import *": "from .parsing import *\ndef reward(p, c): return helper(c)",
    "try": "try:\n    from .parsing import helper\nexcept ImportError:\n    helper = len\ndef reward(p, c): return helper(c)",
    "when it is called": "def reward(p, c):\n    from .parsing import helper\n    return helper(c)",
    "import when it is called": "def reward(p, c):\n    import mine.parsing as y\n    return y.helper(c)",
    "a base class": "from .parsing import Base\nclass Own(Base): pass\ndef reward(p, c): return Own().score(c)",
    "a module as an argument": "from . import parsing\ndef reward(p, c): return getattr(parsing, 'helper')(c)",
    "a table": "from .parsing import helper\nTABLE = {'f': helper}\ndef reward(p, c): return TABLE['f'](c)",
    "__getattr__": "import mine.lazy\ndef reward(p, c): return mine.lazy.anything(c)",
}
EDITS = {
    "the helper": ("parsing.py", "len(text) *", "(len(text) + 1) *"),
    "its constant": ("parsing.py", "LEAST = 1", "LEAST = 7"),
    "a function of a third file": ("deeper.py", "return 3", "return 5"),
    "a constant of a third file": ("deeper.py", "scale = 2", "scale = 8"),
    "a comment": ("parsing.py", "import json, os", "# a comment\n\nimport json, os"),
    "another function": ("parsing.py", "return UNUSED", "return UNUSED + 1"),
    "another function of a third file": ("deeper.py", "return 4", "return 5"),
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes the package, and makes sure that no test leaves any of it imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two edits within a second have one time
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "__init__.py").write_text("def again(text):\n    from .parsing import helper\n    return helper(text)\n")
    (folder / "parsing.py").write_text(PARSING)
    (folder / "deeper.py").write_text(DEEPER)
    (folder / "lazy.py").write_text("from . import parsing\ndef __getattr__(name): return parsing.helper\n")
    (folder / "rewards.py").write_text("")
    yield folder
    forget()


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def edit(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def result():
    forget()
    return importlib.import_module("mine.rewards").reward("", "abc")


def digest_by_name():
    forget()
    found = digests.digests_of(make_config({"reward.name": "mine.rewards:reward"}))
    assert not [name for name in sys.modules if name.partition(".")[0] == "mine"]  # nothing was imported
    return found["reward.name mine.rewards:reward"]


def of_cell(source):
    """Returns the result and the digest of a function of a notebook's cell."""
    forget()
    names = {"__name__": "__main__", "__package__": "mine"}
    exec(compile(source, "<cell>", "exec"), names)
    name = registry.provide(names["reward"])
    digest = digests.digests_of(make_config({"reward.name": name}))[f"reward.name {name}"]
    return names["reward"]("", "abc"), digest


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("which", EDITS)
def test_a_digest_changes_when_an_edit_of_any_file_can_change_the_result(package, way, which):
    file, old, new = EDITS[which]
    (package / "rewards.py").write_text(WAYS[way])
    before = result(), digest_by_name()
    edit(package / file, old, new)
    after = result(), digest_by_name()
    if way == "a module as an argument" and which == "another function":
        return  # any of its functions may be meant
    assert (after[1] == before[1]) is (after[0] == before[0])


@pytest.mark.parametrize("way", [way for way in WAYS if way != "a module as an argument"])
@pytest.mark.parametrize("which", ["the helper", "a constant of a third file", "another function", "a comment"])
def test_a_cells_function_is_digested_with_the_files_that_it_imports(package, way, which):
    file, old, new = EDITS[which]
    before = of_cell(WAYS[way])
    edit(package / file, old, new)
    after = of_cell(WAYS[way])
    assert (after[1] == before[1]) is (after[0] == before[0])


def test_what_is_installed_and_pythons_own_are_not_read(package):
    (package / "rewards.py").write_text(
        "import json, numpy as np, rljax, rljax.rewards.exact as exact, no_such_module\nfrom os.path import join\n"
        "def reward(p, c): return json.loads(c), np.mean, rljax.train, exact.reward, join, no_such_module.f"
    )
    sources = Sources()
    sources.add("mine.rewards", ["reward"])
    assert [name for name, module in sources._modules.items() if module is not None] == ["mine.rewards"]


def test_a_folder_without_an_init_file_is_a_package_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rewards.py").write_text("from .other import f\ndef reward(p, c): return f(c)")
    seen = set()
    for number in (1, 2):
        (tmp_path / "mine" / "other.py").write_text(f"def f(c): return {number}")
        seen.add(digest_by_name())
    assert len(seen) == 2


def test_each_file_is_read_once(tmp_path, monkeypatch):
    """Twenty files of a thousand lines that import each other."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine").mkdir()
    body = "".join(f"def f{i}(x):\n    y = g(x, {i})\n    return [y for _ in range(x)]\n\n" for i in range(250))
    for i in range(20):
        others = (i + 1) % 20, (i * 7 + 3) % 20
        imports = "from mine import m{}, m{}\ndef g(x, i): return m{}.f1, m{}.f2\n".format(*others, *others)
        (tmp_path / "mine" / f"m{i}.py").write_text(imports + body)
    read = []
    bytes_of = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read.append(self) or bytes_of(self))
    sources = Sources()
    sources.add("mine.m0", ["f0"])
    found = sources.text()
    assert len(read) == len(set(read)) == 20
    assert found.count("FunctionDef(name='g'") == 20 and found.count("FunctionDef(name='f9'") == 0
