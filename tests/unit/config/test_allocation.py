"""allocation_mode: the grammar of its docstring, and errors that point at the character."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljax.config.allocation import DIMS, Allocation, Pool, parse
from rljax.errors import UserError


@dataclasses.dataclass
class Abilities:
    dims: str
    samples: bool
    learns: bool


ENGINES = {
    "both": Abilities("dtf", True, True),
    "server": Abilities("dtpe", True, False),
    "trainer": Abilities("dtcf", False, True),
}


def abilities(name: str) -> Abilities:
    if name not in ENGINES:
        raise UserError(f"allocation_mode: no engine named {name!r} (installed: {', '.join(ENGINES)})")
    return ENGINES[name]


def refusal(text: str) -> tuple[str, str]:
    """First line of the error, and the character that its caret points at ("" for the end)."""
    with pytest.raises(UserError) as raised:
        parse(text, abilities)
    message, shown, caret = str(raised.value).split("\n")
    assert shown == f"  {text}"
    return message, shown[caret.index("^") :][:1]


def test_one_pool_is_what_its_engine_does():
    pool = Pool("both", data=1)
    assert parse("both:d1", abilities) == Allocation(pool, pool)
    assert parse("server.d4p1t1", abilities) == Allocation(Pool("server", data=4), None)
    assert parse("trainer:d4p1t1", abilities) == Allocation(None, Pool("trainer", data=4))
    assert parse("both", abilities) == parse("both:d1", abilities)


def test_plus_separates_and_bar_shares_devices():
    apart = parse("server:d4t2+trainer:d4", abilities)
    assert apart == Allocation(Pool("server", data=4, tensor=2), Pool("trainer", data=4, first_device=8))
    assert apart.devices == 12
    shared = parse("both:d2t2|both:f4", abilities)
    assert shared == Allocation(Pool("both", data=2, tensor=2), Pool("both", fsdp=4))
    assert shared.devices == 4


def test_expert_parallelism_takes_no_devices_of_its_own():
    allocation = parse("server:d2e2", abilities)
    assert allocation.sampler is not None and allocation.sampler.size == 2


@pytest.mark.parametrize(
    ("text", "culprit", "expected"),
    [
        ("", "", "expected the name of an engine"),
        (":d1", ":", "expected the name of an engine"),
        ("both:", "", "expected dims"),
        ("both:+both:d1", "+", "expected dims"),
        ("both:d2+", "", "expected the name of an engine"),
        ("both-d1", "-", "expected ':' and dims after both"),
        ("both:d1 + both:d1", " ", "no dim ' '"),
        ("both:x2", "x", "no dim 'x'"),
        ("both:dt2", "t", "dim d needs a count"),
        ("both:d0", "0", "dim d needs a count of at least 1"),
        ("both:d2t1d4", "d", "dim d is given twice"),
        ("both:d1+both:d1+both:d1", "+", "more than two pools"),
        ("other:d1", "o", "no engine named 'other'"),
        ("server:d1+other:d1", "o", "no engine named 'other'"),
        ("trainer:d2p4", "p", "trainer has no pipeline parallelism (p); it has d (data), t (tensor), c (context), f (fsdp)"),
        ("server:d4+trainer:p2", "p", "trainer has no pipeline parallelism"),
        ("trainer:d1+server:d1", "t", "trainer cannot sample"),
        ("server:d1+server:d1", "s", "server cannot learn"),
        ("both:d2|both:f4", "b", "pools on the same devices need as many: 2 for both:d2, not 4"),
    ],
)
def test_errors_point_at_the_character(text, culprit, expected):
    message, pointed = refusal(text)
    assert message.startswith(f"allocation_mode: {expected}")
    assert pointed == culprit


def test_error_of_the_second_pool_points_into_the_second_pool():
    with pytest.raises(UserError) as raised:
        parse("server:d4p2+trainer:d4p2", abilities)
    assert str(raised.value).split("\n")[2].index("^") - 2 == "server:d4p2+trainer:d4p2".rindex("p")


@st.composite
def pools(draw, names: list[str]) -> str:
    """Any pool of the grammar that its engine can do: a dim that it hasn't is named as 1."""
    name = draw(st.sampled_from(names))
    letters = draw(st.lists(st.sampled_from(sorted(DIMS)), unique=True))
    counts = [draw(st.integers(1, 12)) if letter in ENGINES[name].dims else 1 for letter in letters]
    dims = "".join(f"{letter}{count}" for letter, count in zip(letters, counts, strict=True))
    return f"{name}{draw(st.sampled_from('.:'))}{dims}" if dims else name


@st.composite
def modes(draw) -> str:
    form = draw(st.sampled_from(["one", "+", "|"]))
    if form == "one":
        return draw(pools(list(ENGINES)))
    if form == "|":
        return f"server:d{(size := draw(st.integers(1, 8)))}|trainer:f{size}"
    return draw(pools(["both", "server"])) + "+" + draw(pools(["both", "trainer"]))


@given(modes())
def test_format_then_parse_gives_the_same_allocation(text):
    allocation = parse(text, abilities)
    assert parse(str(allocation), abilities) == allocation
    assert str(parse(str(allocation), abilities)) == str(allocation)


@given(st.text(alphabet="bothserv:.+|dtpcef0129 ", max_size=24))
def test_any_text_parses_or_is_refused_with_a_caret(text):
    try:
        parse(text, abilities)
    except UserError as error:
        message, _, caret = str(error).split("\n")
        assert message.startswith("allocation_mode: ") and 0 <= caret.index("^") - 2 <= len(text)
