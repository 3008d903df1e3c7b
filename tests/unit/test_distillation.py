"""On-policy distillation on the fake engine: a student that samples becomes its teacher, with a
reward or without one.
"""

import numpy as np
import pytest

from rljax import loop
from rljax.engines.fake import model
from rljax.errors import UserError
from rljax.testing.harness import STOP, VOCAB, MemorySink, make_run

PROMPTS, STEPS = 4, 40  # one batch has all prompts
KL = "ppo_actor/update/teacher_kl"
REWARD = "rollout/reward/avg"


@pytest.fixture
def teacher(tmp_path):
    """Says the last token again or stops, as likely as each other: some way from the uniform
    student.
    """
    table = np.zeros((VOCAB, VOCAB), np.float32)
    np.fill_diagonal(table, 7.0)
    table[:, STOP] = 7.0
    model.write(tmp_path / "teacher", table)
    return tmp_path / "teacher"


def run(workdir, teacher, at=None, **overrides):
    """Metrics by step of a run that learns from the teacher alone, unless told otherwise."""
    sinks = []

    class Stopping(MemorySink):
        def write(self, step, metrics):
            super().write(step, metrics)
            if step == at:
                raise KeyboardInterrupt

    def sink(first_step):
        sinks.append(Stopping(first_step))
        return sinks[-1]

    settings = {
        "actor.distill.teacher": str(teacher),
        "actor.reward_scaling": 0.0,
        "actor.optimizer.lr": 0.4,
        "actor.optimizer.weight_decay": 0.0,
        "gconfig.n_samples": 16,
        "total_train_epochs": STEPS,
        "saver.freq_steps": 5,
    }
    try:
        loop.train(make_run(workdir, settings | overrides, n_prompts=PROMPTS, sink=sink))
    except KeyboardInterrupt:
        assert at is not None
    return sinks[-1].steps


def late(steps, name):
    return np.mean([steps[step][name] for step in range(STEPS - 9, STEPS + 1)])


def test_the_student_comes_near_its_teacher_in_reverse_kl_and_in_reward(tmp_path, teacher):
    model.write(tmp_path / "same" / "model", model.read(teacher))
    want = late(run(tmp_path / "same", teacher, **{"actor.optimizer.lr": 0.0}), REWARD)
    steps = run(tmp_path / "student", teacher)
    assert steps[1][KL] > 3 and abs(late(steps, KL)) < 0.2
    assert steps[1][REWARD] < 0.15 < 0.3 < want
    assert late(steps, REWARD) == pytest.approx(want, abs=0.06)  # four standard errors of 640 samples


def test_a_teacher_that_is_the_student_teaches_nothing(tmp_path):
    model.make_model(tmp_path / "uniform", VOCAB)
    steps = run(tmp_path / "run", tmp_path / "uniform", total_train_epochs=3)
    assert [steps[step][KL] for step in (1, 2, 3)] == [0.0] * 3
    assert [steps[step]["ppo_actor/update/grad_norm"] for step in (1, 2, 3)] == [0.0] * 3


def test_a_reward_is_added_to_the_teacher(tmp_path, teacher):
    """With both, the student ends above its teacher in reward: the teacher stops too soon half the
    time.
    """
    both = run(tmp_path / "both", teacher, **{"actor.reward_scaling": 1.0, "actor.distill.coef": 0.03})
    alone = run(tmp_path / "alone", teacher)
    assert late(both, REWARD) > late(alone, REWARD) + 0.1
    assert late(both, KL) < both[1][KL] / 2


def test_a_run_with_a_teacher_resumes_as_if_never_stopped(tmp_path, teacher):
    short = {"total_train_epochs": 12}
    straight = run(tmp_path / "straight", teacher, **short)
    run(tmp_path / "stopped", teacher, at=8, **short)
    resumed = run(tmp_path / "stopped", teacher, **short)
    assert min(resumed) == 6  # the checkpoint was of step 5
    for step, metrics in resumed.items():
        compared = {name for name in metrics if not name.startswith(("timeperf/", "perf/", "rollout/wait/"))}
        assert {name: metrics[name] for name in compared} == {name: straight[step][name] for name in compared}


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path):
    model.make_model(tmp_path / "small", VOCAB - 1)
    with pytest.raises(UserError, match=rf"actor\.distill\.teacher: its vocabulary has {VOCAB - 1} tokens"):
        run(tmp_path / "run", tmp_path / "small")
