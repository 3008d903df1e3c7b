"""Games in a run: what reaches the learner trains on each sampled token, and on no other."""

from collections import defaultdict

import numpy as np
import pytest

from rljax.environments import Source
from rljax.hf.tokenizer import build_char_tokenizer, load_tokenizer
from rljax.loop import train
from rljax.testing.harness import VOCAB, make_run
from rljax.types import Prompt, SamplingParams
from rljax.workflows import build_workflow

# Half of the tokens end an action, so that there are several turns
PARAMS = SamplingParams(4, stop_token_ids=tuple(range(0, VOCAB, 2)))


class Recorded:
    """Generator that notes what it gave out, by episode."""

    def __init__(self, inner, episodes):
        self.inner, self.episodes = inner, episodes

    @property
    def version(self):
        return self.inner.version

    async def generate(self, request):
        completion = await self.inner.generate(request)
        self.episodes[request.id.rpartition(".")[0]].append((request.prompt_ids, completion))
        return completion


class Games:
    """The workflow, on prompts of the environment in place of the harness's own."""

    def __init__(self, workflow):
        self.workflow, self.episodes = workflow, defaultdict(list)

    async def episode(self, generator, prompt, params, seed):
        source = Source("guess_number", int(prompt.fields["index"]), {"question": "guess ", "illegal": "what? ", "guesses": 3})
        game = Prompt(prompt.uid, ({"role": "user", "content": "guess "},), {"environment": source.to_json()})
        return await self.workflow.episode(Recorded(generator, self.episodes), game, PARAMS, seed)


def expected(episodes, credit):
    """Returns {token ids: [(mask, log-probs), ...]} of all trajectories that the episodes make."""
    found = defaultdict(list)
    for turns in episodes.values():
        for last in range(len(turns)) if credit == "turn" else [len(turns) - 1]:
            prompt_ids, completion = turns[last]
            ids = [*prompt_ids.tolist(), *completion.token_ids.tolist()]
            mask, logp = np.zeros(len(ids), bool), np.zeros(len(ids), np.float32)
            for prompt, sampled in turns[last:] if credit == "turn" else turns:
                if len(prompt) + len(sampled.token_ids) > len(ids):
                    break
                mask[len(prompt) : len(prompt) + len(sampled.token_ids)] = True
                logp[len(prompt) : len(prompt) + len(sampled.token_ids)] = sampled.logp
            found[tuple(ids)].append((mask.tolist(), logp.tolist()))
    return found


@pytest.mark.parametrize("credit", ["episode", "turn"])
def test_no_token_of_an_environment_reaches_the_learner_as_trained(tmp_path, credit):
    build_char_tokenizer(tmp_path / "char")
    workflow = build_workflow(
        "environment", tokenizer=load_tokenizer(tmp_path / "char"), rewards=None, arguments={"credit": credit, "max_turns": 3}
    )
    games, batches = Games(workflow), []
    overrides = {"rollout.max_head_offpolicyness": 1, "actor.mb_spec.max_tokens_per_row": 96}
    run = make_run(tmp_path, overrides, n_prompts=8, workflow=games)
    update = run.engine.learner.update
    run.engine.learner.update = lambda batch: batches.append(batch) or update(batch)
    assert train(run).step == 2

    right, turns = expected(games.episodes, credit), []
    for batch in batches:
        np.testing.assert_array_equal(batch.loss_mask, (batch.versions >= 0) & (batch.segment_ids > 0))
        assert not batch.loss_weight[~batch.loss_mask].any()
        for row, segment in {(r, int(s)) for r, t in np.argwhere(batch.segment_ids) for s in [batch.segment_ids[r, t]]}:
            here = batch.segment_ids[row] == segment
            mask, logp = batch.loss_mask[row][here], batch.behavior_logp[row][here]
            right[tuple(batch.token_ids[row][here].tolist())].remove((mask.tolist(), np.where(mask, logp, 0).tolist()))
            turns.append(int((np.diff(mask.astype(int), prepend=0) == 1).sum()))
    assert not any(right.values())  # each reached the learner once
    assert max(turns) == (1 if credit == "turn" else 3)  # runs of trained tokens
