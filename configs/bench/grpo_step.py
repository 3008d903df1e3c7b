"""One synchronous GRPO step as `experiments/bench/grpo_step.py` times it.

    python -m experiments.bench.grpo_step

8 prompts, 8 samples each, 32 new tokens, float32.
"""

from ml_collections import ConfigDict

from rljax.configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.allocation_mode = "jax:d1"
    config.total_train_epochs = 1000
    config.total_train_steps = 20

    config.actor.dtype = "float32"
    config.jax.sampler_dtype = "float32"
    config.jax.cache_dtype = "float32"
    config.actor.gradient_checkpointing = "none"

    config.train_dataset.type = "prompt_answer"
    config.train_dataset.batch_size = 8
    config.reward.name = "rljax.experiments.bench.grpo_step_task:distinct_words"
    config.gconfig.n_samples = 8
    config.gconfig.max_new_tokens = 32

    config.rollout.max_head_offpolicyness = 0
    config.actor.use_decoupled_loss = False
    config.actor.recompute_logprob = False
    config.actor.optimizer.lr = 1e-4
    config.actor.mb_spec.max_tokens_per_row = 40  # a prompt and its completion
    config.actor.mb_spec.rows_per_mb = 16  # so that the activations fit the CPU cache
    config.actor.logprob_chunk = 256  # so that its logits fit the CPU cache
    config.jax.slots = 64
    config.jax.context_length = 40
    config.jax.prefill_chunk = 64
    config.jax.decode_steps = 8

    config.saver.freq_steps = None
    config.saver.export_final = False
    config.stats_logger.samples_per_step = 0
    return config
