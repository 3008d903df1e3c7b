"""rljax.train: the page's call, functions and workflows of the caller, an event loop that runs already."""

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import rljax
from rljax.config import io as config_io
from rljax.config import registry
from rljax.configs import quickstart
from rljax.engines.fake import model
from rljax.errors import IncompleteRun, PluginFailed, TooManyFailures, UserError
from rljax.experiments import library, train
from rljax.hf.tokenizer import build_char_tokenizer, load_tokenizer
from rljax.process.signals import request_stop
from rljax.rollout.trajectories import trajectory_of
from rljax.workflows.rlvr import generate

PAGE = Path(__file__).resolve().parents[3] / "docs" / "library.md"


@pytest.fixture
def config():
    config = quickstart.get_config()
    config.allocation_mode = "fake:d1"
    config.warmup.steps = 0
    config.total_train_steps = 2
    config.train_dataset.batch_size = 2
    config.gconfig.n_samples = 2
    config.evaluator.freq_steps = None
    config.valid_dataset.path = ""
    config.reward.workers = 1
    return config


def last_metrics(workdir):
    return json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])


class Counting:
    """A workflow of the caller's, with a reward of its own."""

    def __init__(self, tokenizer, rewards, *, most=3):
        self.tokenizer, self.rewards, self.most, self.episodes = tokenizer, rewards, most, 0

    async def episode(self, generator, prompt, params, seed):
        self.episodes += 1
        ids = self.tokenizer.encode_prompt(prompt)
        completion = await generate(generator, f"{prompt.uid}#{seed}", ids, params, seed)
        return trajectory_of(ids, completion, float(self.most), {"most": self.most})


def test_the_page_trains_within_a_running_event_loop(config, tmp_path, monkeypatch):
    """Imitates a notebook's cell: the block runs on the loop's own thread."""
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    monkeypatch.setattr(quickstart, "get_config", lambda: config)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}

    async def cell():
        exec(compile(block, str(PAGE), "exec"), names)

    asyncio.run(cell())
    assert names["outcome"].finished and names["outcome"].step == 2
    assert "reward/right/avg" in last_metrics(tmp_path / "runs/mine")
    assert json.loads((tmp_path / "runs/mine/config.json").read_text())["reward"]["name"] == "__main__:reward"


def test_a_function_goes_to_the_reward_processes_with_what_it_refers_to(config, tmp_path):
    import os

    parent, part = os.getpid(), 0.25
    config.saver.export_freq_steps = 1

    def reward(prompt, completion):
        return {"reward": part, "elsewhere": float(os.getpid() != parent)}

    assert rljax.train(config, workdir=tmp_path / "run", reward=reward).finished
    metrics = last_metrics(tmp_path / "run")
    assert (metrics["rollout/reward/avg"], metrics["reward/elsewhere/min"]) == (part, 1.0)
    folders = [tmp_path / "run" / name for name in ("exports/1", "exports/2", "export")]
    exports = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    assert exports[1] == exports[2] and exports[0].keys() == exports[1].keys()


def test_a_reward_of_a_script_that_raises_says_in_which_file_and_line(config, tmp_path):
    """Also where the line is of a function inside it, or of another one that it calls."""

    def helper():
        raise ValueError("my bug")

    def direct(prompt, completion):
        return (lambda: 1 / 0)()

    def called(prompt, completion):
        return helper()

    for reward, code in ((direct, direct.__code__), (called, helper.__code__)):
        place = rf"\({Path(__file__).name}:{code.co_firstlineno + 1}\), and on 2 more"
        with pytest.raises(PluginFailed, match=place):
            rljax.train(config, workdir=tmp_path / reward.__name__, reward=reward)


def test_a_reward_that_cannot_be_sent_is_one_line(config, tmp_path):
    lock = threading.Lock()
    with pytest.raises(UserError, match=r"reward.name: .*lambda> cannot be sent to another process: .*lock"):
        rljax.train(config, workdir=tmp_path / "run", reward=lambda prompt, completion: float(lock.locked()))


def test_a_workflow_may_be_an_object(config, tmp_path):
    build_char_tokenizer(tmp_path)
    workflow = Counting(load_tokenizer(tmp_path), None, most=5)
    assert rljax.train(config, workdir=tmp_path / "run", workflow=workflow).finished
    assert last_metrics(tmp_path / "run")["reward/most/avg"] == 5
    assert workflow.episodes >= 8
    config.rollout.workflow_args = {"most": 6}
    with pytest.raises(UserError, match=r"rollout.workflow_args: .*Counting is made already, and takes none"):
        rljax.train(config, workdir=tmp_path / "other", workflow=workflow)


