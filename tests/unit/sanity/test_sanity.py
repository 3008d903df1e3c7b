"""Checks before a run: each finds its planted fault, and nothing where there is none."""

import asyncio
import dataclasses
import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rljax.config.schema import Config
from rljax.data import open_prompts
from rljax.data.formats import with_system
from rljax.data.held_out import open_held_out
from rljax.errors import Rejected, RewardError, RewardTimeout, UserError
from rljax.hf.tokenizer import build_char_tokenizer, load_tokenizer
from rljax.rewards import Score
from rljax.rollout.evaluation import Episodes, Evaluation
from rljax.rollout.result import Failure
from rljax.rollout.trajectories import trajectory_of
from rljax.sanity import blanks, lengths, prompts, rewards, rollouts, start, template
from rljax.sanity.findings import Finding, Report, Severity, of_error
from rljax.sanity.golds import check_golds
from rljax.sanity.survey import Survey
from rljax.testing.models import config_of
from rljax.types import Completion, Finish, Prompt, SamplingParams


def prompt(text, answer="1", index=0):
    return Prompt(f"0/{index}", ({"role": "user", "content": text},), {"answer": answer})


def numbered(*texts, answers=None):
    return [prompt(text, (answers or {}).get(i, "1"), i) for i, text in enumerate(texts)]


def severities(findings):
    return Counter(finding.severity for finding in findings)


# Findings


def test_the_verdict_counts_what_was_found():
    error, warning, good = (Finding(severity, "x", "y") for severity in (Severity.ERROR, Severity.WARNING, Severity.GOOD))
    assert Report([good]).verdict == "ready" and Report([]).is_ready
    assert Report([warning, good]).verdict == "ready, 1 warning"
    other = dataclasses.replace(error, line="another")
    assert Report([warning, error, other, error]).verdict == "not ready: 2 errors, 1 warning" and not Report([error]).is_ready
    assert json.loads(json.dumps(Report([error]).json()))["findings"][0]["severity"] == "error"


def test_an_error_is_about_the_key_it_names():
    assert of_error(UserError("train_dataset.path: no such file: x"), "data").part == "train_dataset.path"
    assert of_error(UserError("no episode worked: see reward"), "rollouts").part == "rollouts"


# Lengths


@pytest.mark.parametrize(
    ("limit", "worst"), [(None, Severity.NOTE), (100, Severity.NOTE), (31, Severity.NOTE), (29, Severity.ERROR)]
)
def test_lengths_against_a_limit(limit, worst):
    findings = list(lengths.check_lengths("data", [10, 20, 30], limit=limit, why="row"))
    assert (Severity.ERROR in severities(findings)) == (worst is Severity.ERROR)
    assert len(findings) == 1 + (limit in (31, 29))


def test_a_histogram_counts_every_length_once():
    values = np.random.default_rng(0).integers(3, 400, 1000)
    for some in (values, values[:1], np.array([5, 5, 6])):
        rows = [row.split() for row in lengths.histogram(some)]
        assert sum(int(row[-1]) for row in rows) == len(some)
        edges = [(int(row[0]), int(row[2])) for row in rows]
        assert edges[0][0] == some.min() and edges[-1][1] == some.max()
        assert all(low > high for (_, high), (low, _) in itertools.pairwise(edges))


def test_what_max_length_leaves_out_is_said():
    (_, note), (_, warning) = (
        list(lengths.check_lengths("data", [1] * 100, limit=None, why="", skipped=skipped)) for skipped in (2, 100)
    )
    assert note.severity is Severity.NOTE and "2 more (2%)" in note.line
    assert warning.severity is Severity.WARNING and "100 more (50%)" in warning.line


# Prompts


def test_duplicates_and_contradictions_are_found():
    clean = prompts.Index("train", numbered("a", "b", "c"))
    assert severities(clean.check()) == {Severity.GOOD: 1}
    twice = list(prompts.Index("train", numbered("a b", "c", "A  b")).check())
    assert severities(twice) == {Severity.WARNING: 1} and "1 of 3" in twice[0].line and "0, 2" in twice[0].line
    contradicts = list(prompts.Index("train", numbered("a", "b", "a", answers={2: "7"})).check())
    assert severities(contradicts) == {Severity.WARNING: 2} and "different answers, as example 0" in contradicts[0].line
    rare = list(prompts.Index("train", numbered(*map(str, range(500)), "7")).check())
    assert severities(rare) == {Severity.NOTE: 1}


