"""Safetensors of a directory: written, read in slices, and every kind of damage."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from rljax.config.schema import ModelConfig
from rljax.errors import UserError
from rljax.hf import ModelSpec, WeightReader, init_directory, tensors, write_weights
from rljax.hf.read_model import check_stored, check_unread, read_model

MODEL = ModelConfig("qwen2", 32, 64, 2, 4, 2, 8, 64, False, 0.02, "char")
LIMIT = 20_000  # bytes a file, so that there are several


@pytest.fixture
def directory(tmp_path):
    init_directory(MODEL, tmp_path, seed=3, vocab_size=50, eos_token_ids=[7])
    return tmp_path


def contents(directory):
    reader = WeightReader(directory)
    return {name: reader.read(name) for name in reader.shapes}


def test_model_made_on_the_spot(directory, tmp_path_factory):
    """The same bytes from the same seed, other ones from another; residual projections are smaller
    by sqrt(2 layers).
    """
    spec = ModelSpec.from_directory(directory)
    WeightReader(directory).check(spec)
    arrays = contents(directory)
    again, other = tmp_path_factory.mktemp("again"), tmp_path_factory.mktemp("other")
    init_directory(MODEL, again, seed=3, vocab_size=50, eos_token_ids=[7])
    init_directory(MODEL, other, seed=4, vocab_size=50, eos_token_ids=[7])
    assert (again / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
    assert (other / "model.safetensors").read_bytes() != (directory / "model.safetensors").read_bytes()
    up, down = (arrays[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("up", "down"))
    assert up.std() / down.std() == pytest.approx(2.0, rel=0.1)
    assert not np.array_equal(arrays["model.layers.0.mlp.up_proj.weight"], arrays["model.layers.1.mlp.up_proj.weight"])
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 7


def test_several_files_hold_the_same(directory, tmp_path):
    """Several files hold the same tensors; a later save as one file removes the old index."""
    arrays = contents(directory)
    shapes = tensors(ModelSpec.from_directory(directory))
    write_weights(directory, shapes, arrays.__getitem__, "float32", LIMIT)
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 2
    assert max(file.stat().st_size for file in files) < LIMIT + 4096  # headers
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(shapes)
    again = contents(directory)
    assert all(np.array_equal(arrays[name], again[name]) for name in shapes)
    write_weights(directory, shapes, arrays.__getitem__, "bfloat16")
    narrow = contents(directory)
    assert all(np.array_equal(narrow[name], arrays[name].astype(narrow[name].dtype)) for name in shapes)
    assert narrow["model.norm.weight"].dtype.name == "bfloat16"


def test_slices_are_those_of_the_whole(directory):
    reader = WeightReader(directory)
    name = "model.embed_tokens.weight"
    index = (slice(3, 9), slice(0, 5))
    np.testing.assert_array_equal(reader.read(name, index), reader.read(name)[index])


def rewrite(directory, change):
    arrays = contents(directory)
    change(arrays)
    write_weights(directory, {name: array.shape for name, array in arrays.items()}, arrays.__getitem__, "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda arrays: arrays.pop("model.layers.1.mlp.up_proj.weight"),
            "tensor 'model.layers.1.mlp.up_proj.weight' is missing",
        ),
        (
            lambda arrays: arrays.update({"model.norm.weight": np.ones(31)}),
            "'model.norm.weight' has shape [31], config.json says",
        ),
        (lambda x: x.update({"model.extra": np.ones(1)}), "tensor 'model.extra' is not part of the qwen2 model"),
    ],
)
def test_wrong_tensors_are_named(directory, change, message):
    rewrite(directory, change)
    with pytest.raises(UserError) as error:
        WeightReader(directory).check(ModelSpec.from_directory(directory))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_file_is_refused(directory, keep):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors: truncated or corrupt"):
        WeightReader(directory)


def test_missing_files_are_named(directory):
    (directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no weights"):
        WeightReader(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(UserError, match=r"model-00001-of-00002\.safetensors: no such file"):
        WeightReader(directory)
    index.write_text(json.dumps({"weight_map": {"a": "../other/model.safetensors"}}))
    with pytest.raises(UserError, match="weight_map must be an object of names of files in the directory"):
        WeightReader(directory)
    index.write_text("[]")
    with pytest.raises(UserError, match=r"index\.json: (not JSON|not a JSON object|no )"):
        WeightReader(directory)


def test_failed_write_leaves_the_old_file(directory):
    """A write that cannot go through names the file, and what was there is still whole."""
    before = contents(directory)
    (directory / "model.safetensors.part").mkdir()  # in the way of the file that is written aside
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be written"):
        write_weights(directory, {"model.norm.weight": (32,)}, lambda _: np.zeros(32, np.float32), "float32")
    after = contents(directory)
    assert all(np.array_equal(before[name], after[name]) for name in before)


TIED, HEAD, TABLE = (
    ModelConfig("qwen2", 32, 64, 2, 4, 2, 8, 64, True, 0.02, "char"),
    "lm_head.weight",
    "model.embed_tokens.weight",
)


def of_another_family(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "phi3"}))


@pytest.mark.parametrize("change", [lambda directory: None, of_another_family])
def test_a_tied_model_may_store_its_head_only_as_a_copy(tmp_path, change):
    """Only a copy means the same to who reads the head of the file and who ties it."""
    init_directory(TIED, tmp_path, seed=3, vocab_size=50, eos_token_ids=[7])
    change(tmp_path)
    rewrite(tmp_path, lambda arrays: arrays.update({HEAD: arrays[TABLE]}))
    WeightReader(tmp_path).check(read_model(tmp_path))
    check_stored(tmp_path)

    def one_bit(arrays):
        arrays[HEAD] = arrays[TABLE].copy()
        arrays[HEAD].view(np.uint32)[-1, -1] ^= 1

    rewrite(tmp_path, one_bit)
    for read in (lambda: WeightReader(tmp_path).check(read_model(tmp_path)), lambda: check_stored(tmp_path)):
        with pytest.raises(UserError) as error:
            read()
        for part in ("model.safetensors", HEAD, TABLE, "tie_word_embeddings"):
            assert part in str(error.value)
        assert "\n" not in str(error.value)


def test_a_head_of_its_own_is_no_copy(directory):
    """Without the flag there is nothing to compare."""
    check_stored(directory)


def also_in_several_files(directory, change):
    """Leaves model.safetensors, and adds an index with files of the changed tensors."""
    single = (directory / "model.safetensors").read_bytes()
    arrays = contents(directory)
    change(arrays)
    shapes = {name: array.shape for name, array in arrays.items()}
    write_weights(directory, shapes, arrays.__getitem__, "float32", LIMIT)
    (directory / "model.safetensors").write_bytes(single)


def test_one_file_and_the_files_of_an_index_that_hold_the_same(directory):
    arrays = contents(directory)
    also_in_several_files(directory, lambda arrays: None)
    again = contents(directory)
    assert all(np.array_equal(arrays[name], again[name]) for name in arrays)


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays["model.norm.weight"].__setitem__(-1, 2.0),
        lambda arrays: arrays.pop("model.norm.weight"),
        lambda arrays: arrays.update({"model.norm.weight": np.ones(31)}),
    ],
)
def test_two_models_in_one_directory_are_refused(directory, change):
    also_in_several_files(directory, change)
    for read in (WeightReader, check_stored):
        with pytest.raises(UserError, match=r"model\.safetensors\.index\.json are two models .*'model\.norm\.weight'.*move"):
            read(directory)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_refused_with_its_tensor(directory, dtype, value):
    """The largest finite number of a dtype is read; above it is none."""
    arrays, name = contents(directory), "model.layers.1.mlp.up_proj.weight"
    shapes = tensors(ModelSpec.from_directory(directory))
    largest = {"float32": 3.4e38, "bfloat16": 3.38e38, "float16": 65504.0}[dtype]
    for last in (largest, -largest, value):
        arrays[name][-1, -1] = last
        write_weights(directory, shapes, arrays.__getitem__, dtype)
        reader = WeightReader(directory)
        if last is not value:
            assert np.isfinite(reader.read(name).astype(np.float32)[-1, -1])
            continue
        reader.read("model.norm.weight")
        reader.read(name, (slice(0, 3), slice(0, 5)))
        for index in (None, (slice(60, 64), slice(0, 32))):
            with pytest.raises(UserError, match=rf"model\.safetensors: tensor '{name}' has NaN or infinity, 1 of"):
                reader.read(name, index)
            unchecked = WeightReader(directory, check_numbers=False).read(name, index)  # as a publish reads it
            assert np.count_nonzero(~np.isfinite(unchecked.astype(np.float32))) == 1


def in_place(name, change):
    def edit(arrays):
        arrays[name] = change(arrays[name])

    return edit


NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
DAMAGE = {
    "a number": (in_place(UP, lambda a: np.where(np.arange(a.size).reshape(a.shape) == 5, np.nan, a)), "NaN or infinity, 1 of"),
    "a shape": (in_place(UP, lambda a: a[:-1].copy()), r"has shape \[63, 32\], config.json says \[64, 32\]"),
    "a tensor": (lambda arrays: arrays.pop(NORM), "'model.norm.weight' is missing"),
    "one more": (lambda arrays: arrays.update({"model.layers.2.mlp.up_proj.weight": arrays[UP]}), "is not part of"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_model_that_only_a_server_reads_is_checked_as_the_learner_does(directory, damage):
    """Refuses what a load of ours refuses, in the same words."""
    check_unread(directory)
    change, says = DAMAGE[damage]
    rewrite(directory, change)

    def load():
        reader = WeightReader(directory)
        reader.check(read_model(directory))
        for name in reader.shapes:
            reader.read(name)

    messages = []
    for read in (load, lambda: check_unread(directory)):
        with pytest.raises(UserError, match=says) as error:
            read()
        messages.append(str(error.value))
    assert messages[0] == messages[1] and "\n" not in messages[0]


def test_a_model_that_only_a_server_knows_is_read_for_its_numbers_alone(directory):
    """Leaves the shapes of a mixture of experts, or of a quantized model, to the server."""
    plain = json.loads((directory / "config.json").read_text())
    arrays = contents(directory) | {"scale": np.ones(3, np.int8), "x": np.ones(3, np.float32)}

    def write():
        save_file(arrays, directory / "model.safetensors")

    write()
    with pytest.raises(UserError, match="is not part of"):
        check_unread(directory)
    for other in ({"model_type": "qwen3_moe", "num_experts": 8}, {"quantization_config": {"quant_method": "gptq"}}):
        (directory / "config.json").write_text(json.dumps(plain | other))
        arrays["x"] = np.ones(3, np.float32)
        write()
        check_unread(directory)
        arrays["x"] = np.full(3, np.inf, np.float32)
        write()
        with pytest.raises(UserError, match="'x' has NaN or infinity, 3 of the 3"):
            check_unread(directory)


def test_without_weights_there_is_nothing_to_check(tmp_path):
    check_unread(tmp_path)
    check_unread("Qwen/Qwen3-0.6B")