class Broken:
    async def episode(self, sampler, prompt, params, seed):
        raise ZeroDivisionError("my bug")


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_a_workflow_that_always_fails_shows_where_once_and_few_lines_before(config, tmp_path, capsys, in_a_loop):
    config.recover.max_consecutive_failures = 32

    def call():
        rljax.train(config, workdir=tmp_path / "run", workflow=Broken())

    async def cell():
        call()

    own = logging.StreamHandler(sys.stderr)
    with logging_of_a_script(ours=[own]), pytest.raises(TooManyFailures) as info:
        asyncio.run(cell()) if in_a_loop else call()
    said = capsys.readouterr().err
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    assert said.count("Traceback") == 1 and f'{Path(__file__).name}", line' in said
    dropped = re.findall(r"prompt (\S+) is dropped: it failed 4 times(?: \((\d+) are by now\))?", said)
    assert [count for _, count in dropped] == ["", "10"][: len(dropped)] and dropped


def test_what_is_importable_keeps_its_name_and_goes_to_workers(config, tmp_path):
    assert registry.provide(generate) == "rljax.workflows.rlvr:generate"
    assert not registry.is_provided("rljax.workflows.rlvr:generate")
    config.rollout.workers = 1
    with pytest.raises(UserError, match=r"reward.name: .*lambda.* is of this program alone"):
        rljax.train(config, workdir=tmp_path / "run", reward=lambda prompt, completion: 0.0)


def test_a_stop_from_another_thread_saves_and_ends_the_run(config, tmp_path):
    """Interrupts as a notebook does."""
    config.total_train_steps = 1000

    def reward(prompt, completion):
        return 1.0

    class Stopping(Counting):
        async def episode(self, generator, prompt, params, seed):
            if self.episodes == 20:
                threading.Thread(target=request_stop).start()
            return await super().episode(generator, prompt, params, seed)

    async def cell():
        return rljax.train(config, workdir=tmp_path / "run", reward=reward, workflow=Stopping)

    outcome = asyncio.run(cell())
    assert not outcome.finished and 0 < outcome.step < 1000
    assert last_metrics(tmp_path / "run")["reward/most/avg"] == 3  # the class's default
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "stopped"
    config.total_train_steps = outcome.step + 1
    assert rljax.train(config_io.from_dict(config), workdir=tmp_path / "run", reward=reward, workflow=Counting).finished


def test_what_is_wrong_is_one_line(config, tmp_path):
    config.actor.eps_clip_highr = 0.3
    with pytest.raises(UserError, match=r"actor.eps_clip_highr: no such key \(did you mean eps_clip_higher"):
        rljax.train(config, workdir=tmp_path / "run")


def small_model(config, directory, vocab_size=None):
    """Has the run begin with a model on disk, whose tokenizer may have more ids than it."""
    size = build_char_tokenizer(directory)
    model.make_model(directory, vocab_size or size)
    config.actor.path, config.actor.init_from_scratch = str(directory), False
    return size


def records(config, path, *rows, form="prompt_answer"):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.train_dataset.path, config.train_dataset.type = str(path), form


def longest_answer(config, tmp_path):
    config.actor.loss, config.warmup.field, config.actor.mb_spec.max_tokens_per_row = "sft", "answer", 128
    records(config, tmp_path / "a.jsonl", *({"prompt": "1+1=", "answer": "7" * n} for n in (1, 300)))
    return r"a\.jsonl:2: the example has 30\d tokens: actor.mb_spec.max_tokens_per_row=128 cannot hold it"


def foreign_tokenizer(config, tmp_path):
    size = small_model(config, tmp_path / "model", vocab_size=90)
    assert size > 90
    return r"the tokenizer has .* as id 90, and the model of config.json has ids below 90"


def missing_field(config, tmp_path):
    config.reward.name = "gsm8k"
    records(config, tmp_path / "a.jsonl", {"prompt": "1+1=", "answer": "2"})
    return r"^reward.name: .*a\.jsonl:1: gsm8k reads the field 'final', and the record has: answer"


