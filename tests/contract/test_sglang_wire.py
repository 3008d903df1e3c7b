"""Our server and a real SGLang one answer the same /generate requests with the same text and tokens.

Greedy completions of one model, on the CPU in float32. What our server refuses by name, it does not
answer in another way than SGLang.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from rljax.config.allocation import Pool
from rljax.engines.http.launcher import SglangServers
from rljax.engines.http.remote import Remote, inspect, make_session
from rljax.errors import UserError
from rljax.testing.models import config_of
from tests.calling_model import SUMS, make_calling_model
from tests.contract.test_sglang_agents import TOKEN, serving
from tests.shared import sglang_flags

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = f"calc;u:{SUMS[2]}<eos>a:"  # is answered by '<tool_call>{"name": "calc", ...}</tool_call>'
GREEDY = {"temperature": 0.0, "max_new_tokens": 96}
SAME: dict[str, dict[str, Any]] = {
    "to the end": {},
    "cut": {"max_new_tokens": 9},
    "a stop string": {"stop": '"name"'},
    "the first of several": {"stop": ["arguments", '": "', "zzz"]},
    "a stop string that is kept": {"stop": '"name"', "no_stop_trim": True},
    "a stop string that never comes": {"stop": ["zzz"]},
    "a stop id": {"stop_token_ids": [28]},
    "a stop id that is kept": {"stop_token_ids": [28], "no_stop_trim": True},
    "a stop id that never comes": {"stop_token_ids": [95]},
    "stop ids that are ignored": {"stop_token_ids": [28], "ignore_eos": True, "max_new_tokens": 90},
    "special tokens": {"skip_special_tokens": False},
    "special tokens and all": {"skip_special_tokens": False, "no_stop_trim": True},
    "beyond the end": {"ignore_eos": True, "max_new_tokens": 90},
    "no sooner": {"min_new_tokens": 4, "max_new_tokens": 12},
}
REFUSED: list[dict[str, Any]] = [
    {"top_logprobs_num": 2, "return_logprob": True},
    {"logprob_start_len": 0, "return_logprob": True},
    {"sampling_params": {"frequency_penalty": 0.5}},
    {"no_such_key": 1},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The model, with a tokenizer that puts a BOS before a document."""
    directory = make_calling_model(tmp_path_factory.mktemp("calling"))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def both(model, tmp_path_factory):
    """SGLang's server and ours."""
    scratch = tmp_path_factory.mktemp("servers")
    arguments = ("--max-total-tokens", "8192", "--max-running-requests", "16")
    flags = sglang_flags() | {"sglang.context_length": 512, "sglang.extra_args": arguments, "sglang.log_dir": str(scratch)}
    with (
        ThreadPoolExecutor() as pool,
        serving(model, scratch, **{"allocation_mode": "jax:d1", "jax.context_length": 256}) as ours,
    ):
        servers = pool.submit(SglangServers, config_of(**flags), Pool("sglang"), model).result()
        try:
            base = f"http://{ours}"
            yield servers.remotes[0], Remote(base, inspect(base, TOKEN)[0], TOKEN)
        finally:
            servers.close()


def answer(server: Remote, body: dict[str, Any]) -> Any:
    async def talk() -> Any:
        async with make_session() as session:
            return await server.post(session, "/generate", body, 120)

    return asyncio.run(talk())


@pytest.mark.parametrize("prompt", ["text", "input_ids"])
def test_the_same_request_has_the_same_answer(both, model, prompt):
    given = {"text": PROMPT} if prompt == "text" else {"input_ids": [70, 28, 90, 2, 70, 31, 29]}
    for name, sampling in SAME.items():
        body = {**given, "sampling_params": GREEDY | sampling, "return_logprob": True}
        theirs, ours = (answer(server, body) for server in both)
        assert ours["text"] == theirs["text"], name
        seen = [
            (
                meta["prompt_tokens"],
                meta["completion_tokens"],
                meta["finish_reason"],
                [i for _, i, *_ in meta["output_token_logprobs"]],
            )
            for meta in (theirs["meta_info"], ours["meta_info"])
        ]
        assert seen[0] == seen[1], name
        logps = [[logp for logp, *_ in reply["meta_info"]["output_token_logprobs"]] for reply in (theirs, ours)]
        assert logps[1] == pytest.approx(logps[0], abs=2e-3), name


@pytest.mark.parametrize("extra", REFUSED)
def test_what_we_do_not_answer_as_sglang_does_is_refused_by_name(both, extra):
    body = {"text": PROMPT, "sampling_params": GREEDY} | extra
    with pytest.raises(UserError, match="status 400") as caught:
        answer(both[1], body)
    assert any(name in str(caught.value) for name in (*extra, *extra.get("sampling_params", {})))
