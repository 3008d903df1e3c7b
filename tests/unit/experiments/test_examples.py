"""Commands that pages and docstrings show: binaries, flags, config files, keys and allocations that there are."""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from rljax.config import io
from rljax.config.allocation import engines_of, parse
from rljax.engine import find_plugin
from rljax.entry_points import names
from rljax.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[3]
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])
SOURCES = sorted(path for folder in ("experiments", "configs") for path in (REPOSITORY / folder).rglob("*.py"))
SHOWN = re.compile(r"(?<![\w/.-])(?:python -m experiments\.|rljax )(bench[. ])?(\w+)((?: (?:'[^'\n]*'|[^`|;\n])*)?)")
OTHERS = ("bigram.",)  # sections of engines that a page writes
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*")  # stands for a value of the reader's


class Shown(NamedTuple):
    """A command as a page has it."""

    binary: str  # "train", "bench/packing"
    words: tuple[str, ...]
    line: str

    def flags(self) -> Iterator[tuple[str, str | None]]:
        """Yields the names and values of its flags, until a comment or the text that goes on."""
        for word in self.words:
            match = re.fullmatch(r"--([\w.]+)(?:=(.*))?", word)
            if match is None:
                return
            yield match[1], match[2]


def shown_in(path: Path) -> list[Shown]:
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    found = []
    for match in SHOWN.finditer(text.replace("\\_", "_").replace("\\\n", "")):
        try:
            words = shlex.split(match[3].partition(" #")[0])
        except ValueError:  # an apostrophe of the sentence around it
            words = match[3].split()
        found.append(Shown(("bench/" if match[1] else "") + match[2], tuple(words), match[0]))
    return [shown for shown in found if any(word.startswith("--") for word in shown.words)]


@cache
def flags_of(binary: Path) -> frozenset[str]:
    """Returns the flags that a binary and what it imports of experiments define."""
    tree, found = ast.parse(binary.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("flags.DEFINE_"):
            found |= {argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)}
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("define_config_flags"):
            found |= {"config", "workdir"}
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rljax.experiments"):
            folder = REPOSITORY.joinpath(*node.module.split(".")[1:])
            inner = [folder.with_suffix(".py"), *(folder / f"{alias.name}.py" for alias in node.names)]
            found |= {flag for path in inner if path.is_file() and path != binary for flag in flags_of(path)}
    return frozenset(found)


@pytest.mark.parametrize("paths", [PAGES, SOURCES], ids=["pages", "docstrings"])
def test_commands_that_are_shown_are_ones_that_can_be_given(paths):
    found = [(path, shown) for path in paths for shown in shown_in(path)]
    assert len(found) > 30
    wrong = [f"{path.name}: {shown.line}: {fault}" for path, shown in found for fault in faults(shown)]
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("rljax trian --config=quickstart", "no binary trian"),
        ("rljax train --config=quickstart --workdri=x", "no flag --workdri"),
        ("rljax train --config=quickstrat", "quickstrat"),
        ("rljax train --config=configs/quickstrat.py", "no such file"),
        ("rljax train --config=quickstart --config.actor.eps_clp=0.2", "eps_clp"),
        ("rljax serve --config=quickstart --config.allocation_mode='fsdp:d1|jax:d1'", "fsdp cannot sample"),
    ],
)
def test_one_that_cannot_is_found(line, fault, tmp_path):
    (tmp_path / "page.md").write_text(f"Do `{line}`, and see.\n")
    (shown,) = shown_in(tmp_path / "page.md")
    (found,) = faults(shown)
    assert fault in found


def config_of(given: str | None) -> str:
    """Returns the config of a command; base for one that is the reader's own."""
    if given is None or PLACEHOLDER.fullmatch(given) or (Path(given).suffix and not given.startswith("configs/")):
        return "base"
    return str(REPOSITORY / given) if given.startswith("configs/") else given


def faults(shown: Shown) -> Iterator[str]:
    binary = REPOSITORY / "experiments" / f"{shown.binary}.py"
    if not binary.is_file():
        yield f"no binary {shown.binary}"
        return
    given = list(shown.flags())
    yield from (f"no flag --{name}" for name, _ in given if not name.startswith("config.") and name not in flags_of(binary))
    keys = [(name.removeprefix("config."), value) for name, value in given if name.startswith("config.")]
    known = [(key, value) for key, value in keys if value is None or not PLACEHOLDER.fullmatch(value)]
    if fault := fault_of(config_of(dict(given).get("config")), tuple(pair for pair in known if not pair[0].startswith(OTHERS))):
        yield fault


@cache
def fault_of(location: str, keys: tuple[tuple[str, str | None], ...]) -> str:
    """Returns what is wrong with a config and keys of it; "" if nothing is."""
    try:
        mode = io.load(location, keys).allocation_mode
        if set(engines_of(mode)) <= set(names()):
            parse(mode, find_plugin)
    except UserError as error:
        return str(error)
    return ""