@pytest.mark.parametrize(("common", "severity"), [(0, Severity.GOOD), (1, Severity.WARNING), (5, Severity.ERROR)])
def test_prompts_of_both_sets_are_found_whatever_their_answers(common, severity):
    train = prompts.Index("train", numbered(*map(str, range(100))))
    held_out = prompts.Index("valid", numbered(*map(str, range(100 - common, 120 - common)), answers={0: "9"}))
    (finding,) = prompts.shared(train, held_out)
    assert finding.severity is severity
    if common:
        assert f"{common} of 20" in finding.line and f"example 0 is {100 - common} of training" in finding.line


def test_messages_of_other_roles_or_with_other_turns_are_other_prompts():
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "a"}
    digests = [
        prompts.digest_of(m) for m in ([user], [system], [user, user], [{"role": "user", "content": [{"type": "text"}]}])
    ]
    assert len(set(digests)) == 4
    assert prompts.digest_of([user], {"name": "guess", "seed": 1}) != prompts.digest_of([user], {"name": "guess", "seed": 2})


def blank_findings(records, learned):
    found = blanks.Blanks("train_dataset", learned)
    for record in records:
        found.add(record)
    return [str(finding) for finding in found.check(lambda uid: f"train.jsonl:{uid}")]


def test_prompts_that_ask_nothing_and_answers_that_teach_nothing_are_counted_with_the_first_place():
    picture = [{"type": "image"}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}
    asked = [
        prompt("a", "1", 0),
        dataclasses.replace(prompt("", "1", 1), messages=({"role": "user", "content": picture},)),
        dataclasses.replace(prompt("", "1", 2), fields={"environment": {"name": "x"}}),
        dataclasses.replace(prompt("a", "", 3), reply=(call,)),
    ]
    assert blank_findings(asked, "answer") == []
    system = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": " \n"})
    nothing = [dataclasses.replace(prompt("", "1", 4), messages=system), prompt("", " ", 5), prompt("a", "", 6)]
    (prompts_of_rl,) = blank_findings([*asked, *nothing], None)
    assert "2 of 7 records have a prompt without text, the first train.jsonl:0/4" in prompts_of_rl
    _, answers = blank_findings([*asked, *nothing], "answer")
    assert "2 of 7 records have an empty 'answer', the first train.jsonl:0/5" in answers
    assert blank_findings(nothing[2:], "final") == []


# Tokenizer and template


@pytest.fixture
def model(tmp_path):
    build_char_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100, "eos_token_id": 2}))
    return tmp_path


def with_template(directory: Path, text: str):
    (directory / "chat_template.jinja").write_text(text)
    return load_tokenizer(directory)


TURNS = "{% for m in messages %}<bos>{{ m['role'] }}:{{ m['content'] }}<eos>{% endfor %}"
OPENED = TURNS + "{% if add_generation_prompt %}<bos>assistant:{% endif %}"


def test_records_that_keep_their_own_system_message_are_counted_with_the_first_place():
    """Leaves out those whose message is the section's prompt, as if it had been added to them."""
    said = ("Be long.", None, "Be brief.", "Be long.")

    def turns(system):
        return ({"role": "system", "content": system},) if system else ()

    def found(system_prompt):
        records = [
            Prompt(f"0/{i}", with_system((*turns(system), {"role": "user", "content": str(i)}), system_prompt), {})
            for i, system in enumerate(said)
        ]
        survey = Survey("train_dataset", prompts=records, system_prompt=system_prompt)
        return [f for f in survey.check(lambda uid: f"line {uid}") if "system" in f.line]

    (finding,) = found("Be brief.")
    assert finding.severity is Severity.WARNING
    assert finding.line == "2 of 4 records have a system message of their own, the first line 0/0"
    assert "train_dataset.system_prompt has no effect" in finding.remedy
    assert not found("")


def test_a_start_tells_of_system_prompts_that_records_keep_out(model, tmp_path):
    """Covers training and each validation set, by its own section."""
    own = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
    sets = {}
    for name in ("train", "held"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"messages": own, "answer": name}) + "\n")
        sets[name] = {"path": str(path), "type": "prompt_answer", "system_prompt": "3"}
    changes = {
        f"{s}.{key}": v for s, n in (("train_dataset", "train"), ("valid_dataset", "held")) for key, v in sets[n].items()
    }
    config = config_of(**changes)
    held_out = open_held_out(config, None)
    report = start.at_start(config, open_prompts(config.train_dataset, seed=1), held_out, load_tokenizer(model), model)
    told = [f.part for f in report.of(Severity.WARNING) if "system message of their own" in f.line]
    assert told == ["train_dataset", "valid_dataset"]


