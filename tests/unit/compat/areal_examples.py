"""Workflows as users of AReaL write them: torch tensors, the constructor's names, the engine's calls."""

import asyncio
import uuid

import numpy as np
import torch

from rljax.compat.areal import (
    AsyncRewardWrapper,
    ModelRequest,
    RolloutWorkflow,
    apply_chat_template,
    atrace_session_phase,
    session_context,
    stats_tracker,
    trace_session,
    workflow_context,
)


class SingleTurn(RolloutWorkflow):
    """One completion per episode; a batch of one row of tensors."""

    def __init__(self, reward_fn, gconfig, tokenizer, enable_thinking=False):
        self.async_reward_fn = AsyncRewardWrapper(reward_fn)
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.tokenizer = tokenizer
        self.enable_thinking = enable_thinking

    @trace_session("reward")
    async def _reward(self, response, prompt, data):
        completion = self.tokenizer.decode(response.output_tokens)
        return await self.async_reward_fn(prompt, completion, response.input_tokens, response.output_tokens, **data)

    @session_context()
    async def _sample(self, engine, request, prompt, data):
        async with atrace_session_phase("generate"):
            response = await engine.agenerate(request)
        reward = await self._reward(response, prompt, data)
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward, length=response.output_len)
        return response, reward

    async def arun_episode(self, engine, data):
        keywords = {"tokenize": True, "add_generation_prompt": True, "enable_thinking": self.enable_thinking}
        input_ids = apply_chat_template(self.tokenizer, data["messages"], **keywords)
        request = ModelRequest(
            rid=uuid.uuid4().hex, input_ids=input_ids, gconfig=self.gconfig.new(n_samples=1), tokenizer=self.tokenizer
        )
        response, reward = await self._sample(engine, request, self.tokenizer.decode(input_ids), data)
        sequence = response.input_tokens + response.output_tokens
        result = {
            "input_ids": torch.tensor(sequence, dtype=torch.int32),
            "loss_mask": torch.tensor([0] * response.input_len + [1] * response.output_len, dtype=torch.int32),
            "logprobs": torch.tensor([0.0] * response.input_len + response.output_logprobs, dtype=torch.float32),
            "versions": torch.tensor([-1] * response.input_len + response.output_versions, dtype=torch.int32),
            "attention_mask": torch.ones(len(sequence), dtype=torch.bool),
            "rewards": torch.tensor(reward, dtype=torch.float32),
        }
        return {name: tensor.unsqueeze(0) for name, tensor in result.items()}


class Retry(RolloutWorkflow):
    """Asks again behind the tokens so far until the answer is right; rejects what never is. In numpy."""

    def __init__(self, gconfig, tokenizer, max_turns):
        self.gconfig, self.tokenizer, self.max_turns = gconfig, tokenizer, max_turns
        self.reward = AsyncRewardWrapper(self._right, timeout_seconds=5)

    @staticmethod
    def _right(text, answer):
        return float(text == answer)

    async def arun_episode(self, engine, data):
        again = self.tokenizer.encode("no", add_special_tokens=False)
        ids = apply_chat_template(self.tokenizer, data["messages"], add_generation_prompt=True)
        sequence, mask, logp, versions = [], [], [], []
        for turn in range(self.max_turns):
            response = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=self.gconfig, tokenizer=self.tokenizer))
            given = response.input_len - len(sequence)
            assert response.input_tokens[: len(sequence)] == sequence
            sequence += response.input_tokens[-given:] + response.output_tokens
            mask += [0] * given + [1] * response.output_len
            logp += [0.0] * given + response.output_logprobs
            versions += [-1] * given + response.output_versions
            text = self.tokenizer.decode(response.output_tokens_without_stop)
            if await self.reward(text, data["answer"]):
                stats_tracker.scalar(turns=turn + 1)
                row = {"input_ids": sequence, "loss_mask": mask, "logprobs": logp, "versions": versions}
                return {name: np.array([values]) for name, values in row.items()} | {"rewards": np.ones(1)}
            ids = sequence + again
        return None


class TwoRows(RolloutWorkflow):
    """Returns the whole group in one result, as workflows did before they had one sample per episode."""

    def __init__(self, gconfig, tokenizer):
        self.inner = SingleTurn(lambda *args, **data: 1.0, gconfig, tokenizer)

    async def arun_episode(self, engine, data):
        rows = await asyncio.gather(*(self.inner.arun_episode(engine, data) for _ in range(2)))
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


class Needs(RolloutWorkflow):
    def __init__(self, gconfig, tokenizer, max_turns):
        pass
