"""Agents over the OpenAI endpoint of `experiments.serve`, in front of a real SGLang server.

The official client, unmodified, plays episodes of two turns with a tool. The learner would train on
exactly the tokens that the server returned, and the log-probs that came with them are those of the
model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rljax.messaging.token import VARIABLE
from tests.calling_model import CALCULATOR, SUMS, make_calling_model
from tests.shared import REPOSITORY, sglang_flags

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOKEN = "sesame"
EXACT = {"float32": 2e-3, "bfloat16": 0.3}  # nats, of any token


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_calling_model(tmp_path_factory.mktemp("calling"))


@contextlib.contextmanager
def serving(model: Path, workdir: Path, **flags: Any) -> Iterator[str]:
    """Serves a model and yields the server's address."""
    servers = sglang_flags()
    arguments = (*servers.pop("sglang.extra_args"), "--max-total-tokens", "8192", "--max-running-requests", "16")
    settings = servers | {
        "allocation_mode": "sglang:d1",
        "actor.init_from_scratch": False,
        "actor.path": model,
        "sglang.context_length": 512,
        "sglang.extra_args": arguments,
        "sglang.log_dir": workdir,
        **flags,
    }
    command = [sys.executable, "-m", "experiments.serve", "--config=configs/quickstart.py"]
    command += [f"--config.{key}={value}" for key, value in settings.items()]
    env = os.environ | {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", VARIABLE: TOKEN}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if line.startswith("serving "):
                break
        else:
            raise AssertionError("".join(said))
        yield line.split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_two_turns_with_a_tool_reach_the_learner_bit_for_bit(model, tmp_path):
    with serving(model, tmp_path) as address:
        episodes = asyncio.run(_episodes(address, [*SUMS, *SUMS]))
    called = [episode for episode in episodes if episode["replies"][0].choices[0].finish_reason == "tool_calls"]
    assert 2 * len(called) > len(episodes)  # it samples, and may answer at once
    least = []
    for episode in called:
        first, second = episode["replies"]
        assert second.choices[0].finish_reason == "stop"
        (trajectory,) = episode["trajectories"]
        assert trajectory["components"]["prefix_breaks"] == 0
        ids, mask = np.array(trajectory["token_ids"]), np.array(trajectory["loss_mask"], bool)
        assert ids.tolist() == second.prompt_token_ids + second.choices[0].token_ids
        sampled = first.choices[0].token_ids + second.choices[0].token_ids
        assert ids[mask].tolist() == sampled
        before = len(first.prompt_token_ids)
        assert mask[before : before + len(first.choices[0].token_ids)].all() and not mask[:before].any()
        behavior = np.array(trajectory["behavior_logp"])
        exact = EXACT[str(sglang_flags()["sglang.dtype"])]
        np.testing.assert_allclose(behavior[mask], _logp(model, ids)[mask], atol=exact)
        least.append(behavior[mask].min())
    assert min(least) < -0.3  # one of two answers is a choice


async def _episodes(address: str, sums: list[str]) -> list[dict[str, Any]]:
    """Plays an episode for each sum, all at the same time."""
    from openai import AsyncOpenAI

    async def play(seed: int, text: str) -> dict[str, Any]:
        async with AsyncOpenAI(base_url=f"http://{address}/v1", api_key=TOKEN) as guest:
            session = await guest.post("/sessions", cast_to=dict, body={"seed": seed})
        messages: list[Any] = [{"role": "user", "content": text}]
        replies = []
        async with AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"], timeout=300) as client:
            for _ in range(2):
                reply = await client.chat.completions.create(
                    model="policy", messages=messages, tools=[CALCULATOR], max_tokens=96, extra_body={"return_token_ids": True}
                )
                replies.append(reply)
                message = reply.choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    result = str(eval(json.loads(call.function.arguments)["expression"]))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            found = await client.get("/trajectories", cast_to=dict)
        return {"replies": replies, "trajectories": found["trajectories"]}

    return await asyncio.gather(*(play(seed, text) for seed, text in enumerate(sums)))


def _logp(model: Path, ids: np.ndarray) -> np.ndarray:
    """Returns the log-prob of each token by transformers, [T] float32, 0 for the first."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(model)(torch.as_tensor(ids[None])).logits[0, :-1]
    logp = torch.log_softmax(logits.double(), -1).gather(1, torch.as_tensor(ids[1:, None]))[:, 0]
    return np.concatenate([[0.0], logp.numpy()])
