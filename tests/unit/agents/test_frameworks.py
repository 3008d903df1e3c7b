"""An agent framework, unmodified, against the endpoint: pydantic-ai."""

import numpy as np
import pytest

from tests.unit.agents.endpoint_under_test import CALL, Served, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("plain"))


def speak(prompt):
    if "tool:36" in prompt:
        return "It is 37.<eos>" if "user:Check." in prompt else "It is 36.<eos>"
    return f"{CALL}<eos>"


def test_pydantic_ai_runs_a_tool_loop_over_two_runs(tokenizer):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    served = Served(tokenizer, speak)
    asked = []

    async def talk(client):
        model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
        agent = Agent(model, system_prompt="Use the calculator.")

        @agent.tool_plain
        def calculator(expression: str) -> str:
            asked.append(expression)
            left, right = expression.split("*")
            return str(int(left) * int(right))

        first = await agent.run("12*3?")
        second = await agent.run("Check.", message_history=first.all_messages())
        return first.output, second.output

    assert served.run(talk) == ("It is 36.", "It is 37.")
    assert asked == ["12*3"]
    turns = served.session.recording.turns
    assert [turn.parent for turn in turns] == [None, *turns[:-1]] and served.session.recording.breaks == 0
    (trajectory,) = served.session.trajectories("concat", 1.0, {})
    sampled = np.concatenate([done.token_ids for done in served.script.completions])
    np.testing.assert_array_equal(trajectory.token_ids[trajectory.loss_mask], sampled)
