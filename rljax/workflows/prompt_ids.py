"""Token ids of prompts, rendered once for all samples of a group."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from rljax.hf.tokenizer import Tokenizer
from rljax.types import Prompt

KEPT = 64  # prompts; the samples of a group start together


class PromptIds:
    """Applies the chat template to prompts, and keeps the ids of the last ones.

    A template takes as long as everything else that an episode of a few tokens does on the host.

    Example: prompt_ids = PromptIds(tokenizer); prompt_ids(prompt) is prompt_ids(prompt)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # By identity: a prompt to train on and one to evaluate on may have the same uid. The prompt
        # is kept beside its ids, so that no other object gets its id() meanwhile.
        self._kept: OrderedDict[int, tuple[Prompt, np.ndarray]] = OrderedDict()

    def __call__(self, prompt: Prompt) -> np.ndarray:
        """Returns the ids that a completion follows, [P] int32, read-only."""
        if id(prompt) not in self._kept:
            ids = np.array(self._tokenizer.apply_chat_template(prompt.messages), np.int32)
            ids.flags.writeable = False
            self._kept[id(prompt)] = prompt, ids
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return self._kept[id(prompt)][1]
