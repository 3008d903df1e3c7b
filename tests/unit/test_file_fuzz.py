"""Files that are valid JSON and no sense: each reader succeeds, or says in one line which file is wrong.

Mutations replace, remove and swap values of files that a run, an export or a data set wrote. What
the doctor reads it reads whatever is in it: it never fails.
"""

import copy
import json
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from rljax import loop
from rljax.checkpoints import integrity
from rljax.checkpoints.loop_state import Saved
from rljax.config import resume
from rljax.config.schema import DatasetConfig, LoraConfig, StatsLoggerConfig
from rljax.data.prompts import open_prompts
from rljax.diagnosis import History, all_rules, diagnose, importers
from rljax.diagnosis.report import run_page
from rljax.diagnosis.summaries import checklist, render
from rljax.errors import UserError
from rljax.evaluation import results, uses
from rljax.evaluation.protocol import Protocol
from rljax.evaluation.results import Answers, Policy, Result, Sample
from rljax.experiments.worker import _find_trainer
from rljax.flight.recording import Recording
from rljax.hf import adapter
from rljax.hf.agreement import check as check_agreement
from rljax.hf.rope import frequencies
from rljax.hf.spec import ModelSpec, read_vocab_size
from rljax.hf.tokenizer import build_char_tokenizer, load_tokenizer
from rljax.hf.tokenizer_files import eos_ids
from rljax.hf.turn_ends import write_turn_ends
from rljax.hf.weights import INDEX, WeightReader
from rljax.metrics.accumulator import Accumulator
from rljax.metrics.guard_actions import GuardActions
from rljax.rollout import dump
from rljax.rollout.buffer import Buffer
from rljax.run.verdicts import Verdicts
from rljax.sinks import Sinks, context
from rljax.sinks.run_directory import RunDirectory, RunDirectorySink
from rljax.testing.harness import Numbers, make_config, make_run
from rljax.testing.models import make_model

NUMBERS = (0, 1, -1, 2**31, 2**70, 0.5, -1e308, 1e400)
ODD = (None, True, False, *NUMBERS, "", "7", "llama", "\0", "x" * 300, [], [1], ["a", None], {}, {"a": 1}, [[]])
QUICK, THOROUGH = 24, 300  # mutations per file
SETTINGS = {"total_train_steps": 6, "total_train_epochs": 8, "evaluator.freq_steps": 3, "saver.freq_steps": 3}
SETTINGS |= {"warmup.steps": 1}


# Mutations --------------------------------------------------------------------------------------------------------------


def _places(value, path=()):
    """Yields the path of every value in a JSON tree."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _places(child, (*path, key))


def mutated(content, rng):
    """Returns a JSON tree with one to three values replaced or removed."""
    content = json.loads(json.dumps(content))
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(list(_places(content)))
        if not path:
            if rng.random() < 0.1:
                return rng.choice(ODD)
            continue
        parent = content
        for key in path[:-1]:
            parent = parent[key]
        if rng.random() < 0.15:
            del parent[path[-1]]
        else:
            parent[path[-1]] = copy.deepcopy(rng.choice(ODD))
    return content


def mutated_text(name, text, rng):
    """Returns a file's text with a mutation; of a file of lines in one of them, or a broken line."""
    if not name.endswith(".jsonl"):
        return json.dumps(mutated(json.loads(text), rng))
    lines = text.split("\n")
    at = rng.randrange(len(lines) - 1)
    broken = rng.random() < 0.1
    lines[at] = rng.choice(["", "{", "\0" * 9, "[" * 5000]) if broken else json.dumps(mutated(json.loads(lines[at]), rng))
    return "\n".join(lines)


# A model's directory, an adapter, a data set ----------------------------------------------------------------------------


def read_spec(directory):
    read_vocab_size(directory)
    spec = ModelSpec.from_directory(directory)
    for rope in spec.ropes:
        frequencies(rope, min(spec.head_dim, 4096))
    WeightReader(directory).check(spec)


