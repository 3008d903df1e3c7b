"""The frames of users' code that a failed run shows."""

import pytest

from rljax.checkpoints.disk import os_error_behind
from rljax.errors import AgentError
from rljax.process import frames


def caught(length: int) -> BaseException:
    """Returns an error whose chain of causes, of `length` errors, begins anew at its end."""
    errors = [ValueError(f"of users' code {i}") for i in range(length)]
    for error, cause in zip(errors, [*errors[1:], errors[0]], strict=True):
        try:
            raise error from cause
        except ValueError:
            pass
    return errors[0]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_chain_of_errors_without_an_end_is_followed_once(length):
    assert f"ValueError: of users' code {length - 1}" in frames.shown(caught(length))
    assert os_error_behind(caught(length)) is None


def test_an_error_of_ours_that_is_its_own_cause_says_it_all_by_its_message():
    error = AgentError("no reward")
    error.__cause__ = error
    assert frames.shown(error) == ""
