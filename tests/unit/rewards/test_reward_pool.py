"""The pool with real processes: what a reward function does wrong stays with that one call."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rljax.config.schema import RewardConfig
from rljax.errors import RewardError, RewardTimeout, UserError
from rljax.metrics.mean import Mean
from rljax.rewards import RewardPool
from rljax.types import Prompt
from tests.processes import is_running, running_children

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PROMPT = Prompt("0/17", ({"role": "user", "content": "3+4="},), {"answer": "7"})


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


def pool(name="example_rewards:act", workers=1, timeout=20.0, memory_mb=0, retries=0):
    return RewardPool(RewardConfig(name, workers, timeout, memory_mb, retries))


def run(function):
    """Runs a coroutine function in a thread of its own: everything here works off the main thread."""
    outcome = []

    def target():
        try:
            outcome.append((asyncio.run(function()), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def children():
    return {process.pid for process in running_children()}


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_scores_errors_and_what_user_code_does_to_its_process():
    before = children()

    async def main():
        async with pool() as rewards:
            for wrong in ("raise broken", "no_total", "nan", "none", "exit", "die"):
                with pytest.raises(RewardError) as caught:
                    await rewards.score(PROMPT, wrong)
                assert "0/17" in str(caught.value)
                yes = await rewards.score(PROMPT, "value 0.25")  # the next call is served, by a new process if need be
                assert (yes.reward, yes.components) == (0.25, {})
            parts = await rewards.score(PROMPT, "parts")
            assert (parts.reward, parts.components) == (1.5, {"right": 1.0, "format": 0.5})
            seen = await rewards.score(PROMPT, "uid")
            assert seen.components == {"index": 17.0, "field": 7.0}
            assert (await rewards.score(PROMPT, "print")).reward == 1.0  # what it prints is no answer
            assert (await rewards.score(PROMPT, "input")).reward == 0.0  # and our jobs are no input of its
            assert (await rewards.score(PROMPT, "modules")).reward == 0.0  # no jax in there: it starts fast
            with pytest.raises(RewardError, match=r"LookupError: the cause\nTraceback"):
                await rewards.score(PROMPT, "raise the cause")
            assert rewards.counts == {"reward_error": 7}
            assert rewards.take_metrics()["timeperf/reward"].count == 6 + 5  # calls that gave a score, and only they
            assert rewards.take_metrics() == {}

    run(main)
    assert children() == before


def test_hung_reward_is_killed_and_starves_nobody():
    async def main():
        async with pool(workers=2, timeout=2.0) as rewards:
            first = (await rewards.score(PROMPT, "pid")).reward
            calls = [rewards.score(PROMPT, word) for word in ("hang", "hang_in_c", "value 1", "value 2", "value 3")]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes[:2]] == [RewardTimeout, RewardTimeout]
            assert [outcome.reward for outcome in outcomes[2:]] == [1.0, 2.0, 3.0]
            assert rewards.counts == {"reward_timeout": 2}
            assert (await rewards.score(PROMPT, "pid")).reward != first  # a new process

    run(main)


def test_an_answer_that_came_while_the_event_loop_stood_still_is_no_timeout():
    """A start that compiles runs no callback for longer than the limit."""

    async def main():
        async with pool(timeout=1.0) as rewards:
            await rewards.score(PROMPT, "value 1")
            asked = asyncio.create_task(rewards.score(PROMPT, "after 0.3"))
            await asyncio.sleep(0.01)  # the job is in the pipe
            assert not asked.done()
            time.sleep(1.5)
            assert (await asked).reward == 2.0
            hung = asyncio.create_task(rewards.score(PROMPT, "hang"))
            await asyncio.sleep(0.01)
            time.sleep(1.5)
            with pytest.raises(RewardTimeout):
                await hung

    run(main)


def test_hung_reward_stalls_neither_the_others_nor_the_event_loop():
    async def main():
        async with pool(workers=2, timeout=60.0) as rewards:
            slow = asyncio.create_task(rewards.score(PROMPT, "hang"))
            for value in range(20):  # all of these pass it by, through the other process
                assert (await rewards.score(PROMPT, f"value {value}")).reward == value
            assert not slow.done()
            slow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await slow
            outcomes = await asyncio.gather(*(rewards.score(PROMPT, "pid") for _ in range(2)))  # both can be used again
            assert all(is_running(int(outcome.reward)) for outcome in outcomes)

    run(main)


def test_a_timeout_takes_the_processes_that_the_reward_started(tmp_path):
    pids = tmp_path / "pids"

    async def main():
        async with pool(timeout=2.5) as rewards:
            with pytest.raises(RewardTimeout):
                await rewards.score(PROMPT, f"spawn {pids}")
            for pid in map(int, pids.read_text().split()):
                wait_until(lambda pid=pid: not is_running(pid))

    run(main)


def test_a_process_that_dies_is_waited_for_not_its_pipe(tmp_path):
    """A daemon that it forked holds the pipe open; it ends too, and the death is no timeout."""
    pid = tmp_path / "pid"

    async def main():
        async with pool(timeout=3600.0) as rewards:
            with pytest.raises(RewardError, match="was killed by SIGKILL"):
                await rewards.score(PROMPT, f"fork {pid}")
            wait_until(lambda: not is_running(int(pid.read_text())))
            assert (await rewards.score(PROMPT, "value 1")).reward == 1.0

    run(main)


def test_an_answer_of_megabytes_is_an_error_of_that_call():
    async def main():
        async with pool(timeout=60.0) as rewards:
            process = (await rewards.score(PROMPT, "pid")).reward
            for components in (60_000, 200_000):
                with pytest.raises(RewardError, match=r"what the reward returned takes [0-9]+ bytes, and 1048576 are allowed"):
                    await rewards.score(PROMPT, f"many {components}")
            assert (await rewards.score(PROMPT, "pid")).reward == process

    run(main)


def test_retries_hide_a_failure_that_does_not_come_again(tmp_path):
    async def main():
        async with pool(retries=1) as rewards:
            assert (await rewards.score(PROMPT, f"flaky {tmp_path / 'marker'}")).reward == 1.0
            with pytest.raises(RewardError):
                await rewards.score(PROMPT, "raise always")
            assert rewards.counts == {"reward_error": 1 + 2}
            # Each was made again once; that the second failed for good is the episode's failure, counted there.
            assert rewards.take_metrics()["rollout/retried/reward_error"] == Mean(2, 1)
            assert rewards.take_metrics()["rollout/retried/reward_error"] == Mean(0, 1)

    run(main)


def test_memory_beyond_the_limit_is_an_error_of_that_call():
    async def main():
        async with pool(memory_mb=1024) as rewards:
            assert (await rewards.score(PROMPT, "allocate 1")).reward == 1 << 20
            with pytest.raises(RewardError, match="MemoryError"):
                await rewards.score(PROMPT, "allocate 2048")
            assert (await rewards.score(PROMPT, "value 1")).reward == 1.0

    run(main)


def test_async_rewards_run_side_by_side_and_time_out_one_by_one():
    async def main():
        async with pool("example_rewards:act_async", timeout=2.0) as rewards:
            answers = [rewards.score(PROMPT, "meet 20") for _ in range(20)]
            outcomes = await asyncio.gather(*answers, rewards.score(PROMPT, "sleep 60"), return_exceptions=True)
            assert [outcome.reward for outcome in outcomes[:20]] == [1.0] * 20
            assert isinstance(outcomes[20], RewardTimeout)
            with pytest.raises(RewardError, match="a judge did not answer"):  # its own timeout is its own error
                await rewards.score(PROMPT, "own_timeout")

    run(main)


def test_an_async_reward_that_blocks_is_killed_and_its_neighbors_are_asked_again():
    async def main():
        async with pool("example_rewards:act_async", timeout=1.5) as rewards:
            first = (await rewards.score(PROMPT, "pid")).reward
            blocked = asyncio.create_task(rewards.score(PROMPT, "block 3600"))
            await asyncio.sleep(0.3)
            neighbor = asyncio.create_task(rewards.score(PROMPT, "pid"))
            with pytest.raises(RewardTimeout):
                await blocked
            assert (await neighbor).reward not in (0.0, first)

    run(main)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("exat", "reward.name: no reward named 'exat' (did you mean exact or math?, or 'package.module:attribute')"),
        ("no_such_module:f", "reward.name: cannot import no_such_module: ModuleNotFoundError"),
        ("example_rewards:actt", "reward.name: example_rewards has no 'actt' (did you mean act"),
        ("example_rewards:not_callable", "reward.name: example_rewards:not_callable is a int, not a reward"),
        (
            "os.path:basename",
            "reward.name: os.path:basename takes (p), which is none of the shapes of a reward (",
        ),
    ],
)
def test_a_reward_that_cannot_be_had_is_refused_before_anything_starts(name, line):
    before = children()
    with pytest.raises(UserError) as caught:
        run(pool(name, workers=1).start)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
    assert children() == before


def test_closing_answers_what_waits_and_leaves_no_process():
    before = children()

    async def main():
        rewards = pool(workers=1, timeout=3600.0)
        await rewards.start()
        calls = [asyncio.create_task(rewards.score(PROMPT, "hang_in_c")) for _ in range(3)]
        await asyncio.sleep(0.3)
        await rewards.close()
        outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30.0)
        assert all(isinstance(outcome, RewardError) for outcome in outcomes)

    run(main)
    assert children() == before


def test_a_process_imports_nothing_of_the_pool_or_of_a_tokenizer_and_no_numpy():
    """It starts in every run, once a worker."""
    code = "import sys, rljax.rewards.process_main; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert "rljax.rewards.score" in imported
    assert not {"rljax.rewards.pool", "rljax.hf", "rljax.config.schema", "absl", "numpy", "transformers"} & set(imported)


PARENT = """
import asyncio, sys
sys.path[:0] = [{root!r}, {here!r}]
from rljax.config.schema import RewardConfig
from rljax.rewards import RewardPool
from rljax.types import Prompt

