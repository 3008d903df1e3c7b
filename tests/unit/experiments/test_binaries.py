"""Binaries: --help works, bad input is one clear line and exit status 1, and neither waits for
jax.
"""

import errno
import functools
import importlib
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from rljax.errors import IncompleteRun, PluginFailed, TooManyFailures, UserError
from rljax.experiments import main, recording
from rljax.sinks import RunState, Status
from rljax.sinks.run_directory import RunDirectory

REPOSITORY = Path(__file__).resolve().parents[3]
HEAVY = ("jax", "torch", "transformers", "grain", "flax", "orbax")


def train(*arguments: str) -> subprocess.CompletedProcess:
    """Runs experiments.train from the repository's root; names the heavy modules that it imported
    on stdout's last line. What a busy machine makes it say of its stages is left out.
    """
    script = (
        "import runpy, sys, atexit\n"
        f"atexit.register(lambda: print(*(m for m in {HEAVY} if m in sys.modules), sep=','))\n"
        "sys.argv[0] = 'train'\n"
        "runpy.run_module('experiments.train', run_name='__main__', alter_sys=True)\n"
    )
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=Path(__file__).resolve().parents[3], capture_output=True, text=True, check=False)
    done.stderr = re.sub(r"(?m)^.* \.\.\.\n", "", done.stderr)
    return done


def test_help_says_the_command_and_the_flags():
    done = train("--help")
    assert done.returncode == 0 and done.stderr == ""
    assert "python -m experiments.train --config=configs/quickstart.py" in done.stdout
    assert "--config:" in done.stdout and "--workdir:" in done.stdout
    assert done.stdout.splitlines()[-1] == ""  # nothing heavy was imported


def test_every_binary_that_code_or_pages_name_is_there():
    root = REPOSITORY
    sources = [*(file for part in ("rljax", "engines", "backends") for file in (root / part).rglob("*.py"))]
    sources += [root / "README.md", *(root / "docs").glob("*.md")]
    named = {name for file in sources for name in re.findall(r"\bexperiments\.((?:bench\.)?[a-z_]+)", file.read_text())}
    assert "train" in named
    places = {name: root / "experiments" / name.replace(".", "/") for name in named}
    assert [name for name, place in places.items() if not (place.is_dir() or place.with_suffix(".py").is_file())] == []


QUICKSTART = "--config=configs/quickstart.py"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--config: missing"),
        (["--config=nowhere.py"], "--config: no such file: nowhere.py"),
        ([QUICKSTART, "--config.actor.eps_clip_highr=0.3"], "actor.eps_clip_highr: no such key (did you mean eps_clip_higher)"),
        ([QUICKSTART, "--config.seed", "x"], "seed: expected an integer, got 'x'"),
        ([QUICKSTART, "--config.gconfig.top_p=0.8"], "gconfig.top_p: training needs top_p=1"),
        ([QUICKSTART, "--config.allocation_mode=jax:d1p2"], "allocation_mode: jax has no pipeline parallelism (p)"),
        ([QUICKSTART, "--config.allocation_mode=jaxx:d1"], "allocation_mode: no engine named 'jaxx'"),
        ([QUICKSTART, "--config.allocation_mode=sglang.d4"], "allocation_mode: sglang:d4 only samples"),
        ([QUICKSTART, "--config.allocation_mode=fsdp:d2"], "allocation_mode: fsdp:d2 only learns"),
        ([QUICKSTART], "--workdir: missing"),
        ([QUICKSTART, "--workdr=x"], "Unknown command line flag 'workdr'"),
        ([QUICKSTART, "stray"], "stray: unexpected argument"),
    ],
)
def test_bad_input_is_one_line_and_status_1_before_anything_heavy(arguments, expected):
    done = train(*arguments)
    assert done.returncode == 1
    first, *rest = done.stderr.splitlines()
    assert first.startswith(f"error: {expected}")
    assert not rest or expected.startswith("allocation_mode")  # which shows where, in two lines more
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["--config.warmup.field=demo"], "warmup.field: task:addition: example 0 has no text 'demo' to train on (its fields: "),
        (["--config.train_dataset.type=prompt_anser"], "train_dataset.type: no format named 'prompt_anser' (did you mean"),
        (
            ["--config.train_dataset.max_length=None", "--config.train_dataset.system_prompt=" + "7" * 90],
            "train_dataset.max_length: None, and task:addition: example 0 has 9",
        ),
    ],
)
def test_bad_data_is_one_line_before_an_engine_is_made(tmp_path, changes, expected):
    done = train(QUICKSTART, f"--workdir={tmp_path}", *changes)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {expected}"), done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "metrics.jsonl").exists()


