"""The shadow's process, as the run sees it: one job at a time, and never a wait for it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import numpy as np

from rljax.batching.batch import Batch
from rljax.config import io as config_io
from rljax.config.schema import Config
from rljax.engine.rank import ProcessRank
from rljax.shadow.differences import Computed

CONFIG, BATCH, LOGP, LEARNER = "config.json", "batch.npz", "logp.npz", "learner"  # names of files
GRACE = 5.0  # seconds for the process to end by itself
ON_SHARED_DEVICES = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # else JAX takes three quarters of them at its start


@dataclasses.dataclass(frozen=True)
class Answer:
    """Results of the shadow for one job."""

    theirs: Computed
    right: Computed | None  # in float32; None if the run computes in that


class ShadowProcess:
    """A child that recomputes batches in the directory of the shadow.

    A job is a directory with a checkpoint and a batch, a line of JSON on the child's stdin; its
    answer is a line on stdout. The child ends when its stdin does, so with this process.

    Attributes:
      busy: a job was given whose answer has not been taken.
    """

    def __init__(self, config: Config, engine: str, model_dir: Path, directory: Path) -> None:
        self.busy = False
        self.log = directory / "log.txt"
        self._directory, self._answers = directory, queue.SimpleQueue[str | None]()
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        (directory / CONFIG).write_text(config_io.to_json(config))
        variables = environment(config.parity.shadow_device)
        command = [sys.executable, "-m", "rljax.shadow", engine, str(model_dir.resolve()), str(directory.resolve())]
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=variables, text=True
            )
        assert self._child.stdin is not None and self._child.stdout is not None
        self._stdin: IO[str] = self._child.stdin
        threading.Thread(target=self._read, args=[self._child.stdout], name="shadow", daemon=True).start()

    @property
    def place(self) -> Path:
        """Directory of the next job; it does not exist yet."""
        return self._directory / "job"

    def give(self, batch: Batch, *, supervised: bool) -> None:
        """Gives a job to an idle child. Its checkpoint is in `place` already.

        Raises OSError if the batch can't be written, or the child is gone.
        """
        arrays = {name: array for name, array in vars(batch).items() if array is not None}
        np.savez(self.place / BATCH, **arrays)
        self.busy = True
        self._stdin.write(json.dumps({"supervised": supervised}) + "\n")
        self._stdin.flush()

    def take(self) -> Answer | None:
        """Returns the answer to the last job, None while there is none.

        Raises EOFError if the child has died.
        """
        try:
            line = self._answers.get_nowait()
        except queue.Empty:
            return None
        if line is None:
            raise EOFError(f"the shadow's process ended (its last words are in {self.log})")
        with np.load(self.place / LOGP, allow_pickle=False) as logps:
            found = {name: means and Computed(logps[name], **means) for name, means in json.loads(line).items()}
            answer = Answer(**found)
        self.clear()
        return answer

    def clear(self) -> None:
        """Deletes the last job."""
        self.busy = False
        shutil.rmtree(self.place, ignore_errors=True)

    def close(self) -> None:
        """Ends the child, whatever it is doing, and deletes what was handed over."""
        with contextlib.suppress(OSError):  # the child is gone, with a line of ours unread
            self._stdin.close()
        try:
            self._child.wait(0 if self.busy else GRACE)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self.clear()

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._answers.put(line)
        self._answers.put(None)


def environment(device: str) -> dict[str, str]:
    """Returns the child's environment, without this process's rank and with its own devices."""
    of_rank = ProcessRank().variables().keys()
    inherited = {k: v for k, v in os.environ.items() if k not in of_rank and not k.startswith("TORCHELASTIC_")}
    if device == "cpu":
        return inherited | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return ON_SHARED_DEVICES | inherited
