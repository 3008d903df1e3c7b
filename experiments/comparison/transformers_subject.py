"""transformers in experiments.compare: its own model and its own `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
from transformers.utils import logging

from rljax.experiments.comparison.case import Case, Greedy

TOGETHER = 8  # prompts that are completed at once
ROWS = 256  # logits that are widened at once


class TransformersSubject:
    """Implements `Subject`, on the first GPU if there is one."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        logging.disable_progress_bar()
        dtype = getattr(torch, case.dtype)
        kind: Any = AutoModelForCausalLM if case.pictures is None else AutoModelForImageTextToText
        self._model: Any = kind.from_pretrained(case.model_dir, dtype=dtype).to(self._device).eval()
        # The one of the directory may hold a temperature, a penalty, a minimum
        self._model.generation_config = GenerationConfig()

    @torch.no_grad()
    def generate(self, prompts: Sequence[np.ndarray]) -> list[Greedy]:
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        completed: dict[int, Greedy] = {}
        together = TOGETHER if self._case.pictures is None else 1
        for start in range(0, len(order), together):
            members = order[start : start + together]
            done = self._completed([prompts[i] for i in members], self._pictures(members[0]))
            completed |= zip(members, done, strict=True)
        return [completed[i] for i in range(len(prompts))]

    def _pictures(self, index: int) -> dict[str, torch.Tensor]:
        """Returns what the model takes of a prompt's pictures."""
        if self._case.pictures is None:
            return {}
        arrays = {name: torch.from_numpy(array).to(self._device) for name, array in self._case.pictures[index].arrays.items()}
        return {name: x.to(self._model.dtype) if x.is_floating_point() else x for name, x in arrays.items()}

    def _completed(self, prompts: Sequence[np.ndarray], pictures: dict[str, torch.Tensor]) -> list[Greedy]:
        """Completes prompts of about equal length, padded on the left."""
        length, stops = max(map(len, prompts)), list(self._case.stop_token_ids)
        token_ids, mask = (torch.zeros(len(prompts), length, dtype=torch.long) for _ in range(2))
        for row, prompt in enumerate(prompts):
            token_ids[row, length - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, length - len(prompt) :] = 1
        out = self._model.generate(
            token_ids.to(self._device),
            attention_mask=mask.to(self._device),
            do_sample=False,
            max_new_tokens=self._case.max_new_tokens,
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,
            output_logits=True,
            return_dict_in_generate=True,
            **pictures,
        )
        sampled = out.sequences[:, length:].cpu()
        logp = torch.stack([_logp(logits, out.sequences[:, length + t]) for t, logits in enumerate(out.logits)], 1)
        return [_ended(ids, row, stops) for ids, row in zip(sampled.numpy(), logp.numpy(), strict=True)]

    @torch.no_grad()
    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate([np.zeros(1), self._scored(i, sequence)]) for i, sequence in enumerate(sequences)]

    def _scored(self, index: int, sequence: np.ndarray) -> np.ndarray:
        token_ids = self._tensor(sequence)
        return _logp(self._model(token_ids, **self._pictures(index)).logits[0, :-1], token_ids[0, 1:]).numpy()

    @torch.no_grad()
    def hidden_states(self, sequence: np.ndarray) -> np.ndarray:
        """Returns what the layers and the norm put out, as forward hooks see it."""
        states: list[torch.Tensor] = []

        def keep(module: Any, inputs: Any, output: Any) -> None:
            states.append(output[0] if isinstance(output, tuple) else output)

        def keep_input(module: Any, inputs: Any, kwargs: Any) -> None:
            states.append(inputs[0] if inputs else kwargs["hidden_states"])

        body = self._model.model if self._case.pictures is None else self._model.model.language_model
        hooks = [body.layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)]
        hooks += [module.register_forward_hook(keep) for module in (*body.layers, body.norm)]
        try:
            self._model(self._tensor(sequence), **self._pictures(0))
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack([state[0].double().cpu() for state in states]).numpy()

    def close(self) -> None:
        del self._model

    def _tensor(self, sequence: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(sequence.astype(np.int64))[None].to(self._device)


def _logp(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns the log-probs of one token per row of logits: [R] float64, nats."""
    parts = zip(logits.split(ROWS), token_ids.split(ROWS), strict=True)  # float64 of all logits would be large
    return torch.cat([part.double().log_softmax(-1).gather(-1, ids[:, None])[:, 0].cpu() for part, ids in parts])


def _ended(token_ids: np.ndarray, logp: np.ndarray, stops: Sequence[int]) -> Greedy:
    """Cuts behind the first stop id."""
    ends = np.flatnonzero(np.isin(token_ids, stops))
    length = int(ends[0]) + 1 if len(ends) else len(token_ids)
    return Greedy(token_ids[:length].astype(np.int32), logp[:length])
