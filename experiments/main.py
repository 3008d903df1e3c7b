"""Shared parts of all binaries: flags that name a config, and errors as one line.

main.define_config_flags()

def run() -> None:
    config = main.config_from_flags()
    ...

if __name__ == "__main__":
    main.run_main(run)
"""

from __future__ import annotations

import contextlib
import functools
import logging as standard_logging
import os
import re
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from absl import app, flags, logging

from rljax.errors import GuardrailError, PluginFailed, RankFailed, TooManyFailures, UserError
from rljax.experiments import command_help, error_lines, screen
from rljax.process import frames, interpreter, standard_streams
from rljax.process.signals import Stopped, command_ends, end_on_signals

if TYPE_CHECKING:
    from rljax.config.schema import Config

FLAGS = flags.FLAGS
flags.disclaim_key_flags()  # flags defined here belong to the calling binary and appear in its --help

_OVERRIDE = re.compile(r"--?config\.([^=]+)(?:=(.*))?", re.DOTALL)
_HELP = {"--help", "-help", "-h", "-?", "--helpshort"}
EXTRAS = {  # package -> extra that has it
    "torch": "torch",
    "peft": "torch",
    "altair": "report",
    "vl_convert": "report",
    "PIL": "vision",
}
FROM_SCRATCH = "the model from scratch (actor.init_from_scratch)"
_overrides: list[tuple[str, str | None]] = []  # of this process's command line, in order; None without a value
_arguments: list[str] = []  # its positional arguments


def define_config_flags(
    *, workdir: bool = True, what: str = "Directory of the run; made where it is missing, resumed where it holds one."
) -> None:
    """Defines --config, which also takes --config.KEY, and, unless `workdir` is False, --workdir.

    Args:
      what: help of --workdir.
    """
    flags.DEFINE_string(
        "config",
        None,
        "A config file, a config of rljax by its name (quickstart), or a YAML of AReaL's. --config.KEY=VALUE sets a key"
        " (docs/config.md has them all).",
    )
    if workdir:
        flags.DEFINE_string("workdir", None, what)


def config_from_flags() -> Config:
    """Loads the config file with the overrides of the command line. Raises UserError."""
    from rljax.config import io as config_io

    if FLAGS.config is None:
        raise UserError("--config: missing (a config by its name, such as quickstart, or a Python file with get_config)")
    config = config_io.load(FLAGS.config, _overrides)
    if named := config.guard.rule_actions():
        from rljax.diagnosis.live import require_rules

        require_rules(named, "guard.rules.")  # here, as the config itself knows no rules
    return config


def overrides_from_flags() -> tuple[tuple[str, str | None], ...]:
    """Returns the --config.KEY=VALUE pairs alone, for a config that comes from elsewhere."""
    return tuple(_overrides)


def workdir_from_flags(what: str = "a directory for the run") -> Path:
    """Returns --workdir, or the directory that a YAML file of AReaL's names.

    That file names it by fileroot, experiment_name and trial_name.

    Args:
      what: description of the directory, for the error if it is missing.

    Raises:
      UserError: neither is given.
    """
    from rljax.config.foreign import areal

    if FLAGS.workdir:
        return Path(FLAGS.workdir)
    named = areal.workdir(FLAGS.config) if FLAGS.config and areal.is_areal(FLAGS.config) else None
    if named is None:
        raise UserError(f"--workdir: missing ({what})")
    return named


def run_directories(values: Iterable[str]) -> list[Path]:
    """Returns the directories of runs in the values of --workdir, each with commas between several.

    Raises UserError for a run that is named twice, as statistics over runs would count it twice.
    """
    workdirs = [Path(part) for value in values for part in value.split(",") if part]
    if len({workdir.resolve() for workdir in workdirs}) < len(workdirs):
        raise UserError("--workdir: a run is named twice")
    return workdirs


def arguments_from_flags() -> tuple[str, ...]:
    """Returns the positional arguments, for a binary whose `run_main` takes them."""
    return tuple(_arguments)


