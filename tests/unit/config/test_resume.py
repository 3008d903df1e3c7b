"""Changes of a config between the runs of one workdir."""

import pytest

from rljax.config import io as config_io
from rljax.config import resume
from rljax.errors import UserError
from rljax.sinks.run_directory import RunDirectory
from rljax.testing.harness import make_config

REFUSED = {
    "seed": 7,
    "rollout.consumer_batch_size": 16,
    "train_dataset.batch_size": 16,
    "warmup.steps": 3,
    "warmup.batch_size": 3,
    "actor.init_from_scratch": True,
    "actor.init.hidden_size": 8,
    "actor.lora.rank": 4,
    "actor.lora.target_modules": ("q_proj",),
    "actor.loss": "sft",
    "actor.adv_estimator": "gae",
    "evaluator.best": "eval-rollout/reward/max",
}
ALLOWED = {
    "actor.optimizer.lr": 1e-9,
    "actor.loss": "cispo",
    "actor.adv_estimator": "rloo",
    "rollout.max_head_offpolicyness": 5,
    "rollout.workers": 3,
    "gconfig.n_samples": 9,
    "total_train_epochs": 9,
    "total_train_steps": 9,
    "saver.freq_steps": 7,
    "evaluator.best": "eval-rollout/reward",
    "allocation_mode": "jax:d1",
}


@pytest.fixture
def begun(tmp_path):
    """A run with a checkpoint."""
    with _opened(tmp_path) as run:
        run.begin(make_config())
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    return tmp_path


class _opened:
    def __init__(self, path):
        self.run = RunDirectory(path)

    def __enter__(self):
        return self.run

    def __exit__(self, *_):
        self.run.close()


@pytest.mark.parametrize("key", REFUSED)
def test_what_was_done_may_not_change(begun, key):
    before = (begun / "config.json").read_text()
    with _opened(begun) as run, pytest.raises(UserError) as info:
        run.begin(make_config({key: REFUSED[key]}))
    line = str(info.value)
    resolved = "rollout.consumer_batch_size" if key == "train_dataset.batch_size" else key
    assert line.startswith(f"{resolved}: ") and f"in the run that {begun} holds, now " in line and "another --workdir" in line
    assert (begun / "config.json").read_text() == before


@pytest.mark.parametrize("key", ALLOWED)
def test_how_to_go_on_may_change_and_is_told(begun, key, caplog):
    with _opened(begun) as run:
        run.begin(make_config({key: ALLOWED[key]}))
        assert config_io.from_json((begun / "config.json").read_text()) == make_config()  # no step was made yet
        run.configs.made(4)
    assert "the run goes on with another config: " in caplog.text and f"{key} " in caplog.text
    assert config_io.from_json((begun / "config.json").read_text()) == make_config({key: ALLOWED[key]})


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(("was", "now"), [(0.0, 0.1), (0.1, 0.0), (0.1, 0.2)])
def test_a_reference_that_a_warm_up_left_can_not_be_had_later(tmp_path, steps, was, now):
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    with _opened(tmp_path) as run:
        run.begin(make_config({"warmup.steps": steps, "actor.kl_ctl": was}))
    if steps and 0 in (was, now):
        with (
            _opened(tmp_path) as run,
            pytest.raises(UserError, match=rf"^actor\.kl_ctl: {was} in the run .* now {now}: .* warm-up"),
        ):
            run.begin(make_config({"warmup.steps": steps, "actor.kl_ctl": now}))
    else:
        with _opened(tmp_path) as run:
            run.begin(make_config({"warmup.steps": steps, "actor.kl_ctl": now}))


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_a_damaged_config_of_the_run_before_is_told(begun, caplog, content):
    (begun / "config.json").write_text(content)
    with _opened(begun) as run:
        run.begin(make_config({"seed": 7}))
    assert "config.json can't be read, so that nothing tells whether keys changed" in caplog.text


def test_the_same_config_and_one_without_checkpoints_say_nothing(begun, caplog):
    with _opened(begun) as run:
        run.begin(make_config())
    (begun / "checkpoints" / "3").rename(begun / "checkpoints" / "3-failed")
    (begun / "checkpoints" / "3-failed").rmdir()
    with _opened(begun) as run:
        run.begin(make_config({"seed": 7}))
    assert not caplog.text


def test_a_config_of_another_release_is_compared_by_the_keys_that_both_have(begun):
    text = (begun / "config.json").read_text().replace('"seed": 1', '"sed": 1').replace('"hang_timeout"', '"hang_time"')
    (begun / "config.json").write_text(text)
    with _opened(begun) as run:
        run.begin(make_config({"seed": 7}))


def test_every_fixed_key_exists():
    leaves = config_io.leaves()
    for key in (*resume.FIXED, *resume.KINDS):
        assert key in leaves or (key.endswith(".") and any(leaf.startswith(key) for leaf in leaves)), key
