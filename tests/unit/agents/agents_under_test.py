"""Agents as users write them: they know a base URL and a key, and nothing of training."""

import asyncio
import json
import time

from tests.unit.agents.endpoint_under_test import CALCULATOR

EXACT = {"seen": []}


def compute(expression):
    left, right = expression.split("*")
    return str(int(left) * int(right))


async def calculator(base_url, api_key, prompt):
    """The official client, two turns with a tool."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [dict(message) for message in prompt.messages]
        first = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        reply = first.choices[0].message
        messages.append(reply)
        for call in reply.tool_calls or ():
            result = compute(json.loads(call.function.arguments)["expression"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        second = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        text = second.choices[0].message.content or ""
        return {"reward": float(prompt.fields["answer"] in text), "called": float(bool(reply.tool_calls))}


def plain(base_url, api_key, messages, data):
    """A plain function, with the official client's other half."""
    from openai import OpenAI

    with OpenAI(base_url=base_url, api_key=api_key) as client:
        reply = client.chat.completions.create(model="policy", messages=messages)
    return float(data["answer"] in reply.choices[0].message.content)


async def by_turn(client, session, messages):
    for reward in (0.25, 1.0):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        session.set_reward(reward, reply.id)
        messages = [*messages, reply.choices[0].message, {"role": "user", "content": "again"}]


async def silent(client, messages):
    await client.chat.completions.create(model="policy", messages=messages)


async def idle(base_url):
    return 1.0


async def raises(client, messages):
    await client.chat.completions.create(model="policy", messages=messages)
    raise RuntimeError("no\nway")


async def slow(client, messages):
    await client.chat.completions.create(model="policy", messages=messages)
    await asyncio.sleep(60)


def slow_thread(base_url):
    time.sleep(0.3)
    return 1.0


async def asks_too_much(client, messages):
    await client.chat.completions.create(model="policy", messages=messages, temperature=0.3)


async def wrong(client, messages):
    await client.chat.completions.create(model="policy", messages=messages)
    return "much"


def with_a_stranger(base_url, engine):
    return 1.0


class Framework:
    """An agent as AReaL's users write one: a class with `run(data, **kwargs)`."""

    async def run(self, data, base_url, api_key, **extra):
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            reply = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": data["question"]}]
            )
        return float(data["answer"] in reply.choices[0].message.content)
