"""Environments of other packages, played through the adapters by their real parts."""

import asyncio

import pytest

from rljax.data.tasks import make_task
from rljax.environments import Play, Source
from rljax.environments.checks import check_environments
from rljax.errors import UserError
from rljax.types import Prompt

gymnasium = pytest.importorskip("gymnasium")


def play(source, *actions):
    async def scenario():
        async with Play(source, timeout=60.0) as played:
            first = await played.reset()
            return first, [await played.step(action) for action in actions]

    return asyncio.run(scenario())


def lake(**arguments):
    made = {"id": "FrozenLake-v1", "make": {"is_slippery": False, "map_name": "4x4"}} | arguments
    return Source("gymnasium", 3, made)


def test_a_discrete_space_by_words_and_numbers_and_what_is_no_action():
    words = ["left", "down", "right", "up"]
    path = ["down", "down", "right", "right", "down", "right"]  # round the holes of the 4x4 map
    first, steps = play(lake(actions=words, instructions="Reach the goal."), "jump", *path)
    assert first[0]["content"] == "Reach the goal.\n0"
    assert steps[0].reward == 0 and "illegal action" in steps[0].observation[0]["content"] and not steps[0].terminated
    assert [step.observation[0]["content"] for step in steps[1:]] == ["4", "8", "9", "10", "14", "15"]
    assert steps[-1].reward == 1.0 and steps[-1].terminated and not any(step.terminated for step in steps[:-1])
    _, same = play(lake(), "7", "down", *(str(words.index(word)) for word in path))
    assert [step.observation for step in same[2:]] == [step.observation for step in steps[1:]]
    assert all("illegal action" in step.observation[0]["content"] for step in same[:2])


def test_a_rendered_environment_shows_its_text():
    first, (step,) = play(lake(render=True), "1")
    assert (
        "SFFF" in first[0]["content"].replace("\x1b[41m", "").replace("\x1b[0m", "")
        and "(Down)" in step.observation[0]["content"]
    )


def test_a_box_of_numbers_is_json():
    first, steps = play(Source("gymnasium", 3, {"id": "Pendulum-v1", "illegal_reward": -9.0}), "[0.5]", "up", "[99]")
    assert len(__import__("json").loads(first[0]["content"])) == 3
    assert steps[0].reward < 0 and [step.reward for step in steps[1:]] == [-9.0, -9.0]


def test_ones_own_text_of_observations_and_actions(tmp_path, monkeypatch):
    (tmp_path / "own_text.py").write_text(
        "def observe(observation):\n    return f'row {observation // 4}'\n"
        "def act(text):\n    return {'south': 1, 'east': 2}[text] if text in ('south', 'east') else int('no')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    first, steps = play(lake(observe="own_text:observe", act="own_text:act"), "south", "north")
    assert first[0]["content"] == "row 0" and steps[0].observation[0]["content"] == "row 1"
    assert "illegal action" in steps[1].observation[0]["content"]


def test_the_task_makes_prompts_of_one_split_and_the_check_plays_them():
    arguments = {"id": "FrozenLake-v1", "make": {"is_slippery": True}, "n": 30}
    made = {split: make_task("task:environment/gymnasium", split, arguments, "train_dataset") for split in ("train", "test")}
    seeds = {split: {records[i]["environment"]["seed"] for i in range(30)} for split, records in made.items()}
    assert len(seeds["train"]) == len(seeds["test"]) == 30 and not seeds["train"] & seeds["test"]
    records = [made["train"][i] for i in range(30)]
    assert all(record["messages"] == [{"role": "user", "content": "0"}] for record in records)
    prompts = [Prompt(f"0/{i}", tuple(r["messages"]), {"environment": r["environment"]}) for i, r in enumerate(records)]
    remarks = asyncio.run(check_environments(prompts, episodes=20))
    assert [remark.severity for remark in remarks] == ["good", "note", "note", "good"], remarks  # no expert is known


def test_reasoning_gym_scores_each_attempt():
    source = Source("reasoning_gym", 5, {"dataset": "chain_sum", "attempts": 2, "min_terms": 2, "max_terms": 2})

    async def scenario():
        async with Play(source, timeout=60.0) as played:
            first = await played.reset()
            right = played.environment.expert_action()
            return first, await played.step("x"), await played.step(f"so <answer>{right}</answer>")

    first, wrong, right = asyncio.run(scenario())
    assert first[0]["content"].endswith(" =")
    assert wrong.reward < 1 and not wrong.terminated and not wrong.truncated
    assert right.reward == 1.0 and right.terminated and not right.truncated
    (_, steps) = play(source, "x", "y")
    assert steps[-1].truncated and play(source)[0] == first


@pytest.mark.parametrize(
    ("path", "arguments", "line"),
    [
        ("gymnasium", {"id": "FrozenLake-v9"}, "gymnasium: FrozenLake-v9: "),
        ("gymnasium", {"id": "FrozenLake-v1", "actions": ["left"]}, "gymnasium: FrozenLake-v1: 1 words for 4 actions"),
        ("gymnasium", {"id": "FrozenLake-v1", "observe": "json:dump_"}, "gymnasium: observe: json has no 'dump_'"),
        ("gymnasium", {}, "environment: gymnasium: missing a required argument: 'id' (it takes: id, make,"),
        ("gymnasion", {}, "environment: no environment named 'gymnasion' (did you mean gymnasium?"),
        ("reasoning_gym", {"dataset": "chain_sums"}, "reasoning_gym has no dataset 'chain_sums' (did you mean"),
        ("guess_number", {"n": 0}, "n: 0 examples asked for (at least 1)"),
        ("reasoning_gym", {"dataset": "chain_sum", "attempts": 0}, "reasoning_gym.attempts: 0 (at least 1)"),
        ("gymnasium", {"id": "FrozenLake-v1", "illegal_reward": "-1"}, "gymnasium.illegal_reward: '-1' (a finite number)"),
        ("guess_number", {"size": 0}, "guess_number.size: 0 (at least 1)"),
    ],
)
def test_what_there_is_not_is_refused_in_one_line(path, arguments, line):
    with pytest.raises(UserError) as caught:
        make_task(f"task:environment/{path}", "train", arguments, "train_dataset")
    assert str(caught.value).startswith(f"train_dataset: task:environment/{path}: {line}") and "\n" not in str(caught.value)


def test_games_are_joined_midway_where_they_are_not_over():
    arguments = {"n": 200, "size": 7, "guesses": 3, "earlier": True, "sensible": 0.5, "ending": "\n"}
    made = make_task("task:guess_number", "train", arguments, "train_dataset")
    lengths, sensible = set(), []
    for record in (made[i] for i in range(200)):
        source = Source(**record["environment"])
        first, _ = play(source)
        assert [dict(message) for message in first] == record["messages"] and first[-1]["role"] == "user"
        lengths.add(len(first))
        low, high = 1, 7
        for guess, answer in zip(first[1::2], first[2::2], strict=True):
            low = max(low, int(guess["content"]) + 1) if answer["content"] == "higher" else low
            high = min(high, int(guess["content"]) - 1) if answer["content"] == "lower" else high
        sensible.append(record["demonstration"] == f"{(low + high) // 2}\n")
    assert lengths == {1, 3, 5}
    share = 0.5 + 0.5 / 7  # a random number is the sensible one in a seventh
    assert abs(sum(sensible) / 200 - share) < 3 * (share * (1 - share) / 200) ** 0.5
