"""Shapes of known models."""

import pytest

from rljax.hf.shapes import SHAPES, shape_of
from rljax.hf.tensors import parameter_count


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_about_the_parameters_that_its_name_says(name):
    size = name.rpartition("-")[2]
    if size == "tiny":
        return
    told = float(size[:-1]) * {"b": 1e9, "m": 1e6}[size[-1]]
    assert parameter_count(shape_of(name)) == pytest.approx(told, rel=0.24)  # llama3.2-1b has 1.24