def test_a_rule_that_does_not_exist_is_named_before_anything_is_written(tmp_path):
    done = train(QUICKSTART, f"--workdir={tmp_path / 'run'}", "--config.guard.rules.reward.sgn=warn")
    assert (done.returncode, done.stderr) == (
        1,
        "error: guard.rules.reward.sgn: no such rule (did you mean reward.sign or reward.scale or reward.falls?)\n",
    )
    assert not (tmp_path / "run").exists() and done.stdout.splitlines()[-1] == ""


def test_attaching_where_nobody_listens_is_one_line(tmp_path):
    for address, line in (
        (str(tmp_path), f"error: --attach: no run listens in {tmp_path} (one with rollout.listen or rollout.workers does)\n"),
        ("127.0.0.1:9", "error: --attach: the run's token is needed (set RLJAX_TOKEN;"),
    ):
        command = [sys.executable, "-m", "experiments.rollout", f"--attach={address}", "--patience=0"]
        done = subprocess.run(command, cwd=Path(__file__).resolve().parents[3], capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and done.stderr.startswith(line) and done.stderr.count("\n") == 1


def test_a_failed_run_says_so_in_its_status(tmp_path):
    done = train(
        QUICKSTART,
        f"--workdir={tmp_path}",
        "--config.train_dataset.path=nowhere.jsonl",
        "--config.train_dataset.type=prompt_answer",
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: train_dataset") and "nowhere.jsonl" in line
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "failed" and f"error: {status['error']}" == line
    assert json.loads((tmp_path / "config.json").read_text())["train_dataset"]["path"] == "nowhere.jsonl"


@pytest.mark.parametrize(
    ("argv", "overrides", "rest"),
    [
        (["--config.a.b=1"], [("a.b", "1")], []),
        (["--config.a", "-1", "--workdir=x"], [("a", "-1")], ["--workdir=x"]),
        (["--config.a", "--config.b=c=d"], [("a", None), ("b", "c=d")], []),
        (["-config.a="], [("a", "")], []),
        (["--config.a=x\ny"], [("a", "x\ny")], []),
        (["--config=file.py", "--configuration.a=1"], [], ["--config=file.py", "--configuration.a=1"]),
        (["--config.a=1", "--config.a=2"], [("a", "1"), ("a", "2")], []),
    ],
)
def test_overrides_are_taken_out_of_the_command_line(argv, overrides, rest):
    assert main._take_overrides(["train", *argv]) == ["train", *rest]
    assert main._overrides == overrides


def test_recorded_keeps_the_first_line_of_any_error_and_lets_go_of_the_lock(tmp_path):
    for error, expected in [(UserError("x: wrong"), "x: wrong"), (ValueError("two\nlines"), "ValueError: two lines")]:
        run = RunDirectory(tmp_path)
        with pytest.raises(type(error)), recording.recorded(run, 1):
            raise error
        again = RunDirectory(tmp_path)
        assert (again.read_status().state, again.read_status().error) == (RunState.FAILED, expected)
        again.close()


def test_recorded_leaves_an_incomplete_run_incomplete(tmp_path):
    run = RunDirectory(tmp_path)
    status = Status(RunState.INCOMPLETE, 2, 2, 4, "incomplete at step 2")
    with pytest.raises(IncompleteRun), recording.recorded(run, 1):
        run.write_status(status)
        raise IncompleteRun(status.error)
    assert run.read_status() == status and status.error in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/there/file"),
        UserError("x: wrong"),
    ],
)
def test_the_screen_and_the_status_say_the_same_of_an_end(tmp_path, capfd, error):
    run = RunDirectory(tmp_path)
    with pytest.raises(type(error)), recording.recorded(run, 1):
        raise error
    assert _status_of(error, capfd) == (1, f"error: {run.read_status().error}\n")


