"""The library of broken runs: its recipes are sound, its plants change what they say and no more,
and what is kept of a run is what was there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time

import numpy as np
import pytest

from rljax import loop
from rljax.batching import packing
from rljax.config import checks as config_checks
from rljax.config import io as config_io
from rljax.diagnosis import History
from rljax.errors import UserError
from rljax.experiments.bench.run_library import commands, kept, plants, pool, recipes
from rljax.experiments.bench.run_library.environments import Sums
from rljax.experiments.bench.run_library.kept import KeptRun
from rljax.experiments.bench.run_library.recipe import MODELS
from rljax.rollout.trajectories import supervised
from rljax.testing import harness

RECIPES = list(recipes.RECIPES.values())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_session_of_a_recipe_is_a_sound_config_and_differs_from_the_others(recipe, tmp_path):
    configs = []
    for command in commands.sessions(recipe, 1, tmp_path / "run", tmp_path / "models"):
        pairs = [word.removeprefix("--config.").split("=", 1) for word in command if word.startswith("--config.")]
        config = config_io.load(recipe.config, [(key, value) for key, value in pairs])
        config_checks.check(config)
        configs.append(config)
    assert len({config_io.to_json(config) for config in configs}) == (1 if recipe.then is None else 2)
    assert bool(recipe.settings or recipe.plant) or recipe.name == "grpo"
    assert recipe.plant is None or (recipe.plant in plants.PLANTS and f"--recipe={recipe.name}" in command)


def test_the_library_is_as_large_as_it_says():
    assert len(recipes.FAULTS) >= 24 and len(recipes.HEALTHY) >= 22
    assert len(recipes.RECIPES) == len(recipes.FAULTS) + len(recipes.HEALTHY)  # names are unique
    assert {recipe.plant for recipe in RECIPES if recipe.plant} == set(plants.PLANTS)


def test_every_model_that_a_run_starts_from_is_made_by_a_sound_warm_up(tmp_path):
    needed = {name for recipe in RECIPES for name in recipe.models}
    assert needed == set(MODELS)
    for name in needed:
        command = commands.warm_up(tmp_path, name)
        pairs = [word.removeprefix("--config.").split("=", 1) for word in command if word.startswith("--config.")]
        config_checks.check(config_io.load(MODELS[name].config, [(key, value) for key, value in pairs]))


def test_the_environment_of_sums_pays_for_each():
    game = Sums(rounds=3)
    question, paid = game.reset(7), []
    assert question == Sums(rounds=3).reset(7)
    for turn in range(3):
        answer = sum(map(int, question.removesuffix("=").split("+"))) + (turn == 1)
        question, reward, over, cut, _ = game.step(f"{answer}\n")
        paid.append(reward)
        assert over is (turn == 2) and not cut
    assert paid == [1.0, 0.0, 1.0]


def test_a_name_that_is_no_run_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"lr_zer0: no such run .*lr_zero"):
        recipes.find("lr_zer0")


# Plants ------------------------------------------------------------------------------------------------------------------


def _batch():
    trajectories = [supervised(range(1, 2 + n), range(3 + n)) for n in range(7)]
    values = [np.full(len(t), 10.0 + i, np.float32) for i, t in enumerate(trajectories)]
    return packing.batch_of(trajectories, packing.pack([len(t) for t in trajectories], 24), advantage=values)


def _by_trajectory(batch, values):
    """Yields the values of each trajectory's trained tokens."""
    for row, segments in enumerate(batch.segment_ids):
        for segment in range(1, segments.max() + 1):
            yield values[row, (segments == segment) & batch.loss_mask[row]]


def test_values_of_others_are_the_same_values_at_other_trajectories():
    batch = _batch()
    before = [set(values.tolist()) for values in _by_trajectory(batch, batch.advantage)]
    after = [set(values.tolist()) for values in _by_trajectory(batch, plants.of_others(batch, batch.advantage))]
    assert all(len(values) == 1 for values in after)  # one a trajectory, as they were
    assert sorted(map(min, before)) == sorted(map(min, after))
    assert all(one != other for one, other in zip(before, after, strict=True))
    assert not plants.of_others(batch, batch.advantage)[~batch.loss_mask].any()


class Recorder:
    """Sampler that records what it is asked to load."""

    def __init__(self):
        self.loaded = []

    async def load_weights(self, source, version):
        self.loaded.append((source, version))


def test_a_sampler_that_skips_publishes_reports_every_version_with_older_weights():
    for every, sources in ((None, "aaaaa"), (3, "aaccc")):
        recorder = Recorder()
        sampler = plants.SkippedPublishes(recorder, every)
        for version, source in enumerate("abcde", 1):
            asyncio.run(sampler.load_weights(source, version))
        assert recorder.loaded == list(zip(sources, range(1, 6), strict=True))