async def main():
    rewards = RewardPool(RewardConfig("example_rewards:act", 3, 3600.0, 0, 0))
    await rewards.start()
    prompt = Prompt("0/0", (), {{}})
    calls = [asyncio.create_task(rewards.score(prompt, word)) for word in ("hang", "hang_in_c")]
    await asyncio.sleep(0.5)
    print(*[supervisor.process._process.pid for supervisor in rewards._supervisors], flush=True)
    await asyncio.gather(*calls)

asyncio.run(main())
"""


def test_no_process_outlives_a_parent_that_is_killed():
    code = PARENT.format(root=str(ROOT), here=str(HERE))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3 and all(is_running(pid) for pid in pids)
        for pid in pids:
            os.kill(pid, signal.SIGINT)  # as Ctrl-C does to a whole terminal: it is the parent's to handle
        time.sleep(0.2)
        assert all(is_running(pid) for pid in pids)
        parent.kill()
    for pid in pids:
        wait_until(lambda pid=pid: not is_running(pid))


def test_what_shipped_rewards_import_late_is_there_before_the_clock_of_the_first_call_runs(tmp_path, monkeypatch):
    own = "import sys\nfrom rljax.rewards import mathematics\n\n\ndef reward(prompt, completion):\n"
    (tmp_path / "on_mathematics.py").write_text(own + "    return float(completion in sys.modules)\n")
    monkeypatch.syspath_prepend(tmp_path)

    async def scenario():
        async with pool("on_mathematics:reward") as rewards:
            return [(await rewards.score(PROMPT, module)).reward for module in ("math_verify", "reasoning_gym")]

    assert run(scenario) == [1.0, 0.0]


def test_shipped_rewards_work_in_their_process():
    async def main():
        async with pool("gsm8k", memory_mb=2048) as rewards:
            prompt = Prompt("0/0", ({"role": "user", "content": "?"},), {"final": "72"})
            scores = await asyncio.gather(*(rewards.score(prompt, f"so it is\n#### {n}") for n in (71, 72, 73)))
            assert [score.components for score in scores] == [{"gsm8k": 0.0}, {"gsm8k": 1.0}, {"gsm8k": 0.0}]

    run(main)
