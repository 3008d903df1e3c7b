"""The config section `sglang`."""

from __future__ import annotations

import dataclasses

from rljax.config.keys import HALF_OPEN_UNIT, NOT_NEGATIVE, POSITIVE, key
from rljax.config.schema import EngineConfig


@dataclasses.dataclass(frozen=True)
class SglangConfig(EngineConfig):
    """SGLang servers of a run, one per data-parallel replica; SGLang chooses what is left empty."""

    python: str = key("", "Python interpreter that has SGLang. Empty: the run's own.")
    device: str = key("", '"cuda" or "cpu". Empty: SGLang\'s choice.')
    dtype: str = key("auto", "Dtype of computation.", choices=("auto", "bfloat16", "float32", "float16"))
    attention_backend: str = key("", "SGLang's name of an attention implementation.")
    mem_fraction_static: float | None = key(None, "Share of a device's memory for weights and KV cache.", HALF_OPEN_UNIT)
    context_length: int | None = key(None, "Longest prompt and completion together.", POSITIVE, unit="tokens")
    max_running_requests: int | None = key(None, "Requests decoded at once by a server.", POSITIVE)
    stream_interval: int = key(
        16, "Tokens per chunk of a reply. Fewer cost time; more are lost with a server.", POSITIVE, unit="tokens"
    )
    disable_overlap_schedule: bool = key(False, "Schedule a batch only after the previous one is done.")
    enable_multimodal: bool = key(False, "Take pictures, of image-text models.")
    extra_args: tuple[str, ...] = key((), "More flags of sglang.launch_server, as on its command line.")
    start_timeout: float = key(600.0, "Time limit for a server to start.", POSITIVE, unit="seconds")
    restarts: int = key(3, "Number of restarts of a server that died, before it is dropped.", NOT_NEGATIVE)
    transport: str = key(
        "",
        'How weights reach the servers, with a learner that can: "ipc" (the same devices), "nccl" (other devices), "gloo" '
        '(CPU), "directory". Empty: the first of these that is possible.',
    )
    bucket_mb: int = key(
        512,
        "Size of what ipc, nccl and gloo send at once; each side needs as much memory beside the model.",
        POSITIVE,
        unit="MiB",
    )
    release_memory: bool = key(
        False,
        "Servers on the learner's devices free their memory while it updates (synchronous runs only).",
    )
    log_dir: str = key("", "Directory for the servers' logs. Empty: a new temporary directory.")
