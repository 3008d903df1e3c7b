"""A model that talks by a script, behind the real endpoint: what the tests of this folder share."""

import asyncio
import contextlib

import numpy as np

from rljax.agents import Dialogue, Endpoint, SamplingPolicy, Session
from rljax.agents.server import SessionServer
from rljax.engine import Generator
from rljax.hf.tokenizer import build_char_tokenizer, load_tokenizer
from rljax.types import Completion, Finish, Piece, SamplingParams

TEMPLATE = (
    "{% if tools %}tools:{{ tools | tojson }}<eos>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Keeps the reasoning of the turns behind the last user message, and drops it from earlier ones
THINKING = (
    "{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content and loop.index0 > last.user %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:<think>\n{% endif %}"
)
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*3"}}\n</tool_call>'


def make_tokenizer(directory, template=TEMPLATE):
    build_char_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(template)
    return load_tokenizer(directory)


class Script(Generator):
    """Answers each request with the text that a function of the prompt's text gives.

    A text that does not end with `<eos>` was cut at max_new_tokens. Log-probs are drawn by the
    request's seed, and versions rise in the middle of a completion.
    """

    version = 3

    def __init__(self, tokenizer, speak, piece=None):
        self.tokenizer, self.speak, self.piece = tokenizer, speak, piece
        self.requests, self.completions = [], []

    async def generate(self, request):
        await asyncio.sleep(0)
        text = self.speak(self.tokenizer.decode(request.prompt_ids, skip_special_tokens=False))
        if isinstance(text, Exception):
            raise text
        ids = self.tokenizer.encode(text)[: request.params.max_new_tokens]
        finish = Finish.STOP if ids[-1] in request.params.stop_token_ids else Finish.LENGTH
        for at in range(1, len(ids) + 1):
            if any(self.tokenizer.decode(ids[:at]).endswith(stop) for stop in request.params.stop):
                ids, finish = ids[:at], Finish.STOP
                break
        logp = -np.random.default_rng(request.seed).random(len(ids)).astype(np.float32)
        versions = np.where(np.arange(len(ids)) < len(ids) // 2, 3, 4).astype(np.int32)
        completion = Completion(np.array(ids, np.int32), logp, versions, finish)
        self.requests.append(request)
        self.completions.append(completion)
        return completion

    async def stream(self, request):
        done = await self.generate(request)
        size = self.piece or len(done.token_ids)
        for start in range(0, len(done.token_ids), size):
            part = slice(start, start + size)
            last = start + size >= len(done.token_ids)
            yield Piece(done.token_ids[part], done.logp[part], done.versions[part], done.finish if last else None)


class Served:
    """A session at a port of this machine, and the official client for it."""

    def __init__(self, tokenizer, speak, *, piece=None, params=None, override=False, seed=7, **parsers):
        self.script = Script(tokenizer, speak, piece)
        own = params or SamplingParams(256, stop_token_ids=tokenizer.eos_token_ids)
        self.session = Session(self.script, SamplingPolicy(own, override=override), seed, "0/0#7")
        self.server = SessionServer(Endpoint(Dialogue(tokenizer, **parsers), "policy"))

    @contextlib.asynccontextmanager
    async def client(self, **options):
        from openai import AsyncOpenAI

        given = {"max_retries": 0, "api_key": self.session.key} | options
        async with self.server.session(self.session) as base_url, AsyncOpenAI(base_url=base_url, **given) as client:
            yield client

    def run(self, talk, **options):
        """Runs `talk(client)` and returns what it returns."""

        async def everything():
            async with self.client(**options) as client:
                return await talk(client)

        return asyncio.run(everything())
