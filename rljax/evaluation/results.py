"""Result of an evaluation: rewards and answers of samples by prompt, and estimates from them."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rljax import json_fields
from rljax.errors import UserError
from rljax.evaluation import estimates
from rljax.evaluation.estimates import Estimate
from rljax.evaluation.protocol import Protocol

FOLDER = "evaluations"  # of a run directory


@dataclasses.dataclass(frozen=True)
class Sample:
    """One episode that was scored."""

    reward: float
    components: Mapping[str, float]
    finish: str
    tokens: int  # sampled by the policy
    answer: str | None = None  # final answer by the reward's own parser; None if it has no parser or found none


@dataclasses.dataclass(frozen=True)
class Answers:
    """All samples of one prompt, and the failures of its other episodes by kind."""

    uid: str
    samples: Sequence[Sample]
    failed: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Policy:
    """Origin of the weights that were evaluated.

    Example: Policy("checkpoint", "runs/a/checkpoints/150", step=150, digest="1f...")
    """

    kind: str  # model, export, best, checkpoint or server
    path: str  # of the directory, or address of the server
    step: int | None = None  # finished steps of the run, of a checkpoint
    digest: str | None = None  # of the model directory; None for a server

    def __str__(self) -> str:
        return self.path if self.step is None or self.kind == "checkpoint" else f"{self.path} (step {self.step})"


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one policy on one validation set."""

    policy: Policy
    name: str  # of the set; empty for valid_dataset
    protocol: Protocol
    seed: int
    ks: Sequence[int]  # of pass@k and maj@k
    prompts: Sequence[Answers]
    has_answers: bool  # True if the reward has a parser of answers

    @functools.cached_property
    def estimates(self) -> dict[str, Estimate]:
        """Estimates by name: pass@k, maj@k, avg@n.

        A prompt with fewer than k samples, because episodes failed, is left out of those of k.
        """
        passing, voting = {}, {}
        for k in self.ks:
            full = [prompt for prompt in self.prompts if len(prompt.samples) >= k]
            if full:
                values = [estimates.pass_at_k(len(p.samples), sum(self._passed(p)), k) for p in full]
                passing[f"pass@{k}"] = estimates.share(values)
            if full and k > 1 and self.has_answers:
                votes = [estimates.majority_at_k([s.answer for s in p.samples], self._passed(p), k) for p in full]
                voting[f"maj@{k}"] = estimates.share(votes)
        rewards = {f"avg@{self.protocol.n_samples}": estimates.of_rewards(list(self.means().values()))}
        return passing | voting | rewards

    @functools.cached_property
    def components(self) -> dict[str, Estimate]:
        """Mean of each reward component over the prompts that have it."""
        names = dict.fromkeys(name for prompt in self.prompts for sample in prompt.samples for name in sample.components)
        return {name: estimates.of_rewards(list(self._of_component(name))) for name in names}

    @property
    def failed(self) -> Counter[str]:
        """Number of episodes without a reward, by kind."""
        return sum((Counter(prompt.failed) for prompt in self.prompts), Counter())

    @property
    def pass_at_1_if_failures_fail(self) -> float:
        """pass@1 with every failed episode counted as one that does not pass."""
        shares = [
            sum(self._passed(prompt)) / max(len(prompt.samples) + sum(prompt.failed.values()), 1) for prompt in self.prompts
        ]
        return math.fsum(shares) / len(shares)

    def means(self) -> dict[str, float]:
        """Returns the mean reward of each prompt that has samples, by uid."""
        return {p.uid: math.fsum(s.reward for s in p.samples) / len(p.samples) for p in self.prompts if p.samples}

    def passes(self) -> dict[str, float]:
        """Returns the share of samples that pass, of each prompt that has samples, by uid."""
        return {p.uid: sum(self._passed(p)) / len(p.samples) for p in self.prompts if p.samples}

    def _passed(self, prompt: Answers) -> list[bool]:
        return [sample.reward >= self.protocol.success for sample in prompt.samples]

    def _of_component(self, name: str) -> Iterator[float]:
        for prompt in self.prompts:
            values = [sample.components[name] for sample in prompt.samples if name in sample.components]
            if values:
                yield math.fsum(values) / len(values)

    @property
    def file_name(self) -> str:
        """Name of its file, of set, policy and protocol; the same evaluation again replaces it."""
        step = "" if self.policy.step is None else f"-step{self.policy.step}"
        policy = (self.policy.digest or self.policy.path).replace(":", "_").replace("/", "_")[:12]
        return (
            f"{self.name or 'valid_dataset'}-{self.protocol.split}{step}-{policy}-{self.protocol.digest[:8]}-{self.seed}.json"
        )

    def json(self) -> dict[str, Any]:
        """Returns the result as JSON values."""
        return {
            "policy": dataclasses.asdict(self.policy),
            "name": self.name,
            "protocol": self.protocol.json(),
            "protocol_digest": self.protocol.digest,
            "seed": self.seed,
            "ks": list(self.ks),
            "has_answers": self.has_answers,
            "estimates": {name: _finite(estimate) for name, estimate in self.estimates.items()},
            "components": {name: _finite(estimate) for name, estimate in self.components.items()},
            "failed": dict(self.failed),
            "pass@1_if_failures_fail": self.pass_at_1_if_failures_fail,
            "prompts": [dataclasses.asdict(prompt) for prompt in self.prompts],
        }

    def save(self, directory: Path) -> Path:
        """Writes the result below a directory, which is made where it is missing; returns the file.

        Raises UserError if it can't be written.
        """
        path = directory / self.file_name
        temporary = path.with_suffix(".tmp")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(self.json(), allow_nan=False) + "\n")
            os.replace(temporary, path)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
        return path