def read_weights(directory):
    WeightReader(directory).check(ModelSpec.from_directory(directory))


def read_eos(directory):
    eos_ids(directory, types.SimpleNamespace(eos_token_id=2))


def read_tokenizer(directory):
    """Loads, checks and exports a tokenizer, with what ends turns added."""
    check_agreement(directory, load_tokenizer(directory))
    names = ("generation_config.json", "config.json", "tokenizer_config.json", "special_tokens_map.json")
    before = {name: (directory / name).read_text() for name in names}
    try:
        write_turn_ends(directory, [3])
    finally:
        for name, text in before.items():
            (directory / name).write_text(text)


def read_adapter(directory):
    adapter._check(directory, adapter._settings(directory), LoraConfig(rank=3, alpha=6.0))


def read_saved_data(directory):
    open_prompts(DatasetConfig(path=str(directory), split="train", type="prompt_answer"), seed=1)


def read_records(directory):
    path = next(directory.glob("*.jsonl"))
    prompts = open_prompts(DatasetConfig(path=str(path), type=directory.name), key="train_dataset", seed=1)
    for _ in range(len(prompts)):
        next(prompts)


def make_model_directory(path):
    make_model(path)
    build_char_tokenizer(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "bos_token_id": 1, "temperature": 0.7}))
    config = json.loads((path / "config.json").read_text())
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    (path / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
    weights = {name: "model.safetensors" for name in WeightReader(path).shapes}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weights}))
    special = {"eos_token": "<eos>", "pad_token": {"content": "<pad>", "lstrip": False, "special": True}}
    (path / "special_tokens_map.json").write_text(json.dumps(special))


def make_adapter(path):
    path.mkdir()
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 6.0, "target_modules": ["q_proj"], "bias": "none", "use_dora": False}
    (path / adapter.SETTINGS).write_text(json.dumps(settings))


