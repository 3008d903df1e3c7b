"""Tasks made in memory: right answers, disjoint splits, the same examples for the same arguments."""

import pytest

from rljax.data.tasks import PARTS, make_task
from rljax.errors import UserError


def records(path, split, **arguments):
    made = make_task(path, split, arguments, "train_dataset")
    return [made[i] for i in range(len(made))]


def test_addition_without_n_is_every_sum_split_in_two():
    train, test = (records("task:addition", split, digits=2) for split in ("train", "test"))
    sums = {record["prompt"]: record["answer"] for record in train + test}
    assert sums == {f"{a}+{b}=": str(a + b) for a in range(10, 100) for b in range(10, 100)}
    assert len(train) + len(test) == len(sums)  # none in both
    assert 0.08 < len(test) / len(sums) < 0.12


def test_demonstrations_of_addition_mislead_in_their_share():
    made = records("task:addition", "train", digits=2, misled=0.7)
    errors = [int(record["demonstration"]) - int(record["answer"]) for record in made]
    assert set(errors) == {0, 1}
    assert abs(sum(errors) / len(errors) - 0.7) < 3 * (0.7 * 0.3 / len(errors)) ** 0.5
    assert all(record["demonstration"] == record["answer"] for record in records("task:addition", "train", digits=2))


@pytest.mark.parametrize("path", ["task:addition", "task:reasoning_gym/chain_sum"])
def test_parts_of_the_test_split_are_disjoint_and_all_of_it(path):
    arguments = {} if path == "task:addition" else {"n": 10}
    parts = {split: {r.get("prompt") or r["question"] for r in records(path, split, **arguments)} for split in PARTS}
    together = [question for part in parts.values() for question in part]
    assert len(together) == len(set(together)) and all(parts.values())
    if path == "task:addition":
        assert set(together) == {record["prompt"] for record in records(path, "test")}
    else:
        assert {len(part) for part in parts.values()} == {10}
        assert not set(together) & {record["question"] for record in records(path, "train", **arguments)}


@pytest.mark.parametrize("digits", [1, 3, 9])
def test_addition_splits_stay_apart_whatever_their_sizes_and_seeds(digits):
    n = 5 if digits == 1 else 300
    train = {r["prompt"] for r in records("task:addition", "train", digits=digits, n=n, seed=1)}
    test = {r["prompt"] for r in records("task:addition", "test", digits=digits, n=n, seed=2)}
    assert len(train) == len(test) == n and not train & test
    for prompt in train | test:
        a, b = prompt[:-1].split("+")
        assert len(a) == len(b) == digits


@pytest.mark.parametrize("path", ["task:addition", "task:reasoning_gym/basic_arithmetic"])
def test_arguments_decide_the_examples(path):
    one = records(path, "train", n=30, seed=1)
    assert one == records(path, "train", n=30, seed=1)
    assert one != records(path, "train", n=30, seed=2)
    test = {str(r.get("prompt") or r["question"]) for r in records(path, "test", n=30, seed=1)}
    assert not test & {str(r.get("prompt") or r["question"]) for r in one}


def test_reasoning_gym_arguments_reach_the_dataset():
    for record in records("task:reasoning_gym/chain_sum", "train", n=10, min_terms=2, max_terms=2):
        assert sum(record["question"].count(sign) for sign in (" + ", " - ")) == 1


@pytest.mark.parametrize(
    ("path", "split", "arguments", "line"),
    [
        ("addition", "val", {}, "train_dataset.split: a task has no split 'val' (one of train, test, smoke, dev,"),
        ("adition", "train", {}, "no task 'adition' (did you mean addition?"),
        ("addition", "train", {"digit": 2}, "no task argument 'digit' (did you mean digits?"),
        ("addition", "train", {"misled": 2}, "misled: a share in [0, 1], not 2"),
        ("addition", "train", {"digits": 0}, "digits must lie in [1, 9], not 0"),
        ("addition", "train", {"digits": 5}, "n: say how many"),
        ("addition", "test", {"digits": 1, "n": 90}, "n: 90 examples asked for"),
        ("reasoning_gym/chain_sums", "train", {}, "reasoning_gym has no dataset 'chain_sums' (did you mean"),
        ("reasoning_gym/chain_sum", "train", {"minterms": 1}, "task arguments refused"),
        ("reasoning_gym/chain_sum", "train", {"min_terms": 0}, "task arguments refused"),
        ("addition", "train", {"digits": "two"}, "task argument digits: 'two' is of type str, not int"),
        ("addition", "train", {"n": 2.5}, "task argument n: 2.5 is of type float, not int or None"),
        ("addition", "train", {"seed": None}, "task argument seed: None is of type NoneType, not int"),
        ("guess_number", "train", {"earlier": 1}, "task argument earlier: 1 is of type int, not bool"),
        ("reasoning_gym/chain_sum", "train", {"n": "5"}, "task argument n: '5' is of type str, not int"),
        ("environment/guess_number", "train", {"n": "5"}, "task argument n: '5' is of type str, not int"),
        ("verifiers/any", "train", {"n": "5"}, "task argument n: '5' is of type str, not int"),
        ("count_objects", "train", {"most": 0}, "most: 0, others: 3 (at least 1 and 0)"),
        ("count_objects", "train", {"others": -1}, "most: 5, others: -1 (at least 1 and 0)"),
    ],
)
def test_what_a_task_cannot_do_is_refused_in_one_line(path, split, arguments, line):
    with pytest.raises(UserError) as caught:
        make_task(f"task:{path}", split, arguments, "train_dataset")
    expected = line if line.startswith("train_dataset.") else f"train_dataset: task:{path}: {line}"
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)
