"""Gold answers that no policy writes word for word, for a reward that asks for that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rljax.config.schema import Config
from rljax.hf.tokenizer import Tokenizer
from rljax.sanity.findings import Finding, Severity
from rljax.types import Prompt

SAMPLES = 32  # prompts whose gold answers are looked at
WORKED = re.compile(r"\S.*\n#### [^\n]+\s*\Z", re.DOTALL)  # GSM8K's solutions: steps, and the result on the last line


def check_golds(config: Config, prompts: Sequence[Prompt], tokenizer: Tokenizer | None) -> Iterator[Finding]:
    """Warns if reward `exact` compares with whole solutions, or with more than a completion holds.

    Args:
      prompts: some of the training set.
      tokenizer: counts tokens; None to leave lengths unchecked.
    """
    golds = [str(prompt.fields["answer"]) for prompt in prompts if "answer" in prompt.fields]
    if "exact" not in config.reward.names or not golds:
        return
    worked = [gold for gold in golds if WORKED.search(gold)]
    if len(worked) > len(golds) / 2:
        line = f"exact compares a completion with the whole gold answer, and that of {len(worked)} of {len(golds)} records"
        remedy = "reward.name=gsm8k compares the results alone"
        yield Finding(Severity.WARNING, "reward.name", f"{line} is a worked solution that ends in '#### ...'", remedy)
        return
    most = config.gconfig.max_new_tokens
    longer = [gold for gold in golds if tokenizer is not None and len(tokenizer.encode(gold)) > most]
    if len(longer) > len(golds) / 2:
        line = f"exact compares a completion with the whole gold answer, and that of {len(longer)} of {len(golds)} records"
        remedy = "a reward that looks for the result, or a larger gconfig.max_new_tokens"
        yield Finding(Severity.WARNING, "reward.name", f"{line} is longer than gconfig.max_new_tokens={most}", remedy)
