"""Environment variables of processes that run other people's code."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL", re.IGNORECASE)


def without_secrets(environment: Mapping[str, str], kept: Collection[str] = ()) -> dict[str, str]:
    """Returns an environment without the variables whose names say that they hold secrets.

    Example: RLJAX_TOKEN, WANDB_API_KEY, HF_TOKEN, AWS_SECRET_ACCESS_KEY are left out.

    Args:
      kept: names of variables that stay all the same.
    """
    return {name: value for name, value in environment.items() if name in kept or not _SECRET.search(name)}