_SEED = json_fields.integer(-(2**63), 2**63 - 1)
_FILE = json_fields.fields(
    {
        "policy": json_fields.kind_of(Policy),
        "name": json_fields.TEXT,
        "protocol": json_fields.kind_of(Protocol),
        "seed": _SEED,
        "ks": json_fields.listed(json_fields.integer(1, 2**31)),
        "prompts": json_fields.listed(json_fields.kind_of(Answers)),
        "has_answers": json_fields.TRUTH,
    }
)


def load(path: Path) -> Result:
    """Reads what `Result.save` wrote. Raises UserError."""
    try:
        tree = json_fields.read_object(path, {})
        json_fields.demand(tree, _FILE, str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file (a result is a .json that `rljax evaluate` wrote)") from None
    except UserError as error:
        raise UserError(f"{error} (a result is a .json that `rljax evaluate` wrote)") from None
    where = str(path)
    if not any(prompt["samples"] for prompt in tree["prompts"]):
        raise UserError(f"{where}: prompts: none has a sample")
    return Result(
        policy=json_fields.read_as(Policy, tree["policy"], f"{where}: policy"),
        name=tree["name"],
        protocol=json_fields.read_as(Protocol, tree["protocol"], f"{where}: protocol"),
        seed=tree["seed"],
        ks=tree["ks"],
        prompts=[_answers(prompt, where) for prompt in tree["prompts"]],
        has_answers=tree["has_answers"],
    )


def _answers(tree: Mapping[str, Any], where: str) -> Answers:
    return Answers(tree["uid"], [json_fields.read_as(Sample, sample, where) for sample in tree["samples"]], tree["failed"])


def _finite(estimate: Estimate) -> dict[str, Any]:
    """Returns an estimate as JSON values; the interval of one prompt, which is infinite, is null."""
    values = dataclasses.asdict(estimate)
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()}


def ks_of(n_samples: int, ks: Sequence[int] = ()) -> tuple[int, ...]:
    """Returns the k of pass@k: 1, and those given, else 2, 4, ... and n_samples itself."""
    powers = [1 << exponent for exponent in range(n_samples.bit_length()) if 1 << exponent <= n_samples]
    return tuple(sorted({1, *(ks or [*powers, n_samples])}))
