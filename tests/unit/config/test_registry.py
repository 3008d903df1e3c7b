"""Names in a config are found, or refused in one line, whatever is wrong with them."""

import functools

import pytest

from rljax.config import registry
from rljax.data.formats import find_format
from rljax.errors import UserError
from rljax.workflows import find_filter

WANTS = ("prompt", "completion")


def two(prompt, completion):
    return 0.0


def more(prompt, completion, strict=True, *rest, **options):
    return 0.0


def one(completion):
    return 0.0


def three(prompt, completion, answer):
    return 0.0


def named(*, prompt, completion):
    return 0.0


class Callable:
    def __call__(self, prompt, completion):
        return 0.0


class Lacking:
    def __call__(self, completion):
        return 0.0


bound, partial, lacking = Callable(), functools.partial(three, answer="4"), Lacking()


@pytest.mark.parametrize("name", ["two", "more", "bound", "partial"])
def test_whatever_can_be_called_with_the_arguments_is_taken(name):
    assert registry.resolve("reward.name", f"{__name__}:{name}", {}, "reward", WANTS) is globals()[name]


@pytest.mark.parametrize(
    ("name", "has"), [("one", "completion"), ("three", "answer"), ("named", "prompt"), ("lacking", "completion")]
)
def test_what_can_not_is_refused_with_what_it_takes_and_what_it_would_get(name, has):
    with pytest.raises(UserError) as caught:
        registry.resolve("reward.name", f"{__name__}:{name}", {}, "reward", WANTS)
    line = str(caught.value)
    assert line.startswith(f"reward.name: {__name__}:{name} takes (") and has in line.partition(")")[0]
    assert "a reward is called with (prompt, completion): " in line and "\n" not in line


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("rw.py:score", r"\(write rw:score\)"), ("/home/a/rw.py:score", r"\(write rw:score, with /home/a in PYTHONPATH\)")],
)
def test_a_file_in_place_of_its_module_is_told_as_one(name, remedy):
    with pytest.raises(UserError, match=f"reward.name: .*rw.py is a file, and a reward is found by its module {remedy}"):
        registry.resolve("reward.name", name, {}, "reward", WANTS)


def test_filters_and_formats_are_looked_at_too():
    with pytest.raises(UserError, match=r"rollout.should_accept_fn: .* a filter is called with \(group\)"):
        find_filter(f"{__name__}:two")
    with pytest.raises(UserError, match=r"valid_dataset.type: .* a format is called with \(record, where\)"):
        find_format(f"{__name__}:one", "valid_dataset")


@pytest.mark.parametrize("library", ["math:hypot", "builtins:max"])
def test_what_tells_nothing_of_its_arguments_is_taken(library):
    assert callable(registry.resolve("reward.name", library, {}, "reward", WANTS))
