"""Safetensors of a model directory: read by tensor or by slice, written by file."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rljax import json_fields
from rljax.errors import UserError
from rljax.hf.other_model import COPIES, Model, OtherModel
from rljax.hf.tensor_checks import are_same, count_not_finite, first_difference
from rljax.hf.tensors import EMBEDDING, UNEMBEDDING, tensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 4_000_000_000
_PLAIN = ("F64", "F32", "F16", "BF16")  # dtypes, as files name them, that may hold NaN and that NumPy reads
DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

Shape = tuple[int, ...]


class WeightReader:
    """Reader of a directory's tensors, which stay on disk until they are asked for.

    Example: WeightReader(Path("models/SmolLM2")).read("model.norm.weight")
    """

    def __init__(self, directory: Path | str, *, check_numbers: bool = True) -> None:
        """Opens every file and reads its header.

        check_numbers: refuse tensors that hold NaN or infinity. It takes about as long as reading a
        tensor that is in the page cache, which a publish of every step need not spend.

        Raises UserError on a missing, truncated or corrupt one, and on two models in one directory.
        """
        self.directory, self._check_numbers = Path(directory), check_numbers
        self._files = _open_files(self.directory)
        stored = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118
        self._stored = {text: name for name in stored if (text := _name_in_text_model(name))}
        self._where = {text: stored[name] for text, name in self._stored.items()}
        self._of_pictures = {name: path for name, path in stored.items() if not _name_in_text_model(name)}
        self.shapes: dict[str, Shape] = {
            name: tuple(self._files[path].get_slice(self._stored[name]).get_shape()) for name, path in self._where.items()
        }

    def check(self, spec: Model) -> None:
        """Checks that the directory has exactly the tensors of `spec`, in their shapes.

        Raises UserError if not, or if a model that ties its unembedding has another one stored.
        """
        expected = tensors(spec)
        if any(name in self.shapes and name not in expected for name in COPIES):
            self.check_head()
        for name, shape in expected.items():
            if name not in self.shapes:
                raise UserError(f"{self.directory}: tensor {name!r} is missing (is the model stored whole?)")
            if self.shapes[name] != shape:
                raise UserError(
                    f"{self._where[name]}: tensor {name!r} has shape {list(self.shapes[name])}, config.json says {list(shape)}"
                )
        if isinstance(spec, OtherModel):
            return  # which tensors it needs, transformers says
        for name in self.shapes.keys() - expected.keys():
            if name != UNEMBEDDING and not name.endswith("rotary_emb.inv_freq"):  # a copy of the embedding; a constant
                raise UserError(
                    f"{self._where[name]}: tensor {name!r} is not part of the {spec.architecture} model in config.json"
                )

    def check_head(self) -> None:
        """Checks that a stored unembedding is a copy of the embedding, as in a tied model.

        transformers takes one that differs for the model's, and other readers drop it. Raises
        UserError for such a one.
        """
        for name in (each for each in COPIES if each in self.shapes):
            shape = self.shapes[name]
            tables = [other for other, of_it in self.shapes.items() if of_it == shape and other not in COPIES]
            if not any(are_same(shape, functools.partial(self.read, name), functools.partial(self.read, t)) for t in tables):
                embedding = tables[0] if tables else EMBEDDING
                raise UserError(
                    f"{self._where[name]}: tensor {name!r} is not {embedding!r}, which config.json's tie_word_embeddings=true "
                    "says (set it to false if the model has a head of its own, else take the tensor out of the file)"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        return sum(path.stat().st_size for path in self._files)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Reads a copy of a tensor, or of a slice of it, in its stored dtype.

        Nothing else is read. Raises UserError for a damaged file, or a number that is not finite.
        """
        return self._read(self._where[name], self._stored[name], index)

    def check_numbers(self) -> None:
        """Reads every tensor of plain numbers, those of pictures included, one at a time.

        Raises UserError as `read` does.
        """
        for path, file in self._files.items():
            for name in file.keys():  # noqa: SIM118
                if file.get_slice(name).get_dtype() in _PLAIN:
                    self._read(path, name, None)

    def stored_name(self, name: str) -> str:
        """Returns the name of a tensor in the files: another one in an image-text model."""
        return self._stored[name]

    def shapes_of_pictures(self) -> dict[str, Shape]:
        """Returns the tensors of an image-text model that its text model has not."""
        return {n: tuple(self._files[path].get_slice(n).get_shape()) for n, path in self._of_pictures.items()}

    def read_of_pictures(self, name: str) -> np.ndarray:
        """Reads one of `shapes_of_pictures`. Raises UserError for a damaged file."""
        return self._read(self._of_pictures[name], name, None)

    def _read(self, path: Path, stored: str, index: tuple[slice, ...] | None) -> np.ndarray:
        try:
            file = self._files[path]
            array: np.ndarray = file.get_tensor(stored) if index is None else file.get_slice(stored)[index]
        except SafetensorError as error:
            raise UserError(f"{path}: tensor {stored!r} cannot be read: {error}") from None
        if self._check_numbers and (count := count_not_finite(array)):
            remedy = "the run that wrote it diverged, or a cast overflowed: take an earlier checkpoint, or cast again"
            raise UserError(f"{path}: tensor {stored!r} has NaN or infinity, {count} of the {array.size} read ({remedy})")
        return array


