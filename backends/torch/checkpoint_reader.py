"""Reads DCP checkpoints without running what their files say.

DCP's .metadata is a pickle, and a pickle may run anything. Here it is read by an unpickler that
knows the few classes of a checkpoint of tensors, and nothing else. Tensors themselves are read by
torch with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

METADATA = ".metadata"
_KNOWN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "Path")),
    *(("pathlib._local", name) for name in ("PosixPath", "PurePosixPath", "Path")),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("Metadata", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
            *("MetadataIndex", "_MEM_FORMAT_ENCODING"),
        )
    ),
}


class NotTensors(ValueError):
    """The metadata is none of a checkpoint of tensors. The message is one line."""


class CheckpointReader(filesystem.FileSystemReader):
    """Reader of a checkpoint's directory, to be passed to DCP's `load`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns what .metadata says. Raises NotTensors, OSError."""
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(directory: Path) -> Metadata:
    """Reads .metadata: names, shapes and dtypes of tensors, and the files that they are in.

    Raises:
      NotTensors: it holds anything else, or files outside of the directory.
      OSError: it can't be read.
    """
    data = (directory / METADATA).read_bytes()
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata):
            raise NotTensors(f"{METADATA} has no metadata")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise NotTensors(f"{METADATA}: {name} is no tensor")
        for place in metadata.storage_data.values():
            path = place.relative_path
            if not isinstance(path, str) or Path(path).name != path or place.transform_descriptors:
                raise NotTensors(f"{METADATA} names {path!r}, which is no plain file of the checkpoint")
    except NotTensors:
        raise
    except Exception as error:  # a pickle may fail in any way
        raise NotTensors(f"{METADATA} can't be read: {type(error).__name__}: {' '.join(str(error).split())}") from None
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _KNOWN:
            raise NotTensors(f"{METADATA} asks for {module}.{name}, which is not run")
        return super().find_class(module, name)
