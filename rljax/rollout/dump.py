"""Groups of trajectories as files, which `rljax rollout` writes and `rljax replay` trains on.

DIR/batch.safetensors    token_ids, loss_mask, behavior_logp, versions: [N], of all trajectories
DIR/batch.json           groups: uid and trajectories; per trajectory its length, reward, text

Text is optional; the flight recorder (rljax/flight) writes none.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax import json_fields
from rljax.errors import UserError
from rljax.hf.tokenizer import Tokenizer
from rljax.sinks.run_directory import describe, dump
from rljax.types import Finish, Group, Trajectory

ARRAYS = {"token_ids": np.int32, "loss_mask": np.bool_, "behavior_logp": np.float32, "versions": np.int32}
FORMAT = "rljax-groups-1"
_NUMBER = json_fields.optional(json_fields.REAL)
_TRAJECTORY = json_fields.fields(
    {
        "length": json_fields.integer(0, 2**31),
        "reward": _NUMBER,
        "components": json_fields.named(_NUMBER),
        "finish": json_fields.one_of(Finish),
        "episode": json_fields.optional(json_fields.integer(0, 2**31)),
        "pictures": json_fields.TEXTS,
    },
    needed=("length", "reward", "components", "finish"),
)
_GROUP = json_fields.fields({"uid": json_fields.TEXT, "trajectories": json_fields.listed(_TRAJECTORY)})
_BATCH = json_fields.fields({"groups": json_fields.listed(_GROUP)})


def save(directory: Path, groups: Sequence[Group], tokenizer: Tokenizer | None = None) -> None:
    """Writes both files. Makes the directory if it is missing.

    Args:
      tokenizer: decodes the text, which is for human readers; None writes no text. Loading never
        tokenizes it.
    """
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    arrays = {
        name: np.concatenate([np.asarray(getattr(t, name), dtype) for t in trajectories] or [np.zeros(0, dtype)])
        for name, dtype in ARRAYS.items()
    }
    save_file(arrays, directory / "batch.safetensors", metadata={"format": FORMAT})

    def facts(trajectory: Trajectory) -> dict[str, Any]:
        if tokenizer is not None:
            return describe(trajectory, tokenizer)
        components = dict(trajectory.components)
        found = {"reward": trajectory.reward, "components": components, "finish": str(trajectory.finish)}
        return found | ({} if trajectory.episode is None else {"episode": trajectory.episode})

    def entry(trajectory: Trajectory) -> dict[str, Any]:
        pictures = {"pictures": list(trajectory.pictures)} if trajectory.pictures else {}
        return {"length": len(trajectory)} | facts(trajectory) | pictures

    tree = {
        "format": FORMAT,
        "groups": [{"uid": group.uid, "trajectories": list(map(entry, group.trajectories))} for group in groups],
    }
    (directory / "batch.json").write_text(dump(tree) + "\n")


def load(directory: Path) -> list[Group]:
    """Loads what `save` wrote, bit for bit.

    Raises:
      UserError: a file is missing or broken, or the two files don't belong together.
    """
    tree, arrays = _read(directory)
    lengths = [entry["length"] for group in tree["groups"] for entry in group["trajectories"]]
    for name in ARRAYS:
        if name not in arrays or len(arrays[name]) != sum(lengths):
            raise UserError(f"{directory}: batch.safetensors holds no {name} of the {sum(lengths)} tokens in batch.json")
    starts = iter(np.cumsum([0, *lengths]).tolist())
    try:
        return [
            Group(group["uid"], tuple(_trajectory(entry, arrays, next(starts)) for entry in group["trajectories"]))
            for group in tree["groups"]
        ]
    except ValueError as error:  # of lengths that are another batch's
        raise UserError(f"{directory}: batch.safetensors and batch.json don't belong together: {error}") from None


def load_shards(directories: Sequence[Path]) -> list[Group]:
    """Loads the shards of one batch and interleaves their groups into the batch's order.

    Args:
      directories: dumps of the shards 0/N, 1/N, ..., in this order.

    Raises:
      UserError: as `load`, or a prompt is in more than one shard.
    """
    rounds = itertools.zip_longest(*map(load, directories))
    groups = [group for several in rounds for group in several if group is not None]
    twice = [uid for uid, count in collections.Counter(group.uid for group in groups).items() if count > 1]
    if twice:
        raise UserError(
            f"{', '.join(map(str, directories))}: prompt {twice[0]} is in two of them (shards of one batch share none)"
        )
    return groups


def _trajectory(entry: dict[str, Any], arrays: dict[str, np.ndarray], start: int) -> Trajectory:
    parts: dict[str, Any] = {
        name: arrays[name][start : start + entry["length"]].astype(dtype) for name, dtype in ARRAYS.items()
    }
    components = {name: _number(value) for name, value in entry["components"].items()}
    return Trajectory(
        **parts,
        reward=_number(entry["reward"]),
        components=components,
        finish=Finish(entry["finish"]),
        episode=entry.get("episode"),  # only parts of episodes have it
        pictures=tuple(entry.get("pictures", ())),  # only prompts with pictures have it
    )


def _number(value: float | None) -> float:
    """Reads a number from JSON, where null stands for NaN and infinities."""
    return math.nan if value is None else value


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tree = json_fields.read_object(directory / "batch.json", {})
        arrays = load_file(directory / "batch.safetensors")
    except FileNotFoundError as error:
        raise UserError(f"{directory}: no {Path(error.filename).name} (a directory that `rljax rollout` wrote)") from None
    except (ValueError, SafetensorError) as error:
        raise UserError(f"{directory}: not a dumped batch: {' '.join(str(error).split())}") from None
    if tree.get("format") != FORMAT:
        raise UserError(f"{directory}: batch.json is not of format {FORMAT}")
    json_fields.demand(tree, _BATCH, f"{directory / 'batch.json'}")
    return tree, arrays
