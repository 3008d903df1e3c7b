"""The compiled programs update the cache where it is: no operation in them makes anything as large as a layer's cache."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.backends.jax.sharding import single_device_mesh
from rljax.engines.jax.programs import ORDER, Programs
from rljax.testing.models import make_model

SLOTS, CONTEXT = 24, 256  # more slots than rows of any prefill or copy dispatch
KV_HEADS, HEAD_DIM = 2, 8

RESULT = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\w+)\[([\d,]*)\]\S* ([\w-]+)\((.*)$")
MOVES_NOTHING = {"parameter", "get-tuple-element", "bitcast"}
IN_PLACE = {"scatter", "dynamic-update-slice"}


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def programs(request, tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("model"), architecture=request.param)
    return Programs(
        model,
        single_device_mesh(),
        slots=SLOTS,
        context=CONTEXT,
        prefill_tokens=64,
        decode_steps=3,
        dtype="float32",
        param_dtype="float32",
        cache_dtype="float32",
    )


def compiled(programs, name):
    weights, cache, state = programs._weights, programs._cache, programs._state
    columns = jnp.zeros((SLOTS, ORDER.itemsize // 4), jnp.int32)
    lowered = {
        "decode": lambda: programs._decode.lower(weights, cache, state, columns),
        "copy": lambda: programs._copy.lower(cache, jnp.zeros((programs.copies, 2), jnp.int32), span=128),
        **{
            f"prefill{shape}": lambda shape=shape: programs._prefill.lower(
                weights, cache, jnp.zeros((shape[0], 3 + shape[1]), jnp.int32)
            )
            for shape in programs.shapes
        },
    }
    return lowered[name]().compile()


def bodies(text):
    """Computations of an HLO module by name, each a list of (result, elements, operation, rest of the line)."""
    found, current = {}, None
    for line in text.splitlines():
        if line.endswith("{") and " = " not in line:
            current = found.setdefault(line.removeprefix("ENTRY ").split()[0].lstrip("%"), [])
        elif current is not None and (match := RESULT.match(line)):
            name, _, dims, operation, rest = match.groups()
            current.append((name, int(np.prod([int(d) for d in dims.split(",") if d])), operation, rest, "ROOT" in line))
    return found


def large_operations(text, elements):
    """Every operation whose result is at least so large, but those that move nothing and updates in place."""
    computations = bodies(text)

    def updates(rest):
        """Whether a fusion's root is an update in place."""
        name = re.search(r"calls=%?([\w.-]+)", rest).group(1)
        return any(root and operation in IN_PLACE for *_, operation, _, root in computations[name])

    fused = {match for match in re.findall(r"calls=%?([\w.-]+)", text)}
    return [
        (name, operation)
        for computation, lines in computations.items()
        if computation not in fused
        for name, size, operation, rest, _ in lines
        if size >= elements and operation not in MOVES_NOTHING | IN_PLACE
        if not (operation == "fusion" and updates(rest))
    ]


LAYER = SLOTS * KV_HEADS * CONTEXT * HEAD_DIM
NAMES = ["decode", "copy", "prefill(1, 32)", "prefill(4, 16)", "prefill(1, 64)"]


@pytest.mark.parametrize("name", NAMES)
def test_no_operation_makes_anything_as_large_as_a_layer_s_cache(programs, name):
    program = compiled(programs, name)
    text = program.as_text()
    assert large_operations(text, LAYER) == []
    assert re.search(rf"f32\[{SLOTS},{KV_HEADS},{CONTEXT},{HEAD_DIM}\]", text)  # it was looked for in the right place
    cache = 2 * 2 * LAYER * 4
    assert program.memory_analysis().alias_size_in_bytes >= cache  # donated: the result is the input's memory
    assert program.memory_analysis().temp_size_in_bytes < cache / 2


def test_a_copy_would_be_found(programs):
    """The same search over a program that does copy: one that keeps the old cache beside the new."""

    def kept(cache, row):
        return [leaf.at[row].set(0.0) for leaf in jax.tree.leaves(cache)]

    text = jax.jit(kept).lower(programs._cache, 0).compile().as_text()
    assert large_operations(text, LAYER)
