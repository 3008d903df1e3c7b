"""Rows of logits at once: the config's choice, else as many as a tenth of the memory holds, within bounds."""

import pytest

from rljax.hf.activations import FEWEST_ROWS, LOGIT_BYTES, LOGITS_SHARE, MOST_ROWS, logit_rows


@pytest.mark.parametrize("memory", [None, 10**9, 10**12])
def test_a_choice_is_kept(memory):
    assert logit_rows(17, 151_936, memory) == 17


def test_without_a_known_memory_there_are_the_fewest():
    assert logit_rows(None, 10) == FEWEST_ROWS


@pytest.mark.parametrize("vocabulary", [97, 49_152, 151_936, 262_144])
def test_the_most_rows_that_fit_are_taken(vocabulary):
    for gigabytes in range(1, 300, 7):
        memory = gigabytes * 10**9
        rows = logit_rows(None, vocabulary, memory)

        def fits(rows, memory=memory):
            return LOGIT_BYTES * vocabulary * rows <= LOGITS_SHARE * memory

        assert rows == FEWEST_ROWS or fits(rows)
        assert rows == MOST_ROWS or not fits(2 * rows)