@pytest.mark.parametrize(("value", "is_taken"), [("nan", False), ("-5", False), ("0", True), ("inf", True), ("600", True)])
def test_a_worker_waits_for_a_number_of_seconds(value, is_taken):
    code = "import sys; from absl import flags; import experiments.rollout as r; flags.FLAGS(sys.argv)"
    done = subprocess.run(
        [sys.executable, "-c", code, f"--patience={value}"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == is_taken
    assert is_taken or ("patience" in done.stderr.splitlines()[-1] and "number of seconds" in done.stderr)


def test_recorded_leaves_a_run_that_ends_well_alone(tmp_path):
    run = RunDirectory(tmp_path)
    with recording.recorded(run, 1):
        pass
    assert not (tmp_path / "status.json").exists()


def test_recorded_bounds_the_log_and_keeps_its_end(tmp_path):
    with recording.recorded(RunDirectory(tmp_path), 1):
        for number in range(30):
            logging.getLogger("rljax").warning("%d %s", number, "x" * 100_000)
    parts = [tmp_path / "log.txt.1", tmp_path / "log.txt"]
    numbers = [int(line.split()[3]) for part in parts for line in part.read_text().splitlines()]
    assert numbers == list(range(numbers[0], 30)) and 500_000 < sum(part.stat().st_size for part in parts) <= 1 << 20


def _status_of(error: BaseException, capfd) -> tuple[int, str]:
    def fails() -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["binary"])
        main.run_main(fails)
    return ended.value.code, capfd.readouterr().err


def test_errors_of_a_model_from_scratch_do_not_name_its_directory_which_is_gone():
    for kind in (UserError, PluginFailed):
        with pytest.raises(kind) as caught, main.scratch_directory() as scratch:
            raise kind(f"{scratch / 'init'}: has no chat template (train_dataset.type=...)") from KeyError("its cause")
        assert str(caught.value) == f"{main.FROM_SCRATCH}: has no chat template (train_dataset.type=...)"
        assert isinstance(caught.value.__cause__, KeyError) and not scratch.exists()


def test_a_full_disk_is_one_line_whoever_writes(tmp_path, capfd):
    full = os.strerror(errno.ENOSPC)
    rust = SafetensorError(f"Error while serializing: I/O error: {full} (os error 28)")
    for error in (OSError(errno.ENOSPC, full, "runs/one/metrics.jsonl"), rust):
        code, err = _status_of(error, capfd)
        assert code == 1 and full in err and "run the same command again" in err and len(err.splitlines()) == 1


def test_a_full_disk_behind_stdout_is_not_taken_for_that_of_the_run():
    program = "from rljax.experiments import main; import sys; sys.argv[1:] = []; main.run_main(lambda: print('said'))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and re.match(r"error: stdout: .* \(where it is redirected to; ", done.stderr)


def test_a_missing_extra_is_one_line_and_any_other_module_a_fault(capfd):
    assert _status_of(ModuleNotFoundError("No module named 'torch'", name="torch"), capfd) == (
        1,
        "error: torch: not installed (pip install 'rljax[torch]>=0.1')\n",
    )
    with pytest.raises(ModuleNotFoundError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["binary"])
        main.run_main(functools.partial(importlib.import_module, "no_such_module"))


def test_too_many_failures_show_the_frames_of_the_failure_and_not_the_loops(capfd):
    try:
        raise KeyError("no such field")
    except KeyError as cause:
        error = TooManyFailures("recover.max_consecutive_failures: 3 groups failed in a row")
        error.__cause__ = cause
    code, err = _status_of(error, capfd)
    assert code == 1 and err.splitlines()[-1] == f"error: {error}"
    assert "KeyError: 'no such field'" in err and "run_main" not in err
