"""A tool: an OpenAI definition, and the Python callable behind it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rljax.errors import UserError


class ToolFailure(Exception):
    """A failed call whose message is shown to the policy as it is, with no traceback.

    Tools raise it for bad input: a wrong expression, code that raises.
    """


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that a policy may call.

    Example:

        def lookup(word: str) -> str:
            '''Looks up a word.

            Args:
              word: the word, in lower case.
            '''
            return dictionary[word]

        tool = Tool.of(lookup)
    """

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    function: Callable[..., Any]  # plain or async; takes the arguments by name, returns text or a JSON value

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Makes a tool of a function with type hints and a docstring that has an "Args:" section.

        Raises UserError if hints or descriptions are missing.
        """
        from transformers.utils.chat_template_utils import (
            DocstringParsingException,
            TypeHintParsingException,
            get_json_schema,
        )

        try:
            made = get_json_schema(function)["function"]
        except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
            name = getattr(function, "__name__", repr(function))
            raise UserError(f"tool {name}: {' '.join(str(error).split())}") from error
        return cls(made["name"], made["description"], made["parameters"], function)

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in the form of OpenAI's API and of chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def missing_or_unknown(self, arguments: Mapping[str, Any]) -> str:
        """Returns why the function can't be called with these arguments; "" if it can."""
        try:
            inspect.signature(self.function).bind(**arguments)
        except TypeError as error:
            return str(error)
        return ""
