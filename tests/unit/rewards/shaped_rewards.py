"""Reward functions as users of AReaL, TRL and verl write them."""

import asyncio
import functools
import re

from rljax.errors import Rejected

# AReaL: called as f(prompt, completion, prompt_ids, completion_ids, **record)


def areal_gsm8k(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    found = re.findall(r"-?\d+", completions)
    return float(bool(found) and found[-1] == re.findall(r"-?\d+", answer)[-1])


async def areal_judge(prompt, completion, prompt_ids, completion_ids, **data):
    await asyncio.sleep(0)
    return {"reward": float(len(completion_ids)), "prompt_tokens": float(len(prompt_ids)), "asked": float("?" in prompt)}


# TRL: called with lists, by keywords


def trl_accuracy(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [None if gold is None else float(gold in content) for content, gold in zip(contents, solution, strict=True)]


def trl_format(completions, **kwargs):
    """Conversational: each completion is a list of one message."""
    return [1.0 if re.match(r"<think>.*</think>", completion[0]["content"]) else 0.0 for completion in completions]


async def trl_shortest(prompts, completions, completion_ids, **kwargs):
    """Compares the completions of a batch with each other."""
    await asyncio.sleep(0)
    shortest = min(len(ids) for ids in completion_ids)
    return [float(len(ids) == shortest) for ids in completion_ids]


def trl_standard(prompts, completions, ground_truth):
    """Standard format: text in, and no **kwargs."""
    return [float(prompt.endswith("=") and completion == truth) for prompt, completion, truth in zip(*_lists(
        prompts, completions, ground_truth
    ), strict=True)]  # fmt: skip


def _lists(*columns):
    assert all(isinstance(column, list) for column in columns)
    return columns


class TrlLength:
    """A callable object, as TRL's own rewards over token ids are."""

    def __init__(self, most):
        self.most = most

    def __call__(self, completion_ids, **kwargs):
        return [-1.0 if len(ids) > self.most else 0.0 for ids in completion_ids]


trl_length = TrlLength(2)


def trl_wrong_count(completions, **kwargs):
    return [1.0]


# verl: compute_score by keywords, a number or a dict with "score"


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info["index"] == 0
    match = re.search(r"#### (\-?[0-9\.\,]+)", solution_str)
    pred = match.group(1) if match else None
    return {"score": float(pred == ground_truth), "acc": pred == ground_truth, "pred": pred}


def verl_plain(solution_str, ground_truth, **kwargs):
    return float(ground_truth in solution_str)


async def verl_async(data_source, solution_str, ground_truth, extra_info, **kwargs):
    await asyncio.sleep(0)
    return float(ground_truth in solution_str)


# rljax's own


def own(prompt, completion):
    return float(prompt.fields["answer"] == completion)


def own_by_position(p, c, weight=1.0):
    return weight * len(c)


def rejects(prompt, completion):
    raise Rejected("not mine")


def reads_what_is_not_there(prompt, completion):
    return float(prompt.fields["anser"] == completion)


partial_own = functools.partial(own_by_position, weight=2.0)


# Of no shape, or of several


def mixed(prompt, completions, **kwargs):
    return 0.0


def nothing(*args, **kwargs):
    return 0.0


def two_shapes(prompts, completions, solution_str, ground_truth):
    return 0.0


def three(a, b, c):
    return 0.0


def trl_of_trainer(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step)] * len(completions)


# Two parameters by position whose names say something else


def response_first(response, answer):
    return float(response == answer)


def swapped(completion, prompt):
    return float(completion == prompt.fields["answer"])


def with_gold(prompt, answer):
    return float(prompt.fields["answer"] == answer)


def kept_gold(prompt, completion, answer="7"):
    return float(completion == answer)


bound_gold = functools.partial(kept_gold, answer="7")  # given by the user, so nothing is taken for a field


def by_name(*, completion, prompt):
    return float(completion == prompt.fields["ground_truth"])


def half_by_name(prompt, *, completion, weight=1.0):
    return weight * by_name(prompt=prompt, completion=completion)


def by_name_and_more(*, prompt, completion, answer):
    return 0.0


class Instance:
    def __call__(self, prompt, completion):
        return 0.5


instance = Instance()


def forgot_await(prompt, completion):
    return _judged(prompt, completion)


async def forgot_await_twice(prompt, completion):
    return _judged(prompt, completion)


async def _judged(prompt, completion):
    return 1.0
