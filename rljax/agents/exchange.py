"""One request at the endpoint, from its parsed body to recorded turns: n choices of one prompt or
of several.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np

from rljax.agents.dialogue import ChatPrompt, Dialogue
from rljax.agents.errors import CONTEXT_EXCEEDED, ApiError
from rljax.agents.parameters import ChatRequest, CompletionRequest, ReplyOptions, SamplingRequest
from rljax.agents.recording import History, Setting, Turn
from rljax.agents.session import Session
from rljax.agents.stream import GrowingText, VisibleText
from rljax.chat.messages import Message, text_of
from rljax.errors import PromptTooLong, SamplerError, UserError
from rljax.process.thread_pool import ThreadPool
from rljax.types import Completion, Finish, Piece, Request, SamplingParams

LONG = 20_000  # characters of a prompt
PROMPTS = ThreadPool(2, "prompt")  # makes long ones

P = ParamSpec("P")
T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class Choice:
    """One completion under way, and its outcome."""

    index: int
    prompt_ids: np.ndarray  # [P] int32
    params: SamplingParams
    request: Request
    visible: VisibleText | None  # None: its text is sent when it is complete
    growing: GrowingText
    chat: ChatPrompt | None = None
    parent: Turn | None = None
    prompt_text: str = ""
    completion: Completion | None = None
    finish: Finish = Finish.ABORT
    text: str = ""  # without the id or the string that ended it
    message: Message | None = None  # of a chat


@dataclasses.dataclass(frozen=True)
class Delta:
    """News of a choice: more of its text, or its end."""

    choice: Choice
    reasoning: str = ""
    content: str = ""
    done: bool = False


class Exchange:
    """A request of a session."""

    def __init__(self, session: Session, dialogue: Dialogue, options: ReplyOptions, prefix: str) -> None:
        """
        Args:
          prefix: of the id, as OpenAI's endpoint has it.
        """
        self.session, self.dialogue, self.options = session, dialogue, options
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.number = session.next_number()
        self.choices: list[Choice] = []
        self.calls_tools = False
        self._setting: Setting | None = None

    @classmethod
    async def chat(cls, session: Session, dialogue: Dialogue, asked: ChatRequest) -> Exchange:
        """Begins a request to /v1/chat/completions. Raises ApiError."""
        exchange = cls(session, dialogue, asked.reply, "chatcmpl")
        params = session.policy.params_for(asked.sampling)
        exchange._setting = setting = Setting(asked.tools, {**session.template_kwargs, **asked.template_kwargs})
        exchange.calls_tools = asked.calls_tools
        recording = session.recording
        length = sum(len(text_of(message)) for message in asked.messages)
        prompt = await _off_the_loop("messages", length, dialogue.prompt, recording, asked.messages, setting)
        recording.breaks += prompt.broken
        exchange._add(prompt.token_ids, params, asked.sampling, chat=prompt, parent=prompt.parent)
        return exchange

    @classmethod
    async def complete(cls, session: Session, dialogue: Dialogue, asked: CompletionRequest) -> Exchange:
        """Begins a request to /v1/completions. Raises ApiError."""
        exchange = cls(session, dialogue, asked.reply, "cmpl")
        params = session.policy.params_for(asked.sampling)
        for prompt in asked.prompts:
            parent = session.recording.text_extended_by(prompt)
            ids = await _off_the_loop("prompt", len(prompt), _text_ids, dialogue, prompt, parent)
            text = prompt if isinstance(prompt, str) else ""
            exchange._add(ids, params, asked.sampling, parent=parent, prompt_text=text)
        return exchange

    def _add(
        self,
        prompt_ids: np.ndarray,
        params: SamplingParams,
        sampling: SamplingRequest,
        *,
        chat: ChatPrompt | None = None,
        parent: Turn | None = None,
        prompt_text: str = "",
    ) -> None:
        """Adds the n choices of a prompt."""
        if not len(prompt_ids):
            raise ApiError("the prompt is empty", param="prompt", code="invalid_value")
        session, dialogue = self.session, self.dialogue
        for seed in session.seeds(prompt_ids, sampling.seed, self.options.n):
            index = len(self.choices)
            request = Request(f"{session.name}.{self.number}.{index}", prompt_ids, params, seed)
            reasoning = chat is not None and dialogue.has_reasoning
            visible = VisibleText(params.stop, reasoning=reasoning, opened=chat is not None and chat.opened)
            growing = GrowingText(dialogue.tokenizer, skip_special_tokens=not dialogue.calls.special)
            whole = self.calls_tools or not self.options.stream
            self.choices.append(
                Choice(index, prompt_ids, params, request, None if whole else visible, growing, chat, parent, prompt_text)
            )

    async def run(self) -> AsyncGenerator[Delta, None]:
        """Samples all choices at once, and yields news of them. Records each at its end.

        Raises:
          ApiError: the sampler refused a request, or lost one.
        """
        news: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._sample(choice, news.put_nowait)) for choice in self.choices]
        for task in tasks:
            self.session.track(task)
        left = len(tasks)
        try:
            while left:
                delta = await news.get()
                if isinstance(delta, Exception):
                    raise delta
                left -= delta.done
                yield delta
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(self, choice: Choice, tell: Callable[[Delta | Exception], None]) -> None:
        pieces: list[Piece] = []
        try:
            async with contextlib.aclosing(self.session.generator.stream(choice.request)) as stream:
                async for piece in stream:
                    pieces.append(piece)
                    if choice.visible is not None and piece.finish is None:
                        choice.growing.add(piece.token_ids.tolist())
                        tell(Delta(choice, *choice.visible.news(choice.growing.so_far, last=False)))
            self._end(choice, pieces)
            news = choice.visible.news(choice.text, last=True) if choice.visible is not None else ("", "")
            tell(Delta(choice, *news, done=True))
        except PromptTooLong as error:
            self.session.found_full(choice.parent)
            # in the words by which agents' libraries know it
            line, param = f"{error}: it exceeds the model's context length", "messages" if choice.chat else "prompt"
            tell(ApiError(line, param=param, code=CONTEXT_EXCEEDED))
        except UserError as error:
            tell(ApiError(str(error), code="invalid_request"))
        except SamplerError as error:
            self.session.lost = error
            tell(ApiError(str(error), code="sampler_lost", status=503))
        except asyncio.CancelledError:
            tell(ApiError("the session has ended", code="session_ended", status=409))
            raise
        except Exception as error:  # a bug: answered as such
            tell(error)

    def _end(self, choice: Choice, pieces: Sequence[Piece]) -> None:
        """Joins a completion, reads it, and records it as a turn."""
        ids, logp, versions = (
            np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("token_ids", "logp", "versions")
        )
        finish = pieces[-1].finish
        if finish is None or finish is Finish.ABORT or not len(ids):
            raise SamplerError(f"request {choice.request.id} was aborted after {len(ids)} tokens")
        completion = choice.completion = Completion(ids, logp, versions, finish)
        dialogue, chat = self.dialogue, choice.chat
        choice.text = dialogue.text(completion, choice.params)
        choice.finish = finish
        if chat is not None:
            choice.message = dialogue.reply(choice.text, chat, calls_tools=self.calls_tools)
            if choice.message.get("tool_calls"):
                choice.finish = Finish.TOOL_CALLS
        if not self.session.recorded:
            return
        history = None
        if chat is not None and choice.message is not None and self._setting is not None:
            history = History.of(chat.messages, choice.message, self._setting)
        turn = Turn(
            id=self.id,
            choice=choice.index,
            number=self.number,
            prompt_ids=choice.prompt_ids,
            completion=completion,
            finish=choice.finish,
            text=choice.text,
            parent=choice.parent,
            history=history,
            prompt_text=choice.prompt_text,
        )
        self.session.recording.add(turn)


async def _off_the_loop(param: str, length: int, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Makes a prompt, in a thread if its text is long, which takes seconds. Raises ApiError."""
    try:
        return await PROMPTS.call(make, *args, **kwargs) if length > LONG else make(*args, **kwargs)
    except UserError as error:
        raise ApiError(str(error), param=param, code="invalid_value") from None
    except UnicodeEncodeError:
        raise ApiError(f"{param}: contains half of a surrogate pair", param=param, code="invalid_value") from None


def _text_ids(dialogue: Dialogue, prompt: str | tuple[int, ...], parent: Turn | None) -> np.ndarray:
    """Returns the ids of a prompt of text: the recorded ones, then those of what is new."""
    if not isinstance(prompt, str):
        return np.array(prompt, np.int32)
    if parent is None:
        return np.array(dialogue.tokenizer.encode_document(prompt), np.int32)
    new = dialogue.tokenizer.encode(prompt[len(parent.prompt_text) + len(parent.text) :])
    return np.concatenate([parent.token_ids, np.array(new, np.int32)])
