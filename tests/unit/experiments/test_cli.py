"""The command rljax: every program by its name, the binary's own help and errors, and nothing
imported that isn't asked for.
"""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rljax.experiments import cli, command_help
from rljax.process import interpreter
from tests.unit.experiments.test_binaries import HEAVY
from tests.unit.test_bazel import is_program

REPOSITORY = Path(__file__).resolve().parents[3]


def rljax(*arguments: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    """Runs `python -m rljax`; names the modules that it imported, of those worth a second, on
    stdout's last line.
    """
    script = (
        "import atexit, runpy, sys\n"
        f"sys.path[:] = [{str(REPOSITORY)!r}, *filter(None, sys.path)]  # the command adds the working directory\n"
        f"atexit.register(lambda: print(*(m for m in {(*HEAVY, 'absl', 'numpy')} if m in sys.modules), sep=','))\n"
        "runpy.run_module('rljax', run_name='__main__', alter_sys=True)\n"
    )
    return subprocess.run([sys.executable, "-c", script, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def test_every_program_is_a_command():
    """Commands are exactly the programs and the menus; parts of a program are none."""
    for menu, names in cli.MENUS.items():
        folder = REPOSITORY.joinpath("experiments", *menu.split()[1:])
        programs = {file.stem for file in folder.glob("*.py") if is_program(file)}
        assert {name for name in names if f"{menu} {name}" not in cli.MENUS} == programs


def test_the_readme_has_every_command_in_both_forms():
    readme = (REPOSITORY / "README.md").read_text()
    forms = {name: f"| `rljax {name}` | `python -m experiments.{name}` |" for name in cli.MENUS["rljax"] if name != "bench"}
    assert [name for name, form in forms.items() if form not in readme] == []


@pytest.mark.parametrize("menu", cli.MENUS)
def test_a_menu_lists_its_commands_by_what_their_docstrings_say_first(menu):
    shown = [line for line in cli.listing(menu).splitlines() if line.startswith("  ")]
    for name, line in zip(cli.MENUS[menu], shown, strict=True):
        path = REPOSITORY.joinpath("experiments", *menu.split()[1:], name)
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        docstring = ast.get_docstring(ast.parse(source))
        assert line.split(maxsplit=1) == [name, docstring.splitlines()[0]] and len(line) <= 110


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_the_list_imports_nothing(arguments):
    done = rljax(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == cli.listing("rljax") + "\n\n"


def test_help_of_a_command_is_its_binarys_with_the_commands_name():
    done = rljax("train", "--help")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.splitlines()[-1] == "absl"
    assert done.stdout.startswith("usage: rljax train [flags]\n\nTrains")
    assert "rljax train --config=quickstart --workdir=runs/quickstart" in done.stdout
    assert "experiments" not in done.stdout and "  --workdir: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "error: rljax trian: no such command (did you mean train?)"),
        (["bench", "lerner"], "error: rljax bench lerner: no such command (did you mean learner"),
        (["worker"], f"error: rljax worker: no such command (there are {len(cli.MENUS['rljax'])}: "),  # a part of a program
        (["train"], "error: --config: missing (a config by its name, such as quickstart, "),
        (["train", "--config=quikstart"], "error: --config: no such file: quikstart (did you mean quickstart?)"),
        (["train", "--config=quickstart"], "error: --workdir: missing"),
        (["bench", "packing", "stray"], "error: stray: unexpected argument"),
        (["bench", "curves", "nowhere"], "error: nowhere: no metrics.jsonl"),
    ],
)
def test_bad_input_is_one_line_and_status_1(arguments, expected):
    done = rljax(*arguments)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(expected)


def test_the_working_directory_is_on_the_import_path(tmp_path):
    """A config's own modules are found, as under `python -m`."""
    (tmp_path / "mine.py").write_text("WORKDIR = 'here'\n")
    (tmp_path / "config.py").write_text("import mine\n\ndef get_config():\n    raise ValueError(mine.WORKDIR)\n")
    done = rljax("train", "--config=config.py", cwd=tmp_path)
    assert done.stderr == "error: --config: config.py:4: ValueError: here\n"


def test_commands_of_a_checkout_are_told_as_those_of_an_install():
    for text, expected in {
        "python -m experiments.train --config=configs/algorithms/grpo.py": "rljax train --config=algorithms/grpo",
        "torchrun -m experiments.bench.learner --engine=fsdp": "torchrun -m rljax.experiments.bench.learner --engine=fsdp",
        "a dump that experiments.rollout wrote.": "a dump that rljax rollout wrote.",
        "rljax.experiments.bench.curves and our_experiments.train": "rljax.experiments.bench.curves and our_experiments.train",
        "--config=mine/configs/x.py": "--config=mine/configs/x.py",
    }.items():
        assert command_help.installed(text) == expected


@pytest.mark.parametrize("module", ["experiments.train", "rljax.experiments.check", "rljax"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_command_still_imports_its_parts_is_one_line(module, number, tmp_path):
    (tmp_path / "absl").mkdir()
    (tmp_path / "absl" / "__init__.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    command = [sys.executable, "-m", module, *(["train"] if module == "rljax" else [])]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (128 + number, f"error: stopped by {number.name}\n")


def test_a_program_collects_less_garbage_from_its_start_on():
    code = "import gc; from rljax.experiments import main; main.run_main(lambda: print(*gc.get_threshold()))"
    threshold = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
    assert int(threshold.split()[0]) == interpreter.YOUNG_OBJECTS
