"""Text of --help: a binary's docstring and its flags."""

from __future__ import annotations

import re
import sys

from absl import flags


def text() -> str:
    """Returns the binary's docstring and its flags.

    Commands in them are written like the one that started it.
    """
    command = _command()
    parts = [f"usage: {command} [flags]", (sys.modules["__main__"].__doc__ or "").strip()]
    if flags_help := flags.FLAGS.main_module_help().strip().removeprefix(f"{sys.argv[0]}:"):
        parts.append(f"flags:{flags_help}")
    shown = "\n\n".join(parts)
    return installed(shown) if command.startswith("rljax ") else shown


def _command() -> str:
    """Returns the command that starts this binary again.

    `python -m experiments.bench.packing` in a checkout, else `rljax bench packing`.
    """
    spec = sys.modules["__main__"].__spec__
    if spec is None:  # started as a file, not as a module
        return sys.argv[0]
    return f"python -m {spec.name}" if spec.name.startswith("experiments.") else _short(spec.name)


def _short(module: str) -> str:
    """Converts a module, as experiments.bench.packing, to its command, `rljax bench packing`.

    The module may also be rljax.experiments.bench.packing.
    """
    return " ".join(["rljax", *module.partition("experiments.")[2].split(".")])


def installed(text: str) -> str:
    """Rewrites a checkout's commands and configs as they are named in an installed rljax."""

    def renamed(match: re.Match[str]) -> str:
        return f"-m rljax.{match[2]}" if match[1] == "-m " else _short(match[2])  # -m by itself: under torchrun

    text = re.sub(r"(python -m |-m )?(?<!\.)\b(experiments(?:\.[a-z_]+)+)", renamed, text)
    return re.sub(r"--config=configs/([\w/]+)\.py", r"--config=\1", text)
