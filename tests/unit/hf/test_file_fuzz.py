"""Files of a model directory and of a checkpoint that are valid JSON and no sense: one line that names the file, or success."""

import copy
import json
import random
import shutil
import types

import pytest

from rljax.checkpoints import integrity
from rljax.errors import UserError
from rljax.hf.rope import frequencies
from rljax.hf.spec import ModelSpec, read_vocab_size
from rljax.hf.tokenizer import _eos_ids
from rljax.hf.weights import INDEX, WeightReader
from rljax.testing.models import make_model

NUMBERS = (0, 1, -1, 2**31, 2**70, 0.5, -1e308, 1e400)
ODD = (None, True, False, *NUMBERS, "", "7", "llama", [], [1], ["a", None], {}, {"a": 1}, [[]])
QUICK, THOROUGH = 120, 4000  # mutations per file


def _places(value, path=()):
    """Yields the path of every value in a JSON tree."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _places(child, (*path, key))


def mutated(content, rng):
    """Returns a JSON tree with one to three values replaced, removed or swapped."""
    content = json.loads(json.dumps(content))
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(list(_places(content)))
        if not path:
            if rng.random() < 0.1:
                return rng.choice(ODD)
            continue
        parent = content
        for key in path[:-1]:
            parent = parent[key]
        if rng.random() < 0.15:
            del parent[path[-1]]
        else:
            parent[path[-1]] = copy.deepcopy(rng.choice(ODD))
    return content


def read_spec(directory):
    read_vocab_size(directory)
    spec = ModelSpec.from_directory(directory)
    for rope in spec.ropes:
        frequencies(rope, min(spec.head_dim, 4096))
    WeightReader(directory).check(spec)


def check_manifest(directory):
    try:
        integrity.check(directory, integrity.read_manifest(directory)["files"])
    except integrity.Corrupt as error:
        raise UserError(str(error)) from None


FILES = {  # file -> who reads it
    "config.json": read_spec,
    "generation_config.json": lambda directory: _eos_ids(directory, types.SimpleNamespace(eos_token_id=2)),
    INDEX: lambda directory: WeightReader(directory).check(ModelSpec.from_directory(directory)),
    "manifest.json": check_manifest,
    "meta.json": integrity.verify,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = make_model(tmp_path_factory.mktemp("model"))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "bos_token_id": 1, "temperature": 0.7}))
    config = json.loads((path / "config.json").read_text())
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    (path / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
    weights = {name: "model.safetensors" for name in WeightReader(path).shapes}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weights}))
    (path / "tree").mkdir()
    (path / "tree" / "a").write_bytes(b"abc")
    integrity.write_meta(path, {"format": "test", "step": 3})
    integrity.write_manifest(path, {"step": 3, "score": 0.5})
    return path


def fuzz(directory, name, count):
    original = (directory / name).read_text()
    FILES[name](directory)  # as it is, it is fine
    rng, succeeded = random.Random(name), 0
    try:
        for number in range(count):
            content = json.dumps(mutated(json.loads(original), rng))
            (directory / name).write_text(content)
            try:
                FILES[name](directory)
                succeeded += 1
            except UserError as error:
                line = str(error)
                assert "\n" not in line and len(line) < 1000 and str(directory) in line, (number, line)
            except Exception as error:
                raise AssertionError(f"mutation {number}: {type(error).__name__}: {error}\n{content}") from error
    finally:
        (directory / name).write_text(original)
    assert 0 < succeeded < count


@pytest.mark.parametrize("name", sorted(FILES))
def test_fuzz_of_each_file_that_is_read(directory, name):
    fuzz(directory, name, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FILES))
def test_fuzz_of_each_file_that_is_read_at_length(directory, name, tmp_path):
    shutil.copytree(directory, tmp_path / "copy")
    fuzz(tmp_path / "copy", name, THOROUGH)