@pytest.mark.parametrize(
    ("answers", "changes", "told"),
    [
        ([20.0, -3.0], {}, ["train_dataset", "valid_dataset"]),
        ([20.0, -3.0], {"reward.name": "rljax.rewards.exact:reward,exact"}, ["train_dataset", "valid_dataset"]),
        ([20.0, 3.5], {}, []),
        ([20, -3], {}, []),
        ([20.0, -3.0], {"reward.name": "math"}, []),
        ([20.0, -3.0], {"actor.loss": "sft"}, []),
    ],
)
@pytest.mark.parametrize("type", ["prompt_answer", "trl"])
def test_a_start_tells_of_whole_numbers_in_a_column_of_floats_that_are_compared_as_text(
    answers, changes, told, type, model, tmp_path
):
    """Takes the columns that pyarrow makes of the numbers, as pandas does where one is missing."""
    for name in ("train", "held"):
        columns = {"prompt": [f"{name} {answer}" for answer in answers], "answer": answers}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
        section = {"train": "train_dataset", "held": "valid_dataset"}[name]
        changes = {f"{section}.path": str(tmp_path / f"{name}.parquet"), f"{section}.type": type, **changes}
    config = config_of(**{"reward.name": "exact", **changes})
    source, held_out = open_prompts(config.train_dataset, seed=1), open_held_out(config, None)
    report = start.at_start(config, source, held_out, load_tokenizer(model), model)
    found = [f for f in report.of(Severity.WARNING) if "has floats that are all whole" in f.line]
    assert [f.part for f in found] == told
    for finding in found:
        said = str(next(source.every()).fields["answer"])
        assert f"{said!r}, and {int(float(said))} earns 0" in finding.line and "column 'answer'" in finding.line
        assert "reward.name=math" in finding.remedy


def test_episodes_of_an_environment_that_begin_alike_are_different_prompts():
    def game(uid, seed):
        return Prompt(uid, ({"role": "user", "content": "?"},), {"answer": "", "environment": {"name": "x", "seed": seed}})

    train, held_out = prompts.Index("a", [game("0/0", 1), game("0/1", 2)]), prompts.Index("b", [game("0/0", 3)])
    assert [finding.severity for finding in (*train.check(), *prompts.shared(train, held_out))] == [Severity.GOOD] * 2
    twice = prompts.Index("a", [game("0/0", 1), game("0/1", 1)])
    assert "1 of 2 prompts are duplicates" in next(iter(twice.check())).line


def test_a_model_and_tokenizer_that_agree_give_no_warning(model):
    tokenizer = with_template(model, OPENED)
    findings = [*template.check_tokenizer(tokenizer, model), *template.check_template(tokenizer)]
    assert severities(findings) == {Severity.GOOD: 1, Severity.NOTE: 1}


@pytest.mark.parametrize(
    ("config", "severity", "line"),
    [
        ({"vocab_size": 90, "eos_token_id": 2}, Severity.ERROR, "vocabulary of 100 exceeds the model's 90"),
        ({"text_config": {"vocab_size": 90}}, Severity.ERROR, "exceeds the model's 90"),
        ({"vocab_size": 100, "eos_token_id": 3}, Severity.WARNING, "config.json has [3]"),
        ({"vocab_size": 100, "eos_token_id": [2, 300]}, Severity.ERROR, "EOS ids [300] are no tokens"),
        ({"vocab_size": 128, "eos_token_id": 2}, Severity.GOOD, "28 embeddings unused"),
    ],
)
def test_files_of_a_model_that_disagree(model, config, severity, line):
    (model / "config.json").write_text(json.dumps(config))
    found = [f for f in template.check_tokenizer(with_template(model, OPENED), model) if line in f.line]
    assert [finding.severity for finding in found] == [severity]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TURNS, "opens none for the assistant"),
        ("<bos>" + OPENED, "begin with token 1 twice"),
    ],
)
def test_templates_with_a_fault(model, text, line):
    findings = list(template.check_template(with_template(model, text)))
    assert [line in f.line for f in findings if f.severity is Severity.WARNING] == [True]


def test_a_template_that_adds_nothing_is_no_chat_template_and_no_fault(model):
    assert Severity.WARNING not in severities(template.check_template(load_tokenizer(model)))


