"""A sampler that gives out texts in turn, on the character-level tokenizer."""

import numpy as np

from rljax.types import Completion, Finish


class ScriptedSampler:
    """Its log-probs and versions say which token of which completion it was: -(10 * turn + i) and
    5 + turn.
    """

    version = 0

    def __init__(self, tokenizer, *texts, finish=Finish.STOP, end=None):
        self.tokenizer, self.texts, self.finish = tokenizer, texts, finish
        self.end = tokenizer.eos_token_id if end is None else end
        self.requests = []

    async def generate(self, request):
        turn = len(self.requests)
        self.requests.append(request)
        ids = np.array([*self.tokenizer.encode(self.texts[turn]), self.end], np.int32)
        logp = -np.arange(1, len(ids) + 1, dtype=np.float32) - 100 * turn
        return Completion(ids, logp, np.full(len(ids), 5 + turn, np.int32), self.finish)

    def sampled(self):
        """Returns ids, log-probs and versions of all tokens that it gave out."""
        ids, logp, versions = [], [], []
        for turn in range(len(self.requests)):
            made = [*self.tokenizer.encode(self.texts[turn]), self.end]
            ids += made
            logp += [-float(i + 1) - 100 * turn for i in range(len(made))]
            versions += [5 + turn] * len(made)
        return ids, logp, versions
