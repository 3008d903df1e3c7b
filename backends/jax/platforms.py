"""Platform that a kernel is made for: one table for runs, and for plans, which have no devices."""

from __future__ import annotations

from rljax.chips import GPU, TPU

PLATFORMS = {"cudnn": GPU, "tokamax": GPU, "splash": TPU, "pallas_gpu": GPU, "pallas_tpu": TPU}  # by the kernel's name
DEVICES = {GPU: "an NVIDIA GPU", TPU: "a TPU"}


def lacking(kernel: str, platform: str) -> str | None:
    """Says which devices a kernel needs, if not those of this platform; None where it runs.

    Example: lacking("splash", "gpu") == "it needs a TPU"
    """
    needed = PLATFORMS.get(kernel, platform)
    return None if needed == platform else f"it needs {DEVICES[needed]}"