def test_answers_that_can_not_be_written_are_found(model):
    tokenizer = load_tokenizer(model)
    assert list(template.check_text(tokenizer, {"a": "12", "b": "x = 3"})) == []
    (finding,) = template.check_text(tokenizer, {"a": "12", "b": "caf\u00e9"})
    assert finding.severity is Severity.WARNING and "'\u00e9' in b" in finding.line


# Rewards


class ByRule:
    """Rewards by a rule of (gold answer, completion)."""

    def __init__(self, rule):
        self._rule = rule

    async def score(self, prompt, completion):
        value = self._rule(prompt.fields["answer"], completion)
        if isinstance(value, Exception):
            raise value
        return Score(float(value), {})


def judged(rule, success=1.0, field="answer", answers="abcd"):
    examples = [prompt(f"q{i}", answer, i) for i, answer in enumerate(answers)]
    return asyncio.run(rewards.check_rewards(ByRule(rule), examples, None, field=field, success=success))


def test_a_reward_that_tells_right_from_wrong_has_no_fault():
    assert severities(judged(lambda gold, said: said == gold)) == {Severity.GOOD: 2}


@pytest.mark.parametrize(
    ("rule", "severity", "line"),
    [
        (lambda gold, said: 0.0, Severity.ERROR, "4 less than evaluator.success=1"),
        (lambda gold, said: said == gold != "b", Severity.WARNING, "1 less than evaluator.success=1, as prompt 0/1"),
        (lambda gold, said: said != gold, Severity.ERROR, "answers of other prompts earn 1 on average, gold ones 0"),
        (lambda gold, said: 1.0, Severity.ERROR, "answers of other prompts earn 1 on average, gold ones 1"),
        (lambda gold, said: said in (gold, ""), Severity.ERROR, "an empty completion earns 1"),
        (lambda gold, said: said == gold if said else RewardTimeout("slow"), Severity.WARNING, "4 wrong or empty"),
        (lambda gold, said: RewardError("no field"), Severity.ERROR, "could not be scored; the first: no field"),
    ],
)
def test_planted_faults_of_rewards(rule, severity, line):
    found = [finding for finding in judged(rule) if line in finding.line]
    assert [finding.severity for finding in found] == [severity]


def test_a_reward_that_looks_for_a_box_is_tried_with_one():
    boxed = judged(lambda gold, said: said == rf"\boxed{{{gold}}}")
    assert severities(boxed) == {Severity.GOOD: 2} and r"each in \boxed{}, earn 1 on average" in boxed[0].line


def test_a_gold_answer_that_is_rejected_is_left_out_and_told_elsewhere():
    odd = judged(lambda gold, said: Rejected("odd") if gold == "b" else said == gold)
    assert severities(odd) == {Severity.GOOD: 2} and "3 prompts" in odd[0].line
    (none,) = judged(lambda gold, said: Rejected("odd"))
    assert none.severity is Severity.ERROR and "all 4 gold answers are rejected" in none.line


def test_rewards_of_another_scale_pass_by_their_own_success():
    scaled = judged(lambda gold, said: 10.0 if said == gold else -2.0, success=10.0)
    assert severities(scaled) == {Severity.GOOD: 2}


def test_without_gold_answers_nothing_is_scored():
    (finding,) = judged(lambda gold, said: RewardError("never asked"), field="solution")
    assert finding.severity is Severity.NOTE
    assert "no wrong one was scored" in " ".join(f.line for f in judged(lambda gold, said: said == gold, answers="aa"))


def test_examples_are_spread_over_all():
    assert [p.uid for p in rewards.evenly(numbered(*map(str, range(100))), 4)] == ["0/0", "0/25", "0/50", "0/75"]
    assert len(rewards.evenly(numbered("a", "b"), 4)) == 2


# Rollouts


def episodes(groups, finish=Finish.STOP, failures=0):
    """Makes episodes of groups of rewards."""
    done = Completion(np.array([5], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), finish)
    rows = [[trajectory_of([1], done, reward, {}) for reward in group] for group in groups]
    rows[0] += [Failure("reward_error", RewardError("no"))] * failures
    return Episodes(Evaluation([], None, SamplingParams(4), 4), rows, Counter())


