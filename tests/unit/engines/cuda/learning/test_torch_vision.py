"""The PyTorch learner of an image-text model: transformers' log-probs, and a tower that stays as it was."""

import asyncio
import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="needs the extra [vision]")

from safetensors.numpy import load_file

from rljax.batching.packing import batch_of, pack
from rljax.chat.pictures import load_processor
from rljax.config.allocation import Pool
from rljax.data.count_objects import count_objects
from rljax.engine import ExportToDirectory, allocate, check
from rljax.engines.cuda.learning.learner import TorchLearner
from rljax.engines.cuda.transports.routes import routes
from rljax.errors import UserError
from rljax.hf.spec import ModelSpec
from rljax.hf.tokenizer import load_tokenizer
from rljax.rewards import Score
from rljax.rollout.trajectories import trajectory_of
from rljax.testing.learner_batches import config_of
from rljax.types import Completion, Finish, Prompt, SamplingParams
from rljax.workflows.rlvr import RLVR
from tests.image_text import make_image_text_model
from tests.unit.workflows.scripted import ScriptedSampler

VISION = Path(__file__).resolve().parents[5] / "docs" / "vision.md"
TOKEN = 100  # stands for a part of a picture
COMPLETIONS = ([5, 9, 2], [40, 2], [11, TOKEN, 30, 2], [7])  # one has sampled the token itself


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_image_text_model(tmp_path_factory.mktemp("image_text"))


@pytest.fixture(scope="module")
def trajectories(model_dir):
    processor, found = load_processor(model_dir), []
    records = count_objects("train", n=3, pixels=32)
    records.append({"messages": [{"role": "user", "content": "no picture"}]})
    for uid, (record, completion) in enumerate(zip(records, COMPLETIONS, strict=True)):
        prompt = processor.encode(Prompt(f"0/{uid}", tuple(record["messages"]), {}))
        n = len(completion)
        sampled = Completion(np.array(completion, np.int32), np.full(n, -2.0, np.float32), np.zeros(n, np.int32), Finish.STOP)
        found.append(trajectory_of(prompt.token_ids, sampled, 1.0, {}, prompt.urls))
    return found


def rows(trajectories, tokens):
    lengths = [len(t) for t in trajectories]
    packing = pack(lengths, tokens)
    ones = [np.where(t.loss_mask, 0.1, 0).astype(np.float32) for t in trajectories]
    return packing, batch_of(trajectories, packing, loss_weight=ones, advantage=ones)


def test_a_workflow_as_the_page_has_it_sends_and_keeps_the_pictures(model_dir):
    (block,) = re.findall(r"<!-- workflow -->\n```python\n(.*?)^```", VISION.read_text(), flags=re.DOTALL | re.MULTILINE)
    exec(compile(block, "docs/vision.md", "exec"), names := {})
    tokenizer, record = load_tokenizer(model_dir), count_objects("train", n=1, pixels=32)[0]
    prompt = Prompt("0/0", tuple(record["messages"]), {"answer": record["answer"]})
    workflows = names["Counting"](tokenizer, None), RLVR(tokenizer, Exact())
    samplers = [ScriptedSampler(tokenizer, str(record["answer"])) for _ in workflows]
    both = [asyncio.run(w.episode(s, prompt, SamplingParams(8), 3)) for w, s in zip(workflows, samplers, strict=True)]
    assert [t.reward for t in both] == [1.0, 0.5]
    sent, wanted = (sampler.requests[0] for sampler in samplers)
    assert (sent.pictures, sent.marked_text) == (wanted.pictures, wanted.marked_text) and len(sent.pictures) == 1
    for trajectory in both:
        assert trajectory.pictures == sent.pictures
        np.testing.assert_array_equal(trajectory.token_ids[: len(sent.prompt_ids)], wanted.prompt_ids)


class Exact:
    async def score(self, prompt, completion):
        return Score(0.5, {})


def of_transformers(model_dir, trajectories):
    """Log-probs of each trajectory alone; features stand only where the processor put their token."""
    from transformers import AutoModelForImageTextToText

    model, processor = AutoModelForImageTextToText.from_pretrained(model_dir).eval(), load_processor(model_dir)
    found = []
    for trajectory in trajectories:
        ids = torch.from_numpy(trajectory.token_ids).long()
        with torch.no_grad():
            given = model.get_input_embeddings()(ids)
            if trajectory.pictures:
                pixels = processor.arrays_of(*trajectory.pictures)["pixel_values"]
                features = torch.cat(list(model.model.get_image_features(torch.from_numpy(pixels)).pooler_output))
                prompt = torch.from_numpy(trajectory.versions < 0)
                given[(ids == TOKEN) & prompt] = features
            logp = model(inputs_embeds=given[None]).logits[0].log_softmax(-1)
        scores = np.append(0.0, logp[:-1].gather(1, ids[1:, None])[:, 0].numpy())
        found.append(np.where(trajectory.loss_mask, scores, 0))
    return found