@pytest.mark.parametrize("fault", [longest_answer, foreign_tokenizer, missing_field])
def test_what_can_be_known_of_the_data_is_one_line_before_a_run_begins(config, tmp_path, fault):
    line = fault(config, tmp_path)
    with pytest.raises(UserError, match=line):
        rljax.train(config, workdir=tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_trains_on_no_group_that_differs_only_in_what_is_not_trained(config, tmp_path):
    """All completions of one token are cut, so mixed rewards are those of nothing that is trained."""
    config.actor.mask_no_eos, config.rollout.should_accept_fn = True, "mixed_rewards"
    config.gconfig.max_new_tokens = 1
    config.train_dataset.limit, config.total_train_epochs = 4, 1

    def reward(prompt, completion):
        return float(completion < "5")

    with pytest.raises(IncompleteRun, match=r"^incomplete at step 0: trained on 0 of 4 groups, .*\(4 rejected\)"):
        rljax.train(config, workdir=tmp_path / "run", reward=reward)


def test_a_cosine_that_goes_on_says_what_becomes_of_the_rate(config, tmp_path, caplog):
    config.actor.optimizer.lr_scheduler_type = "cosine"
    for steps in (2, 4):
        config.total_train_steps = steps
        with caplog.at_level("INFO", "rljax"):
            assert rljax.train(config, workdir=tmp_path / "run").finished
        changes = [line for line in caplog.messages if "schedule now ends at optimizer step" in line]
        assert len(changes) == (steps == 4)
    updates = config.actor.ppo_n_minibatches
    assert f"now ends at optimizer step {4 * updates}, not {2 * updates}: " in changes[0]
    assert f"run: {tmp_path / 'run'}, to go on from step 2" in caplog.messages


def test_a_name_that_the_package_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        getattr(rljax, "tarin")  # noqa: B009


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"reward": 3}, "reward.name: 3 is no function"),
        ({"workflow": 3}, "rollout.workflow: 3 is no class and has no 'async def episode'"),
        ({"config": None}, r"config: None \(what get_config\(\) returns"),
        ({"workdir": ""}, "workdir: empty"),
        ({"workdir": None}, "workdir: None is no path"),
    ],
)
def test_an_argument_of_another_kind_is_one_line(config, tmp_path, monkeypatch, arguments, line):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=line):
        rljax.train(**{"config": config, "workdir": "run", **arguments})
    assert not list(tmp_path.iterdir())


@contextlib.contextmanager
def logging_of_a_script(*, level=logging.NOTSET, **handlers):
    """Has the block find logging as a plain script has it, but for what is given of "rljax"."""
    root, ours = logging.getLogger(), logging.getLogger("rljax")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(root, "handlers", handlers.get("root", []))
        patch.setattr(ours, "handlers", handlers.get("ours", []))
        before = ours.level
        ours.setLevel(level)
        yield
        assert (root.handlers, ours.handlers) == (handlers.get("root", []), handlers.get("ours", []))
        assert ours.level == level
        ours.setLevel(before)


def of_the_log(workdir):
    """Returns the lines of log.txt as the screen has them: without times and what engines say of themselves."""
    lines = [line.split(" ", 3)[2:] for line in (workdir / "log.txt").read_text().splitlines()]
    return [f"warning: {text}" if level == "WARNING" else text for level, text in lines]