def check_writable(path: Path) -> None:
    """Checks that the report of --json can be written, before minutes of work.

    Leaves an existing file unchanged. Raises UserError.
    """
    there = path.exists()
    try:
        path.open("a").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise UserError(f"--json: cannot write {path}: {error.strerror}") from None


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Yields a directory that is deleted afterwards.

    A UserError that leaves it names the model that was made from scratch in its `init` as such: by
    its place nobody would find it.
    """
    with tempfile.TemporaryDirectory(prefix="rljax-") as name:
        try:
            yield Path(name)
        except UserError as error:
            error.args = tuple(without_scratch(str(each), Path(name)) for each in error.args)
            raise


def without_scratch(text: str, scratch: Path) -> str:
    """Returns a text with the model from scratch named in place of its directory in `scratch`."""
    return text.replace(str(scratch / "init"), FROM_SCRATCH)


def run_main(run: Callable[[], None], *, takes_arguments: bool = False) -> NoReturn:
    """Parses the flags, calls `run` and exits.

    The status is 0, or 1 with one line on stderr for an error that the user can fix, or 128 and the
    number of a signal that stopped it. A workflow or reward that always fails shows its frames of
    the first traceback before that line, and a lost rank the end of its output. Where nobody reads
    stdout any more (`| head`), the binary ends without a word, with the status of SIGPIPE. Any
    other error is a bug and keeps its traceback.

    Args:
      takes_arguments: the binary takes positional arguments (`arguments_from_flags`); they are an
        error otherwise.
    """
    standard_streams.open_closed()
    interpreter.collect_less_often()
    logging.get_absl_handler().setFormatter(screen.Plain())
    logging.get_absl_handler().python_handler.stream = screen.Stderr()
    logging.get_absl_handler().addFilter(screen.is_for_the_screen)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # XLA's own log, from warnings on
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # its advice to install torch
    end_on_signals()
    try:
        app.run(lambda _: _flushed(run), flags_parser=functools.partial(_parse_flags, takes_arguments=takes_arguments))
    except (PluginFailed, TooManyFailures) as error:
        if error.__cause__ is not None and (shown := frames.shown(error.__cause__)):
            print(shown, file=sys.stderr)
        _fail(str(error))
    except (UserError, GuardrailError) as error:
        _fail(str(error))
    except RankFailed as error:
        print(error.detail, file=sys.stderr)
        with contextlib.suppress(SystemExit):
            _fail(str(error))
        sys.stdout.flush()
        os._exit(1)  # a thread may hang in a collective with that rank, and a normal exit would wait for it
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        _fail(f"{error.name}: not installed (pip install 'rljax[{EXTRAS[error.name]}]>=0.1')")
    except BrokenPipeError:
        if not _has_no_reader():
            raise
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # for what is left to be flushed at exit
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        if not error_lines.is_no_space(error):
            raise
        _fail(error_lines.no_space_line(error))
    except Stopped as stopped:
        command_ends(str(stopped))
        _fail(str(stopped), 128 + stopped.number)
    except KeyboardInterrupt:
        _fail("interrupted", 128 + signal.SIGINT)
    finally:
        command_ends()
    sys.exit(0)


def _flushed(run: Callable[[], None]) -> None:
    """Calls `run` and flushes stdout while an error of that still has a handler."""
    try:
        run()
    finally:
        sys.stdout.flush()


def _has_no_reader() -> bool:
    """Returns whether stdout is a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # an error is always reported
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _fail(message: str, status: int = 1) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def _parse_flags(argv: Sequence[str], *, takes_arguments: bool = False) -> list[str]:
    """Takes the overrides out and parses the other flags.

    Raises UserError for unknown ones.
    """
    if _HELP & set(argv[1:]):
        print(command_help.text(), flush=True)
        sys.exit(0)
    rest = _take_overrides(argv)
    try:
        left: list[str] = FLAGS(rest)
    except flags.Error as error:
        raise UserError(" ".join(str(error).split())) from None
    _arguments[:] = left[1:]
    if _arguments and not takes_arguments:
        raise unexpected(_arguments[0])
    if FLAGS["verbosity"].using_default_value:
        # Otherwise checkpoints and data log every step
        FLAGS.verbosity = logging.WARNING  # type: ignore[assignment]
        standard_logging.getLogger("rljax").setLevel(standard_logging.INFO)  # what this package says is said
    return left


def unexpected(argument: str) -> UserError:
    """Makes the error for a positional argument, which may be meant for --workdir."""
    hint = f"--workdir={argument}" if "workdir" in FLAGS and Path(argument).is_dir() else "--help names the flags"
    return UserError(f"{argument}: unexpected argument ({hint})")


def _take_overrides(argv: Sequence[str]) -> list[str]:
    """Takes out `--config.a.b=v`, `--config.a.b v` and, of a bool, `--config.a.b`."""
    _overrides.clear()
    rest: list[str] = []
    arguments = iter(range(len(argv)))
    for i in arguments:
        match = _OVERRIDE.fullmatch(argv[i])
        if match is None:
            rest.append(argv[i])
            continue
        key, value = match[1], match[2]
        if value is None and i + 1 < len(argv) and not argv[i + 1].startswith("--"):
            value = argv[next(arguments)]
        _overrides.append((key, value))
    return rest