def _name_in_text_model(name: str) -> str:
    """Returns the name that a tensor of an image-text model has in its text model; "" for none.

    Releases of transformers up to 4.51 wrote `language_model.model.`, later ones
    `model.language_model.`.
    """
    if name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector.")):
        return ""
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def _open_files(directory: Path) -> dict[Path, safe_open]:
    """Opens the files of a model.

    With model.safetensors and an index of other files, transformers reads the first, and SGLang and
    vLLM those of the index. Both have to hold the same, or the policies of a run would differ.
    """
    index, single = directory / INDEX, directory / SINGLE
    if not index.is_file():
        if not single.is_file():
            raise UserError(f"{directory}: no weights ({SINGLE}, or {INDEX} and the files it names)")
        return {single: _open(single)}
    content = json_fields.read_object(index, {"weight_map": json_fields.FILE_NAMES}, needed=("weight_map",))
    files = {path: _open(path) for path in sorted({directory / name for name in content["weight_map"].values()})}
    if not single.is_file() or single in files:
        return files
    alone = {single: _open(single)}
    if (name := first_difference(_by_tensor(alone), _by_tensor(files))) is not None:
        raise UserError(
            f"{directory}: {SINGLE} and the files of {INDEX} are two models (tensor {name!r} differs): "
            "transformers reads the first, SGLang the others (move the stale ones away)"
        )
    return alone


def _by_tensor(files: Mapping[Path, safe_open]) -> dict[str, safe_open]:
    return {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file, but {INDEX} names it (is the model stored whole?)") from None
    except (SafetensorError, OSError) as error:
        remedy = "copy it again; WORKDIR/init, which a run makes, can be deleted"
        raise UserError(f"{path}: truncated or corrupt safetensors file: {error} ({remedy})") from None


def write_weights(
    directory: Path | str,
    shapes: Mapping[str, Shape],
    read: Callable[[str], np.ndarray],
    dtype: str,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes model.safetensors, or numbered files and an index if it would exceed `max_file_bytes`.

    Args:
      shapes: shapes of the tensors to write, in order.
      read: returns a tensor by name; called when its file is written, so that only one file's
        tensors are in memory.
      dtype: stored type: "float32", "float16", "bfloat16".

    Raises:
      UserError: the disk is full or not writable. Existing files are then still whole.
    """
    directory = Path(directory)
    files = _split(shapes, DTYPES[dtype].itemsize, max_file_bytes)
    names = [SINGLE] if len(files) == 1 else [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    for file, names_inside in zip(names, files, strict=True):
        write_tensors(directory / file, {name: read(name) for name in names_inside}, dtype)
    if len(files) == 1:
        (directory / INDEX).unlink(missing_ok=True)
        return
    (directory / SINGLE).unlink(missing_ok=True)
    total = sum(int(np.prod(shape)) for shape in shapes.values()) * DTYPES[dtype].itemsize
    weight_map = {name: file for file, names_inside in zip(names, files, strict=True) for name in names_inside}
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _split(shapes: Mapping[str, Shape], itemsize: int, limit: int) -> list[list[str]]:
    """Returns the names of each file's tensors: as many as fit, at least one."""
    files: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        nbytes = int(np.prod(shape)) * itemsize
        if files[-1] and size + nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    return files


def write_tensors(path: Path, arrays: Mapping[str, np.ndarray], dtype: str) -> None:
    """Writes one safetensors file aside and renames it.

    Raises UserError if the disk is full or not writable.
    """
    aside = path.with_name(path.name + ".part")
    stored = {name: np.ascontiguousarray(np.asarray(array).astype(DTYPES[dtype], copy=False)) for name, array in arrays.items()}
    try:
        save_file(stored, aside, metadata={"format": "pt"})  # transformers refuses files without it
        aside.chmod(0o644)  # safetensors makes them private; a server may run as another user
        os.replace(aside, path)
    except (SafetensorError, OSError) as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise UserError(f"{path}: cannot be written: {error}") from None


def write_json(path: Path, value: object) -> None:
    """Writes JSON aside and renames it, so that a reader never sees half of it. Raises UserError."""
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_text(json.dumps(value, indent=2) + "\n")
        os.replace(aside, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from None
