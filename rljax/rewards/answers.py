"""Final answers of completions in a canonical form, to vote over: by the reward's own parser.

    parsed = parse_answers(["46", "It is #### 46"], name="gsm8k", processes=2, timeout=15.0)

A reward's parser is a function of the completion's text that returns the answer as text, or None
if there is none; answers that are equal have one text. A user's reward brings it as an attribute:

    def reward(prompt, completion): ...
    reward.answer = lambda completion: completion.partition("answer:")[2].strip() or None

Parsers run in processes of their own, as rewards do, and one that does not end is killed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import queue
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rljax.config import registry
from rljax.rewards.process import START_TIMEOUT
from rljax.rewards.score import REWARDS

Parser = Callable[[str], str | None]

PARSERS = {
    "exact": "rljax.rewards.answers:stripped",
    "gsm8k": "rljax.rewards.mathematics:answer_of",
    "math": "rljax.rewards.mathematics:answer_of",
    "reasoning_gym": "rljax.rewards.reasoning_gym:answer_of",
}
# As in rewards/process.py: multiprocessing would import the parent's main module, and jax with it
_BOOT = """
import json, sys
path, name = json.loads(sys.argv[1])
sys.path[:] = path
from rljax.rewards.answers import serve
serve(name)
"""


def find_parser(name: str) -> Parser | None:
    """Returns the parser of a reward, or of the first of several with commas between.

    None if none of them has one.

    Raises UserError if a reward can't be found.
    """
    for each in (part.strip() for part in name.split(",")):
        if each in PARSERS:
            return registry.resolve("reward.name", each, PARSERS, "parser")
        if (parser := getattr(registry.resolve("reward.name", each, REWARDS, "reward"), "answer", None)) is not None:
            return parser
    return None


def stripped(completion: str) -> str | None:
    """Returns the whole completion as the answer, apart from white space around it."""
    return completion.strip() or None


def parse_answers(texts: Sequence[str], *, name: str, processes: int, timeout: float) -> list[str | None]:
    """Parses the final answers of completions.

    Args:
      name: the reward, as `reward.name`, which must have a parser.
      processes: number of processes to parse in.
      timeout: seconds for one completion; after them it has no answer.

    Returns:
      The answer of each; None if it has none, or its parser raised or took too long.
    """
    different = list(dict.fromkeys(texts))
    idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
    started = [_Process(name) for _ in range(max(1, min(processes, len(different))))]
    for process in started:
        idle.put(process)

    def parse(text: str) -> str | None:
        process = idle.get()
        try:
            return process.ask(text, timeout)
        finally:
            idle.put(process)

    try:
        with concurrent.futures.ThreadPoolExecutor(len(started)) as pool:
            answers = dict(zip(different, pool.map(parse, different), strict=True))
    finally:
        for process in started:
            process.close()
    return [answers[text] for text in texts]


class _Process:
    """A process that parses completions one by one; started again after one that took too long."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[str] | None = None
        self._start = 0.0  # seconds that the next answer may take more, for the imports of a new process

    def ask(self, text: str, timeout: float) -> str | None:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(text) + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], timeout + self._start)
            line = process.stdout.readline() if ready else ""
        except BrokenPipeError:
            line = ""
        if not line:
            self.close()
            return None
        self._start = 0.0
        answer = json.loads(line)
        return None if answer is None else str(answer)

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            package = str(Path(__file__).resolve().parents[2])
            arguments = json.dumps([[package, *sys.path], self._name])
            command = [sys.executable, "-c", _BOOT, arguments]
            self._start = START_TIMEOUT
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def serve(name: str) -> None:
    """Main program of a process: one completion as JSON per line in, its answer per line out."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the parser prints goes to stderr
    parser = find_parser(name)
    assert parser is not None, "the parent has found it"
    for line in sys.stdin:
        answer = None
        with contextlib.suppress(Exception):  # users' code; a completion that it can't read has no answer
            answer = parser(json.loads(line))
        out.write(json.dumps(answer) + "\n")
        out.flush()