@pytest.mark.parametrize("plant", ["reversed_loss", "repeated_updates", "leaking_learner", "gradient_spikes"])
def test_a_plant_in_the_learner_changes_what_is_learned_or_nothing(plant, tmp_path):
    """The bug shows in the weights (a leak does not), and the run goes on to its end."""
    overrides = {"total_train_steps": 16, "total_train_epochs": 99}
    runs = [harness.make_run(tmp_path / name, overrides) for name in ("sound", "planted")]
    outcomes = [loop.train(runs[0]), loop.train(plants.PLANTS[plant](runs[1]))]
    assert [outcome.step for outcome in outcomes] == [16, 16]
    steps = [run.engine.learner._adam["policy"].steps for run in runs]
    assert steps[1] == steps[0] * (plants.Repeated.TIMES if plant == "repeated_updates" else 1)
    sound, planted = (run.engine.learner._table for run in runs)
    assert np.array_equal(sound, planted) is (plant == "leaking_learner")


def test_trained_prompts_are_prompts_that_are_trained_on(tmp_path):
    run = plants.trained_prompts(harness.make_run(tmp_path))
    prompt = next(run.prompts)
    done = asyncio.run(run.workflow.episode(run.engine.sampler, prompt, run.params, 1))
    assert done.loss_mask.tolist() == [False] + [True] * (len(done) - 1)
    assert (done.versions[1:] == 0).all() and done.versions[0] == -1
    assert done.behavior_logp[1:3].tolist() == [0.0, 0.0]


# Keeping -----------------------------------------------------------------------------------------------------------------


def _run_directory(path):
    path.mkdir()
    random = np.random.default_rng(0)
    rows = [{"step": step, "rollout/reward/avg": random.random(), "ppo_actor/update/loss": None} for step in range(1, 6)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "status.json").write_text(json.dumps({"state": "failed", "error": f"no {path}/checkpoints"}))
    return rows


def test_a_kept_run_reads_as_the_run_did(tmp_path):
    rows = _run_directory(tmp_path / "run")
    path = tmp_path / "half.jsonl.xz"
    run = KeptRun.of("grpo", 1, 12.34, tmp_path / "run", [tmp_path])
    kept.append(path, run)
    kept.append(path, dataclasses.replace(run, seed=2))
    kept.write(path, list(kept.read(path)))
    first, second = kept.read(path)
    assert (first, second.seed) == (run, 2)
    first.write(tmp_path / "again")
    history = History.load(tmp_path / "again")
    np.testing.assert_allclose(history["rollout/reward"].values, [row["rollout/reward/avg"] for row in rows], rtol=1e-4)
    assert history.not_finite["ppo_actor/update/loss"].tolist() == [1, 2, 3, 4, 5]
    assert history.status["error"] == "no run/checkpoints"  # nothing of where it was made


# The pool ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scripted(monkeypatch):
    """Commands of a line of Python instead of training, by the recipe's name."""
    writes = (
        "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.mkdir(); (p / 'metrics.jsonl').write_text('{\"step\": 1}\\n')"
    )
    scripts = {
        "grpo": writes,
        "one_seed": writes,
        "lr_zero": f"{writes}; print('a guard spoke'); sys.exit(1)",  # a fault that ends the run
        "all_one": "import sys; sys.exit('a bug')",
        "all_zero": "import time; time.sleep(60)",
    }

    def sessions(recipe, seed, workdir, models):
        return [[sys.executable, "-c", scripts[recipe.name], str(workdir)]]

    def warm_up(models, size):
        return [sys.executable, "-c", f"import pathlib; pathlib.Path({str(models)!r}, '{size}', 'export').mkdir(parents=True)"]

    monkeypatch.setattr(pool, "sessions", sessions)
    monkeypatch.setattr(pool, "warm_up", warm_up)


def test_the_pool_keeps_what_ends_and_reports_what_does_not(scripted, tmp_path):
    runs = [("grpo", 1), ("lr_zero", 1), ("all_one", 1), ("grpo", 2), ("all_zero", 1), ("all_zero", 2), ("one_seed", 1)]
    jobs = [pool.Job(recipes.find(name), seed) for name, seed in runs]
    began = time.monotonic()
    asyncio.run(pool.Pool(tmp_path / "out", tmp_path / "scratch", jobs=2, minutes=0.1).make(jobs))
    assert time.monotonic() - began < 50  # the one that never ends was ended
    tuning, judging = (list(kept.read(tmp_path / "out" / f"{half}.jsonl.xz")) for half in ("tuning", "judging"))
    assert [run.recipe for run in tuning] == ["grpo", "lr_zero"] and [run.recipe for run in judging] == ["grpo"]
    lines = (tmp_path / "out" / "runs.log").read_text().splitlines()
    reported = {
        "lr_zero-1": "a guard spoke",
        "all_one-1": "nothing to keep",
        "all_zero-2": "the time is over",
        "one_seed-1": "not started",
    }
    for name, words in reported.items():
        assert any(line.startswith(name) and words in line for line in lines), lines
