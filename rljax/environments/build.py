"""Environments by name, and the source of an episode that a prompt carries."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, cast

from rljax.config import registry
from rljax.environments.interface import Environment
from rljax.errors import UserError

ENVIRONMENTS = {
    "guess_number": "rljax.environments.guess_number:GuessNumber",
    "gymnasium": "rljax.environments.gymnasium:Gymnasium",
    "reasoning_gym": "rljax.environments.reasoning_gym:ReasoningGym",
}
FIELD = "environment"  # the field of a prompt that says which episode it begins


@dataclasses.dataclass(frozen=True)
class Source:
    """Origin of an episode: an environment, its constructor's arguments, and how it is reset.

    A prompt has it as JSON in its field "environment":

        {"name": "guess_number", "arguments": {"size": 31}, "seed": 17, "fields": {}}
    """

    name: str  # one of ENVIRONMENTS, or "package.module:Class"
    seed: int
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, prompt_fields: Mapping[str, Any], where: str) -> Source:
        """Reads the source from a prompt's fields.

        Raises UserError, beginning with `where`, if there is none or it has another form.
        """
        given = prompt_fields.get(FIELD)
        if not isinstance(given, Mapping):
            has = ", ".join(prompt_fields) or "none"
            raise UserError(
                f"{where}: no field {FIELD!r} that names an environment"
                f" (its fields: {has}; train_dataset.path=task:environment/NAME makes such prompts)"
            )
        try:
            inspect.signature(cls).bind(**given)
        except TypeError as error:
            raise UserError(f"{where}: field {FIELD!r}: {error} (it has name, seed, arguments and fields)") from None
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """Returns the value of a prompt's field "environment"."""
        return {"name": self.name, "seed": self.seed, "arguments": dict(self.arguments), "fields": dict(self.fields)}


def make_environment(source: Source, key: str = FIELD) -> Environment:
    """Makes the environment of an episode.

    Raises:
      UserError: there is none of this name, it does not take the arguments, or it has no reset and
        step.
    """
    cls = registry.resolve(key, source.name, ENVIRONMENTS, "environment")
    try:
        inspect.signature(cls).bind(**source.arguments)
    except TypeError as error:
        takes = ", ".join(inspect.signature(cls).parameters) or "none"
        raise UserError(f"{key}: {source.name}: {error} (it takes: {takes})") from None
    environment = cls(**source.arguments)
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise UserError(f"{key}: {source.name} has no method {method} (see rljax/environments/interface.py)")
    return cast(Environment, environment)
