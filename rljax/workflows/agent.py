"""Agents that talk to an OpenAI-compatible endpoint, trained on the tokens that they were sent.

    config.rollout.workflow = "agent"
    config.rollout.workflow_args.agent = "my_package.my_module:agent"
    config.rollout.workflow_args.command = ("python", "my_agent.py")       # or this

docs/agents.md shows one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rljax.agents import STYLES, Dialogue, Endpoint, SamplingPolicy, Session
from rljax.agents.agent import KEY, make_agent
from rljax.agents.server import SessionServer
from rljax.config import arguments
from rljax.engine import Generator
from rljax.errors import AgentError, AgentTimeout, EpisodeError, Rejected, UserError
from rljax.hf.tokenizer import HFTokenizer
from rljax.rewards.score import Rewards, Score, score_of
from rljax.types import Prompt, SamplingParams, Trajectory


class AgentWorkflow:
    """Runs an agent per episode, and makes trajectories of what it sampled.

    Components "turns" and "prefix_breaks" count completions, and prompts that could not go on from
    the tokens that were sampled; "context_full" is 1 if a later request left no room in the
    context. An agent that fails at that has ended its episode, with the reward of its turns so far.

    Args:
      agent: "package.module:function" (rljax/agents/agent.py says what it gets).
      command: program and arguments of an agent in a process of its own; instead of `agent`.
      timeout: seconds per episode; None for no limit but that of the run.
      export_style: "concat" (a trajectory per branch of the conversation) or "individual" (one per
        completion).
      turn_discount: factor of a later turn's reward in that of the turn before it.
      tool_parser: notation of tool calls; "auto" is that of the chat template's family.
      reasoning_parser: "think", "none", or "auto" by the chat template.
      override_sampling: requests for other sampling parameters than the run's get the run's; else
        they are refused.
      model: name of the model at the endpoint.
    """

    def __init__(
        self,
        tokenizer: HFTokenizer,
        rewards: Rewards,
        *,
        agent: str = "",
        command: Sequence[str] = (),
        timeout: float | None = None,
        export_style: str = "concat",
        turn_discount: float = 1.0,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        override_sampling: bool = False,
        model: str = "policy",
    ) -> None:
        if export_style not in STYLES:
            raise UserError(f"{KEY}.export_style: {export_style!r} ({', '.join(STYLES)})")
        arguments.check(KEY, timeout=(timeout, arguments.SECONDS), turn_discount=(turn_discount, arguments.UNIT))
        self._agent = make_agent(agent, command, model)
        self._rewards, self._timeout = rewards, timeout
        self._style, self._discount, self._override = export_style, turn_discount, override_sampling
        self._server = SessionServer(endpoint := Endpoint(Dialogue(tokenizer, tool_parser, reasoning_parser), model))
        self._endpoint = endpoint

    async def episode(self, generator: Generator, prompt: Prompt, params: SamplingParams, seed: int) -> list[Trajectory]:
        policy, kwargs = SamplingPolicy(params, override=self._override), prompt.chat_template_kwargs
        session = Session(generator, policy, seed, f"{prompt.uid}#{seed}", template_kwargs=kwargs)
        async with self._server.session(session) as base_url:
            returned = await self._run(session, base_url, prompt)
        if not session.recording.turns:
            raise AgentError(f"prompt {prompt.uid}: the agent asked for no completion")
        score = await self._score(session, prompt, returned)
        if score is not None:
            session.set_reward(score.reward)
        return session.trajectories(self._style, self._discount, score.components if score else {})

    async def _run(self, session: Session, base_url: str, prompt: Prompt) -> object:
        """Runs the agent. A failure of the sampler counts as that, and not as the agent's.

        Returns None if it failed at a full context.
        """
        try:
            async with asyncio.timeout(self._timeout) as limit:
                return await self._agent.run(session, base_url, prompt)
        except (EpisodeError, UserError) as error:
            if session.lost is not None:
                raise session.lost from error
            if session.full and not isinstance(error, Rejected):
                return None
            raise
        except Exception as error:  # the agent's code may raise anything
            if limit.expired():
                raise AgentTimeout(f"prompt {prompt.uid}: the agent took longer than {self._timeout:g} s") from None
            if session.full and session.lost is None:
                return None
            reason = " ".join(str(error).split())
            raise session.lost or AgentError(f"prompt {prompt.uid}: {type(error).__name__}: {reason}"[:2000]) from error

    async def _score(self, session: Session, prompt: Prompt, returned: object) -> Score | None:
        """Returns the score that the agent returned, or else that of its last reply.

        None if it returned none and set rewards by turn.
        """
        if returned is not None:
            try:
                return score_of(returned)
            except ValueError as error:
                raise AgentError(f"prompt {prompt.uid}: {error}") from None
        if any(turn.reward is not None for turn in session.recording.turns):
            return None
        return await self._rewards.score(prompt, session.recording.turns[-1].text)