def learner_of(model_dir, **settings):
    return TorchLearner(config_of(**{"gconfig.temperature": 1.0} | settings), Pool("fsdp"), model_dir)


def assert_all_close(got, want, tolerance=2e-5):
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerance)


def test_scores_are_those_of_transformers_however_rows_are_packed(model_dir, trajectories):
    learner = learner_of(model_dir)
    wanted = of_transformers(model_dir, trajectories)
    for tokens in (len(max(trajectories, key=len)), 400):
        packing, batch = rows(trajectories, tokens)
        assert_all_close(packing.gather(learner.score(batch)), wanted)
    shifted = trajectories[1:3] + trajectories[:1]
    others = [dataclasses.replace(t, pictures=u.pictures) for t, u in zip(trajectories[:3], shifted, strict=True)]
    packing, batch = rows(others, 400)
    assert not np.allclose(packing.gather(learner.score(batch))[0], wanted[0], atol=1e-2), "another picture, other log-probs"


def test_an_update_is_exported_whole_and_leaves_the_tower(model_dir, trajectories, tmp_path):
    learner = learner_of(model_dir, **{"actor.optimizer.lr": 1e-2})
    packing, batch = rows(trajectories, 400)
    before = learner.score(batch)
    learner.update(batch.replace(proximal_logp=before))
    after = packing.gather(learner.score(batch))
    assert not np.allclose(after[0], packing.gather(before)[0], atol=1e-3)
    learner.export(ExportToDirectory(tmp_path / "export"))
    assert_all_close(of_transformers(tmp_path / "export", trajectories), after)
    old, new = (load_file(directory / "model.safetensors") for directory in (model_dir, tmp_path / "export"))
    assert old.keys() == new.keys()
    for name in old:
        of_pictures = name.startswith(("vision_tower", "multi_modal_projector"))
        assert np.array_equal(old[name], new[name]) == of_pictures, name
    assert load_processor(tmp_path / "export")
    learner.close()


def test_pictures_that_do_not_fit_the_tokens_are_refused(model_dir, trajectories):
    learner = learner_of(model_dir)
    _, batch = rows([dataclasses.replace(t, pictures=t.pictures * 2) for t in trajectories], 400)
    with pytest.raises(UserError, match="pictures: 48 tokens stand for 96 features of 6 pictures"):
        learner.score(batch)


def test_a_text_model_refuses_a_batch_with_pictures(trajectories, tmp_path):
    from rljax.testing.models import make_model

    _, batch = rows(trajectories, 400)
    with pytest.raises(UserError, match="the learner's model takes text alone"):
        learner_of(make_model(tmp_path)).score(batch)


@pytest.mark.parametrize(
    ("mode", "settings", "error"),
    [
        ("jax:d1", {}, "the JAX path takes text"),
        ("sglang:d1+jax:d1", {"sglang.enable_multimodal": True}, "the JAX path takes text"),
        ("fsdp:t2", {}, "over d and f only, not t"),
        ("fsdp:c2", {}, "over d and f only, not c"),
    ],
)
def test_engines_that_read_no_pictures_are_refused_by_name(model_dir, monkeypatch, mode, settings, error):
    from rljax.engines.cuda import plugin

    monkeypatch.setattr(plugin, "installed_release", lambda python: plugin.OLDEST)
    config = config_of(**{"allocation_mode": mode, "actor.init_from_scratch": False, "actor.path": str(model_dir)} | settings)
    with pytest.raises(UserError, match=error):
        check(config, allocate(config))


def test_servers_need_their_flag_and_get_whole_directories(model_dir, monkeypatch):
    from rljax.engines.cuda import plugin

    monkeypatch.setattr(plugin, "installed_release", lambda python: plugin.OLDEST)
    given = {"allocation_mode": "sglang:d1+fsdp:d1", "actor.init_from_scratch": False, "actor.path": str(model_dir)}
    with pytest.raises(UserError, match=r"sglang\.enable_multimodal: .* image-text model"):
        check(config_of(**given), allocate(config_of(**given)))
    config = config_of(**given, **{"sglang.enable_multimodal": True})
    check(config, allocate(config))
    assert routes(config, allocate(config)) == ("directory",)


def test_the_spec_is_that_of_the_text_model(model_dir):
    spec = ModelSpec.from_directory(model_dir)
    text = json.loads((model_dir / "config.json").read_text())["text_config"]
    assert (spec.architecture, spec.vocab_size, spec.num_layers) == ("llama", text["vocab_size"], text["num_hidden_layers"])