def make_saved_data(path):
    import pyarrow

    path.mkdir()
    table = pyarrow.table({"question": ["1+1="], "answer": ["2"]})
    with pyarrow.OSFile(str(path / "data.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    (path / "train").mkdir()
    (path / "data.arrow").rename(path / "train" / "data.arrow")
    (path / "train" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}], "_split": "train"}))
    (path / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
RECORDS = {
    "gsm8k": [{"question": "1+1?", "answer": "it is\n#### 2"}],
    "prompt_answer": [
        {"question": "1+1?", "answer": "2"},
        {
            "messages": [
                {"role": "user", "content": "add"},
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "2", "tool_call_id": "1"},
            ],
            "answer": 2,
            "tools": [TOOL],
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ],
    "trl": [{"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "ho"}]}],
    "verl": [{"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": "7"}, "data_source": "x"}],
}


def make_records(path):
    for name, records in RECORDS.items():
        (path / name).mkdir(parents=True)
        (path / name / "data.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


# A run's directory ------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of one letter per token."""

    def decode(self, token_ids, *, skip_special_tokens=True):
        return "".join(self.pieces(token_ids))

    def pieces(self, token_ids):
        return [chr(97 + token % 26) for token in token_ids]


def make_finished_run(path):
    run_directory = RunDirectory(path)
    run = make_run(
        path,
        SETTINGS,
        sink=lambda first: Sinks([RunDirectorySink(run_directory, Letters(), first_step=first, logger=StatsLoggerConfig())]),
    )
    run_directory.begin(run.config)
    assert loop.train(run).finished
    made = {
        "commit": "1",
        "packages": {"jax": "0.10"},
        "hardware": {"cores": 2, "devices": ["cpu"]},
        "seed": 1,
        "first_step": 0,
    }
    (path / "context.json").write_text(json.dumps({"sessions": [made]}))
    event = {"step": 4, "guard": "max_approx_kl", "metric": "x", "value": 2.0, "bound": 1.0, "action": "rollback", "detail": ""}
    (path / "guard.jsonl").write_text(json.dumps(event | {"restored": 3}) + "\n")
    header = json.loads((path / "flight" / "5" / "step.json").read_text())
    (path / "flight" / header["config"]).rename(path / "flight" / "config.json")
    (path / "flight" / "5" / "step.json").write_text(json.dumps(header | {"config": "config.json"}))
    kept = {"step": 4, "why": "guard.max_grad_norm: 9", "base": 3}
    (path / "flight" / "kept.jsonl").write_text(json.dumps(kept) + "\n")
    protocol = Protocol(
        split="dev", prompts=3, n_samples=2, temperature=1.0, top_p=1.0, top_k=0, greedy=False, max_new_tokens=8,
        min_new_tokens=0, stop=["\n"], stop_token_ids=[3], success=1.0, reward="exact", workflow="rlvr", workflow_args={},
        system_prompt="", template="t", data={"data": "d"},
    )  # fmt: skip
    answers = [
        Answers("0/1", [Sample(1.0, {"exact": 1.0}, "stop", 3, "2"), Sample(0.0, {"exact": 0.0}, "length", 3)], {"x": 1})
    ]
    made = Result(Policy("model", "a", 3, "d"), "", protocol, 1, (1, 2), answers, True)
    made.save(path / "evaluations").rename(path / "evaluations" / "result.json")
    uses.record(path / "evaluations", [uses.use_of("best", "", protocol, step=3)])
    log = [{"step": step, "train/reward": 0.5, "data": {"actor/kl": 0.1}} for step in range(3)]
    (path / "log").mkdir()
    (path / "log" / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in log))


def judge(path):
    """Judges a run, as the doctor does, and a run that goes on."""
    try:
        history = History.load(path)
    except UserError as error:
        assert "metrics.jsonl" in str(error)
        return
    found = diagnose(history)
    render.text(found), checklist.text(checklist.fill(history, found)), history.lasting
    Verdicts(CONFIG, path, 7).conclude()


def lay_out(path):
    history, rules = History.load(path), all_rules()
    run_page(history, diagnose(history, rules), rules)


def judge_log(directory):
    diagnose(importers.read(directory / "log.jsonl"))


def resume_config(directory):
    """An unreadable config is compared with nothing, and said to be."""
    try:
        resume.check(directory / "config.json", CONFIG)
    except UserError as error:
        raise UserError(f"{directory}/config.json: {error}") from None


def read_recorded_config(directory):
    recording = Recording(directory.parent)
    recording.config(recording.header(5))


def read_status(directory):
    run = types.SimpleNamespace(status=directory / "status.json")
    RunDirectory.read_status(run)


def read_loop(checkpoint):
    saved = Saved.read(checkpoint / "loop.json")
    Buffer(Numbers(12), None).restore(saved.book, [])
    accumulator = Accumulator()
    accumulator.restore(saved.loop.accumulator)
    accumulator.drain()
    GuardActions(CONFIG).restore(saved.loop.guard) if saved.loop.guard is not None else None


def check_manifest(directory):
    try:
        integrity.check(directory, integrity.read_manifest(directory)["files"])
    except integrity.Corrupt as error:
        raise UserError(str(error)) from None


def read_step(directory):
    recording = Recording(directory.parent.parent)
    recording.headers(), recording.remakeable(), recording.steps()
    header = recording.header(int(directory.name))
    if header.version is not None and header.config:
        recording.config(header)


def read_kept(directory):
    Recording(directory.parent).kept()


def read_uses(directory):
    found = uses.read(directory)
    assert all(isinstance(use.time, int | float) for use in found)
    uses.history(found, "dev", "d").json()


def read_result(directory):
    results.load(directory / "result.json").json()


def read_told(directory):
    _find_trainer(str(directory))


def make_told(path):
    path.mkdir()
    (path / "workers.json").write_text(json.dumps({"address": "127.0.0.1:1", "token": "t"}))


CONFIG = make_config(SETTINGS)


class File(NamedTuple):
    """A file below the directory of all, and who reads it, given the file's own directory."""

    path: str
    reader: Callable[[Path], object]
    up: int = 0  # directories above the file's own that the reader is given
    cost: int = 1  # in comparison with others: it gets so many mutations fewer


FILES = [
    *(File(f"model/{name}", reader) for name, reader in (
        ("config.json", read_spec), ("generation_config.json", read_eos), (INDEX, read_weights),
        ("tokenizer_config.json", read_tokenizer), ("special_tokens_map.json", read_tokenizer),
    )),
    File(f"adapter/{adapter.SETTINGS}", read_adapter),
    File("saved/dataset_dict.json", read_saved_data),
    File("saved/train/state.json", read_saved_data, up=1),
    *(File(f"records/{name}/data.jsonl", read_records) for name in RECORDS),
    *(File(f"run/{name}", judge, cost=3) for name in (
        "metrics.jsonl", "samples.jsonl", "histograms.jsonl", "guard.jsonl", "config.json", "context.json", "status.json",
    )),
    File("run/config.json", resume_config),
    File("run/status.json", read_status),
    File("run/context.json", context.read),
    File("run/checkpoints/7/manifest.json", check_manifest),
    File("run/checkpoints/7/loop.json", read_loop),
    File("run/flight/5/step.json", read_step),
    File("run/flight/config.json", read_recorded_config),
    File("run/flight/5/batch.json", dump.load),
    File("run/flight/kept.jsonl", read_kept),
    File("run/evaluations/uses.jsonl", read_uses),
    File("run/evaluations/result.json", read_result),
    File("run/log/log.jsonl", judge_log),
    File("meta/meta.json", integrity.verify),
    File("told/workers.json", read_told),
]  # fmt: skip
PAGES = [File(file.path, lay_out) for file in FILES if file.reader is judge]  # seconds each
NEVER_FAIL = (judge, lay_out, read_uses)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("files")
    make_model_directory(path / "model")
    make_adapter(path / "adapter")
    make_saved_data(path / "saved")
    make_records(path / "records")
    make_finished_run(path / "run")
    make_told(path / "told")
    (path / "meta" / "tree").mkdir(parents=True)
    (path / "meta" / "tree" / "a").write_bytes(b"abc")
    integrity.write_meta(path / "meta", {"format": "test", "step": 3})
    return path


def fuzz(root, file, count):
    path = root / file.path
    directory = path.parents[file.up]
    original = path.read_text()
    file.reader(directory)  # as it is, it is fine
    rng, succeeded = random.Random(str(file.path) + file.reader.__name__), 0
    try:
        for number in range(count):
            text = mutated_text(file.path, original, rng)
            path.write_text(text)
            try:
                file.reader(directory)
                succeeded += 1
            except UserError as error:
                line = str(error)
                assert file.reader not in NEVER_FAIL, (number, line)
                assert "\n" not in line and len(line) < 1000 and str(root) in line, (number, line, text[:3000])
            except Exception as error:
                raise AssertionError(f"mutation {number}: {type(error).__name__}: {error}\n{text[:3000]}") from error
    finally:
        path.write_text(original)
    assert succeeded > 0 and (succeeded < count or file.reader in (*NEVER_FAIL, judge_log))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.path}-{file.reader.__name__}")
def test_fuzz_of_each_file_that_is_read(root, file):
    fuzz(root, file, QUICK // file.cost)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.path}-{file.reader.__name__}")
def test_fuzz_of_each_file_that_is_read_at_length(root, file):
    fuzz(root, file, THOROUGH // file.cost)


@pytest.mark.slow
@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.path)
def test_fuzz_of_each_file_that_a_page_shows(root, file):
    fuzz(root, file, QUICK)
