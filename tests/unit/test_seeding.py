"""Seeds depend on names alone."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from rljax.seeding import seed_for

NAMES = st.tuples(st.integers(0, 9), st.text(max_size=6), st.integers(0, 40), st.integers(0, 9))


@given(NAMES, NAMES)
def test_different_names_get_different_seeds_in_range(one, other):
    assert 0 <= seed_for(*one) < 2**31
    assert (seed_for(*one) == seed_for(*other)) == (one == other)


def test_another_process_draws_the_same_seed():
    code = "from rljax.seeding import seed_for; print(seed_for(3, '0/17', 2, 1))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) == seed_for(3, "0/17", 2, 1)
