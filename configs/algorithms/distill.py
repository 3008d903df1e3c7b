"""On-policy distillation on the quickstart's task.

Agarwal et al. 2023, arXiv:2306.13649; Gu et al. 2023, arXiv:2306.08543.

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart
    python -m experiments.train --config=configs/algorithms/distill.py --workdir=runs/distill

The first command makes the teacher.

2 CPU cores, 4 minutes for the teacher and 13 for the student, which shared them with other work.
One seed: eval-rollout/reward 0.24 -> 0.96 (the teacher's: 0.99), ppo_actor/update/teacher_kl 1.23
-> 0.00 nats per token.

The student samples, and the advantage of each of its tokens is log pi_teacher - log pi_student. No
reward takes part; with actor.reward_scaling=1.0 one is added.
"""

from ml_collections import ConfigDict

from rljax.configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.actor.distill.teacher = "runs/quickstart/export"
    config.actor.distill.coef = 1.0
    config.actor.reward_scaling = 0.0
    config.actor.loss_aggregation = "token-mean"
    return config