@pytest.mark.parametrize(
    ("made", "line", "severity"),
    [
        (episodes([[0, 1], [1, 1]]), "in 1 of 2 groups the rewards differ", Severity.GOOD),
        (episodes([[0] * 8] * 8), "all rewards are 0", Severity.ERROR),
        (episodes([[0] * 2] * 2), "all rewards are 0", Severity.WARNING),  # too few to be sure
        (episodes([[0, 1], *[[0, 0]] * 10, *[[1, 1]] * 10]), "in 1 of 21 groups", Severity.WARNING),
        (episodes([[0, 1]], finish=Finish.LENGTH), "100% of the completions are cut", Severity.WARNING),
        (episodes([[0, 1]], failures=2), "2 of 4 episodes failed (2 reward_error)", Severity.WARNING),
        (episodes([[]], failures=2), "none of 2 episodes has a reward", Severity.ERROR),
    ],
)
def test_rollouts_from_which_nothing_can_be_learned(made, line, severity):
    found = [finding for finding in rollouts.check_rollouts(made) if line in finding.line]
    assert [finding.severity for finding in found] == [severity]


def test_rollouts_before_a_warm_up_are_no_fault_of_the_run():
    unlearnable = [episodes([[0] * 8] * 8, finish=Finish.LENGTH), episodes([[0, 1], *[[0, 0]] * 10])]
    for made in unlearnable:
        plain, warmed = (list(rollouts.check_rollouts(made, warms_up=warms_up)) for warms_up in (False, True))
        assert Report(plain).of(Severity.NOTE) != plain and Report(warmed).of(Severity.NOTE) == warmed
        assert [f.line in w.line for f, w in zip(plain, warmed, strict=True)] == [True] * len(plain)
    none = episodes([[]], failures=2)  # but an episode that fails does not succeed with other weights
    assert list(rollouts.check_rollouts(none, warms_up=True)) == list(rollouts.check_rollouts(none))
    good = list(rollouts.check_rollouts(episodes([[0, 1], [1, 1]]), warms_up=True))
    assert severities(good) == {Severity.NOTE: 1, Severity.GOOD: 1}


# Gold answers


WORKED = "Half of them are 48/2 = <<48/2=24>>24.\nTogether 48+24 = 72.\n#### 72"


@pytest.mark.parametrize(
    ("name", "golds", "told", "remedy"),
    [
        ("exact", [WORKED] * 3, "that of 3 of 3 records is a worked solution", "reward.name=gsm8k"),
        ("exact,mine:f", [WORKED, WORKED, "72"], "that of 2 of 3 records is a worked solution", "reward.name=gsm8k"),
        ("exact", ["x" * 17, "y" * 18, "72"], "that of 2 of 3 records is longer than gconfig.max_new_tokens=16", "a larger"),
    ],
)
def test_gold_answers_that_no_policy_writes_are_told_to_exact(name, golds, told, remedy, model):
    config, tokenizer = config_of(**{"reward.name": name, "gconfig.max_new_tokens": 16}), load_tokenizer(model)
    (finding,) = check_golds(config, numbered("a", "b", "c", answers=dict(enumerate(golds))), tokenizer)
    assert finding.severity is Severity.WARNING and told in finding.line and remedy in finding.remedy


@pytest.mark.parametrize(
    ("name", "golds"),
    [("gsm8k", [WORKED] * 3), ("exact", ["72", "#### 72", WORKED]), ("exact", ["x" * 16, "y" * 17, "z"]), ("math", ["x" * 99])],
)
def test_gold_answers_that_a_policy_can_write_are_not_told(name, golds, model):
    config, tokenizer = config_of(**{"reward.name": name, "gconfig.max_new_tokens": 16}), load_tokenizer(model)
    texts = "abc"[: len(golds)]
    assert not list(check_golds(config, numbered(*texts, answers=dict(enumerate(golds))), tokenizer))


# At a start


@pytest.mark.parametrize(
    ("split", "best", "warns"),
    [
        ("test", "eval-rollout/reward", ["valid_dataset"]),
        ("dev", "eval-rollout/reward", []),
        ("test", None, []),
        ("test", "eval-rollout/hard/reward", []),
        ("dev", "eval-rollout/final/reward", ["valid_datasets.final"]),
    ],
)
def test_a_test_split_that_chooses_is_warned_of_at_the_start(split, best, warns):
    config = Config()
    config = dataclasses.replace(
        config,
        valid_dataset=dataclasses.replace(config.valid_dataset, split=split),
        valid_datasets={"hard": {"split": "dev"}, "final": {"split": "private_test"}},
        evaluator=dataclasses.replace(config.evaluator, best=best),
    )
    assert [finding.part for finding in start.check_splits(config)] == warns
