"""SGLang on the requests of experiments.bench.decode: a server of its own with dummy weights.

    python3 experiments/bench/decode_sglang.py JSON

where JSON is {"model": DIRECTORY, "vocabulary": 9, "cases": [[[1, 2]]], "runs": 1, "slots": 1}.
experiments.bench.decode starts it. Needs SGLang, aiohttp and numpy, nothing of rljax. The options
are for a machine without FlashAttention-3 and flashinfer.
"""

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

START = 400  # seconds
OPTIONS = [
    "--attention-backend",
    "triton",
    "--sampling-backend",
    "pytorch",
    "--grammar-backend",
    "none",
    "--load-format",
    "dummy",
]
OPTIONS += ["--skip-tokenizer-init", "--mem-fraction-static", "0.6", "--log-level", "warning"]


def start(model: str, slots: int, log: Any) -> tuple[subprocess.Popen[bytes], str]:
    """Starts a server and waits until it answers. Returns it and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--port", str(port), *OPTIONS]
    command += ["--max-running-requests", str(slots), "--cuda-graph-max-bs", str(slots)]
    server, address = subprocess.Popen(command, stdout=log, stderr=log), f"http://127.0.0.1:{port}"
    end = time.monotonic() + START
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=2)
        except OSError:
            time.sleep(1)
        else:
            return server, address
    server.kill()
    sys.exit(f"the server did not start: {Path(log.name).read_text()[-2000:]}")


async def generate(session: aiohttp.ClientSession, address: str, ids: list[int], tokens: int) -> int:
    params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
    async with session.post(f"{address}/generate", json=body) as response:
        return int((await response.json())["meta_info"]["completion_tokens"])


async def measure(address: str, task: dict[str, Any]) -> None:
    # A connection that was idle for a few seconds is closed by the server, perhaps as the next request is sent
    patient, many = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=patient, connector=many) as session:
        for run, lengths in [(run, lengths) for lengths in task["cases"] for run in range(task["runs"])]:
            random = np.random.default_rng((run, len(lengths)))
            prompts = [random.integers(3, task["vocabulary"], prompt).tolist() for prompt, _ in lengths]
            begin = time.perf_counter()
            calls = [generate(session, address, ids, tokens) for ids, (_, tokens) in zip(prompts, lengths, strict=True)]
            total = sum(await asyncio.gather(*calls))
            seconds = time.perf_counter() - begin
            line = {"engine": "sglang", "run": run, "requests": len(calls), "tokens": total, "s": round(seconds, 2)}
            print(json.dumps(line | {"tokens_per_s": round(total / seconds)}), flush=True)


def main() -> None:
    task, begin = json.loads(sys.argv[1]), time.perf_counter()
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        server, address = start(task["model"], task["slots"], log)
        print(json.dumps({"engine": "sglang", "ready_s": round(time.perf_counter() - begin, 1)}), flush=True)
        try:
            asyncio.run(measure(address, task))
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
