"""The command `plan`: its exit status and its lines, without a framework."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


def command(*arguments):
    script = (
        "import runpy, sys, atexit\n"
        "atexit.register(lambda: print(*(m for m in ('jax', 'torch', 'transformers') if m in sys.modules), sep=','))\n"
        "sys.argv[0] = 'plan'\n"
        "runpy.run_module('experiments.plan', run_name='__main__', alter_sys=True)\n"
    )
    line = [sys.executable, "-c", script, "--config=configs/quickstart.py", *arguments]
    return subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["--topology=v5e:2x4", "--topology=h100:8"], 0, ""),
        (["--topology=h100:1", "--topology=v5e:1x1", "--shape=qwen3-8b"], 2, ""),
        (
            ["--config=base", "--topology=h100:1", "--topology=v5e:1x1", "--shape=qwen3-8b"],
            2,
            "",
        ),  # that has neither model nor data
        (
            ["--topology=h100:1", "--programs=update"],
            1,
            "error: --programs: 'update' chooses among the programs that --compile",
        ),
        (["--topology=cpu:1"], 1, "error: --topology: CPUs have no plan"),
        (["--topology=h10:1"], 1, "error: --topology: 'h10:1' is none"),
        (["--topology=h100:12", "--topology=v5e:3x3"], 1, "error: --topology: v5e:3x3 is no slice of v5e (as in v5e:4x4)"),
        ([], 1, "error: --topology: missing"),
        (["--topology=h100:1", "--config.allocation_mode=sglang:d1"], 1, "error: allocation_mode: sglang:d1 only samples"),
        (["--topology=h100:1", "--prompt_tokens=17"], 1, "error: --prompt_tokens: 17 is more than 15: jax.context_length=16"),
        (["--topology=h100:1", "--shape=qwen3-8"], 1, "error: --shape: no model named 'qwen3-8' (did you mean qwen3-8b"),
    ],
)
def test_the_exit_status_is_the_verdict_and_no_framework_is_needed(arguments, status, line):
    done = command(*arguments)
    assert done.returncode == status and done.stderr.startswith(line) and done.stderr.count("\n") == bool(line)
    *shown, heavy = done.stdout.splitlines()
    assert heavy == ""
    verdicts = [each for each in shown if each.startswith("verdict:")]
    assert status == 1 or len(verdicts) == sum(argument.startswith("--topology") for argument in arguments)
    assert any("does not fit" in each for each in verdicts) == (status == 2)


def test_pools_over_several_hosts_are_warned_of_and_do_not_change_the_verdict():
    """A host of a 4x4 slice has 4 devices, a 2x4 slice is one host."""
    arguments = ["--config=base", "--shape=qwen3-8b", "--topology=v6e:4x4", "--topology=v6e:2x4"]
    text = command(*arguments, "--config.allocation_mode=jax:f8")
    warned, alone = text.stdout.split("verdict: ")[1:]
    assert text.returncode == 0 and "warning" not in alone
    assert "\nwarning: allocation_mode: jax:f8 shares its devices, which only the pools of one host can do" in warned
    told = command(*arguments, "--config.allocation_mode=jax:f4", "--json")
    several, one = json.loads(told.stdout.splitlines()[0])
    assert several["warnings"] == one["warnings"] == []
    wider = [[change["value"] for change in each["changes"] if change["key"] == "allocation_mode"] for each in (several, one)]
    assert wider == [[], ["jax:f8"]]
