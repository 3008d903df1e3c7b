"""Pages speak of what there is: tests, files, links, names of invariants, one spelling."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rljax
from tests.import_rule import BARE

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])
INVARIANTS = REPOSITORY / "docs" / "invariants.md"
FOLDERS = ("backends", "bazel", "configs", "docs", "engines", "experiments", "rljax", "tests")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
TEST = re.compile(r"`([\w/.]+\.py)::((?:\w+::)?test_\w+)`")
NUMBERED = re.compile(r"\b(law|trap)s?[ _]?\d", re.IGNORECASE)
BRITISH = re.compile(
    r"(token|normal|initial|optim|minim|maxim|general|serial|organ|recogn|synchron)is(e|ed|er|es|ing|ation)(\b|_)"
    r"|neighbour|behaviour|colour|centre|centred|labelled|modelled",
    re.IGNORECASE,
)


def sources() -> Iterator[Path]:
    """Every file of Python in the tree but this one, each once: not through the links inside
    rljax/.
    """
    links = {REPOSITORY / "rljax" / name for name in BARE}
    for folder in FOLDERS:
        for file in (REPOSITORY / folder).rglob("*.py"):
            if not links & set(file.parents) and file != Path(__file__).resolve():
                yield file


def named_tests(file: Path) -> set[str]:
    """Its tests, as pytest names them: `test_x`, or `TestY::test_x` in a class."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        functions = [n for n in inside if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        found |= {prefix + n.name for n in functions if n.name.startswith("test_")}
    return found


def anchors_of(page: Path) -> set[str]:
    """Its headings as GitHub's fragments."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def entries() -> dict[str, str]:
    """What the page of invariants says under each name: a heading of the third level."""
    parts = re.split(r"^(#{2,3}) (.*)$", INVARIANTS.read_text(), flags=re.MULTILINE)[1:]
    return {heading: text for level, heading, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True) if level == "###"}


def test_every_invariant_has_tests_that_exist():
    for heading, text in entries().items():
        named = TEST.findall(text)
        assert named, f"{heading}: no test holds it"
        missing = [f"{file}::{name}" for file, name in named if name not in named_tests(REPOSITORY / file)]
        assert not missing, f"{heading}: {missing}"


def test_every_kind_of_fault_has_tests_that_exist():
    rows = [line for line in INVARIANTS.read_text().splitlines() if line.startswith("| ") and "::test_" in line]
    assert rows
    for row in rows:
        named = TEST.findall(row)
        assert len(named) == row.count("::test_"), row
        assert [f"{file}::{name}" for file, name in named if name not in named_tests(REPOSITORY / file)] == []


def test_every_test_that_begins_with_an_invariants_name_is_on_the_page():
    prefixes = tuple("test_" + re.sub(r"[^a-z0-9]+", "_", heading.lower()) + "_" for heading in entries())
    on_the_page = {name for _, name in TEST.findall(INVARIANTS.read_text())}
    for folder in ("tests", "rljax/testing"):
        for file in (REPOSITORY / folder).rglob("*.py"):
            named = {name for name in named_tests(file) if name.rpartition("::")[2].startswith(prefixes)}
            assert named <= on_the_page, f"{file}: {sorted(named - on_the_page)}"


@pytest.mark.parametrize("what", [NUMBERED, BRITISH], ids=["invariants have names, not numbers", "American spelling"])
def test_no_file_has(what):
    found = [
        f"{file.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for file in (*PAGES, *sources())
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if what.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors_of(file), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    names = re.findall(rf"(?<![\w/.$-])(?:{'|'.join(FOLDERS)})/[\w/.-]*\w\.(?:py|md|png|json|yaml)\b", page.read_text())
    missing = [name for name in names if not (REPOSITORY / ("rljax" if name.startswith(BARE) else "") / name).exists()]
    assert missing == []


def test_the_index_has_every_page():
    index = REPOSITORY / "docs" / "README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(index.read_text())}
    assert {page for page in PAGES if page != index} <= linked


def test_the_citation_is_of_this_version():
    assert f"\nversion: {rljax.__version__}\n" in (REPOSITORY / "CITATION.cff").read_text()
