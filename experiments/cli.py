"""The command `rljax`: the binaries of this folder by name.

    rljax                               # lists the commands
    rljax train --config=quickstart --workdir=runs/quickstart
    rljax bench packing

In a checkout these are python -m experiments.train and python -m experiments.bench.packing. A
command is a module that runs as a program, or a folder of them, and the first line of its docstring
says what it does. Only the one that is asked for is imported.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from pathlib import Path

import rljax
from rljax.process import standard_streams
from rljax.process.first_signals import end_at_once_on_signals

# Commands in the order of their listing. A new binary is added here.
MENUS = {
    "rljax": (
        *("train", "check", "plan", "launch", "evaluate", "doctor", "report", "rollout", "replay", "serve", "parity"),
        *("compare", "export", "convert", "bench"),
    ),
    "rljax bench": (
        "grpo_step",
        "learner",
        "logprobs",
        "decode",
        "decode_steps",
        "groups",
        "prefill",
        "publish",
        "saves",
        "buffer",
        "packing",
        "start",
        "tracing",
        "verifiers",
        "check",
        "gpu_run",
        "several_gpus",
        "plan_compiler",
        "plan_gpu",
        "plan_no_gpu",
        "tpu_compile",
        "curves",
        "broken_runs",
    ),
}
HELP = ("--help", "-help", "-h", "-?", "help")


def main() -> None:
    """Runs the command that sys.argv names.

    Exits with status 1 and one line where there is none of that name.
    """
    standard_streams.open_closed()
    end_at_once_on_signals()
    command, arguments = "rljax", sys.argv[1:]
    while command in MENUS:
        if not arguments or arguments[0] in HELP:
            with contextlib.suppress(BrokenPipeError):  # `| head` has seen enough
                print(listing(command), flush=True)
            return
        if arguments == ["--version"]:
            print(rljax.__version__)
            return
        name, *arguments = arguments
        if name not in MENUS[command]:
            from rljax.config.registry import nearest

            sys.exit(f"error: {command} {name}: no such command ({nearest(name, MENUS[command])})")
        command = f"{command} {name}"
    run(module_of(command), arguments)


def run(module: str, arguments: list[str]) -> None:
    """Runs a module as `python -m` does: as the main module, with the working directory importable."""
    sys.argv[1:] = arguments
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a config's own rewards and workflows are there
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def listing(menu: str) -> str:
    """Lists the commands of a menu, one per line, and says how to ask for more."""
    width = max(map(len, MENUS[menu]))
    lines = [f"  {name:{width}}  {summary(f'{menu} {name}')}" for name in MENUS[menu]]
    return "\n".join([f"usage: {menu} COMMAND [flags]", "", *lines, "", f"{menu} COMMAND --help says more of one."])


def summary(command: str) -> str:
    """Returns the first line of the docstring of a command's module.

    It is read as the first line of its file.
    """
    path = Path(__file__).parent.joinpath(*command.split()[1:])
    with (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).open() as lines:
        return next(lines).strip().strip('"')


def module_of(command: str) -> str:
    """Returns the module of a command: `rljax bench packing` -> rljax.experiments.bench.packing."""
    return ".".join(["rljax.experiments", *command.split()[1:]])