def test_a_script_is_told_what_the_log_has_and_its_logging_is_as_before(config, tmp_path, capsys):
    records(config, tmp_path / "a.jsonl", *({"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)))
    config.valid_dataset, config.evaluator.freq_steps = config.train_dataset, 1  # this is warned of
    with logging_of_a_script():
        rljax.train(config, workdir=tmp_path / "run", reward=lambda prompt, completion: 1.0)
    said = capsys.readouterr().err.splitlines()
    assert said == of_the_log(tmp_path / "run")
    said = [line for line in said if not line.endswith(" ...")]  # of the stages, on a busy machine
    assert [line.partition(":")[0] for line in said[:6]] == ["warning", "run", "model", "data", "steps", "devices"]


@pytest.mark.parametrize(
    "given", [{"level": logging.ERROR}, {"root": [logging.NullHandler()]}, {"ours": [logging.NullHandler()]}]
)
def test_a_program_that_set_its_logging_up_decides_what_is_shown(config, tmp_path, capsys, given):
    with logging_of_a_script(**given):
        rljax.train(config, workdir=tmp_path / "run")
    assert capsys.readouterr().err == ""


def reward_of(value, part=0.5, *, comment=""):
    """Returns a reward as a notebook's cell makes it: each time of another file and another line."""
    text = f"{comment}\ndef reward(prompt, completion):\n    return {value} * WEIGHT + part()\n"
    names = {"__name__": "__main__", "WEIGHT": part, "part": lambda: 0.0}
    exec(compile(text, f"<cell {comment}>", "exec"), names)
    return names["reward"]


def changed(caplog):
    return [line for line in caplog.messages if "goes on with another reward" in line]


@pytest.mark.parametrize("other", [reward_of(2.0), reward_of(1.0, part=0.25)])
def test_a_reward_that_was_edited_is_told_until_a_step_is_made_with_it(config, tmp_path, caplog, other):
    for reward, steps, lines in (
        (reward_of(1.0), 2, 0),
        (reward_of(1.0, comment="# again\n"), 3, 0),
        (other, 3, 1),
        (other, 4, 1),
        (other, 5, 0),
    ):
        caplog.clear()
        config.total_train_steps = steps
        with caplog.at_level("INFO", "rljax"):
            rljax.train(config, workdir=tmp_path / "run", reward=reward)
        assert len(changed(caplog)) == lines
        nothing = [line for line in caplog.messages if line.startswith("nothing to do: the run ended at step 3")]
        assert len(nothing) == (other is reward and steps == 3)
    sessions = json.loads((tmp_path / "run/context.json").read_text())["sessions"]
    assert len({session["functions"]["reward.name __main__:reward"] for session in sessions}) == 2


@pytest.mark.parametrize("which", ["reward.name", "rollout.workflow", "rollout.should_accept_fn"])
def test_a_function_of_a_module_that_was_edited_is_told(config, tmp_path, caplog, monkeypatch, which):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"edited_{which.replace('.', '_')}"
    module = """
from rljax.workflows.rlvr import RLVR
LEAST = {least}
def least(): return LEAST
def reward(prompt, completion): return least()
class Workflow(RLVR): least = least()
def accept(group): return least() > -1
OTHER = {other}
"""
    attribute = {"reward.name": "reward", "rollout.workflow": "Workflow", "rollout.should_accept_fn": "accept"}[which]
    section, _, key = which.partition(".")
    config[section][key] = f"{name}:{attribute}"
    for least, other, steps, lines in ((0, 1, 1, 0), (0, 2, 2, 0), (1, 2, 3, 1)):
        caplog.clear()
        config.total_train_steps = steps
        (tmp_path / f"{name}.py").write_text(module.format(least=least, other=other))
        rljax.train(config, workdir=tmp_path / "run")
        told = [line for line in caplog.messages if f"goes on with another {which} {name}:{attribute}" in line]
        assert len(told) == lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_scripts_run_and_ends_its_loop_over_seeds(config, tmp_path, number):
    config.total_train_steps = 1000
    runs = []

    class Stopping(Counting):
        async def episode(self, generator, prompt, params, seed):
            if self.episodes == 20:
                os.kill(os.getpid(), number)
            return await super().episode(generator, prompt, params, seed)

    inherited = signal.signal(number, signal.default_int_handler)  # a shell's "&" has some ignored
    try:
        with pytest.raises(KeyboardInterrupt, match=f"^stopped by {number.name}$"):
            for seed in range(2):
                runs.append(tmp_path / str(seed))
                rljax.train(config, workdir=runs[-1], workflow=Stopping)
    finally:
        signal.signal(number, inherited)
    (run,) = runs
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "stopped" and (run / "checkpoints" / str(status["step"])).is_dir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_a_scripts_start_ends_it_at_once_and_the_programs_handlers_are_its_own_again(
    config, tmp_path, monkeypatch, number
):
    """While the start is busy, as with the tokens of many prompts: asyncio would let it end first."""
    ours = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: lambda *_: None}
    inherited = {each: signal.signal(each, handler) for each, handler in ours.items()}
    worked = 0

    def busy(*arguments):
        nonlocal worked
        os.kill(os.getpid(), number)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            worked += 1

    monkeypatch.setattr(train, "_open", busy)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt, match=f"^stopped by {number.name}$"):
            rljax.train(config, workdir=tmp_path / "run")
        assert worked < 10_000 and time.monotonic() - began < 20
        assert {each: signal.getsignal(each) for each in ours} == ours
    finally:
        for each, handler in inherited.items():
            signal.signal(each, handler)
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "stopped"


def test_a_notebooks_interrupt_during_the_start_ends_the_run_and_the_cell(config, tmp_path, monkeypatch):
    """An interrupt of the kernel while the thread opens the model, before anybody waits for a stop."""
    config.total_train_steps = 100_000
    opened, interrupted = train._open, threading.Event()

    def interrupting(*arguments):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        interrupted.wait(60)
        return opened(*arguments)

    def waited(futures, timeout):
        interrupted.set()  # the interrupt has come
        return concurrent.futures._base.wait(futures, timeout)

    monkeypatch.setattr(train, "_open", interrupting)
    monkeypatch.setattr(library.concurrent.futures, "wait", waited)

    monkeypatch.setattr(library, "_in_event_loop", lambda: True)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            rljax.train(config, workdir=tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "stopped"
