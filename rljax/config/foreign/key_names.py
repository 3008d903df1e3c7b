"""Names of keys in TRL and verl, and the key here, for the error of a key that is not there.

docs/coming-from.md says where the same key means another number.
"""

from __future__ import annotations

PAGE = "docs/coming-from.md"

TRL = {
    "num_generations": "gconfig.n_samples",
    "max_completion_length": "gconfig.max_new_tokens",
    "generation_batch_size": "train_dataset.batch_size",
    "per_device_train_batch_size": "train_dataset.batch_size",
    "num_iterations": "actor.ppo_n_minibatches",
    "steps_per_generation": "actor.ppo_n_minibatches",
    "learning_rate": "actor.optimizer.lr",
    "max_grad_norm": "actor.optimizer.gradient_clipping",
    "warmup_steps": "actor.optimizer.warmup_steps_proportion",
    "epsilon": "actor.eps_clip",
    "epsilon_high": "actor.eps_clip_higher",
    "delta": "actor.c_clip",
    "beta": "actor.kl_ctl",
    "loss_type": "actor.loss_aggregation",
    "scale_rewards": "actor.reward_norm.std_level",
    "reward_weights": "reward.weights",
    "mask_truncated_completions": "actor.mask_no_eos",
    "vllm_importance_sampling_correction": "actor.use_decoupled_loss",
    "vllm_importance_sampling_mode": "actor.behav_imp_weight_mode",
    "vllm_importance_sampling_clip_max": "actor.behav_imp_weight_cap",
    "vllm_gpu_memory_utilization": "sglang.mem_fraction_static",
    "vllm_tensor_parallel_size": "allocation_mode",
    "vllm_max_model_length": "sglang.context_length",
    "max_steps": "total_train_steps",
    "num_train_epochs": "total_train_epochs",
    "save_steps": "saver.freq_steps",
    "eval_steps": "evaluator.freq_steps",
}

VERL = {
    "rollout.n": "gconfig.n_samples",
    "data.max_response_length": "gconfig.max_new_tokens",
    "data.train_files": "train_dataset.path",
    "data.val_files": "valid_dataset.path",
    "data.max_prompt_length": "train_dataset.max_length",
    "data.train_batch_size": "train_dataset.batch_size",
    "actor.ppo_mini_batch_size": "actor.ppo_n_minibatches",
    "actor.ppo_max_token_len_per_gpu": "actor.mb_spec.max_tokens_per_row",
    "actor.optim.clip_grad": "actor.optimizer.gradient_clipping",
    "actor.optim.lr_warmup_steps_ratio": "actor.optimizer.warmup_steps_proportion",
    "actor.clip_ratio_low": "actor.eps_clip",
    "actor.clip_ratio_high": "actor.eps_clip_higher",
    "actor.clip_ratio_c": "actor.c_clip",
    "actor.loss_agg_mode": "actor.loss_aggregation",
    "actor.policy_loss.loss_mode": "actor.loss",
    "actor.entropy_coeff": "actor.entropy_coef",
    "actor.use_kl_loss": "actor.kl_ctl",
    "actor.kl_loss_coef": "actor.kl_ctl",
    "actor.kl_loss_type": "actor.kl_estimator",
    "algorithm.use_kl_in_reward": "actor.kl_ctl",
    "algorithm.kl_ctrl.kl_coef": "actor.kl_ctl",
    "algorithm.kl_penalty": "actor.kl_estimator",
    "algorithm.norm_adv_by_std_in_grpo": "actor.reward_norm.std_level",
    "algorithm.gamma": "actor.discount",
    "algorithm.lam": "actor.gae_lambda",
    "algorithm.filter_groups.enable": "rollout.should_accept_fn",
    "algorithm.rollout_correction.rollout_is": "actor.use_decoupled_loss",
    "algorithm.rollout_correction.rollout_is_threshold": "actor.behav_imp_weight_cap",
    "reward.reward_manager": "actor.overlong_reward_penalty",
    "reward.reward_kwargs.overlong_buffer_cfg.len": "actor.overlong_tokens",
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": "actor.overlong_penalty_factor",
    "critic.cliprange_value": "critic.eps_clip_value",
    "critic.optim": "critic.optimizer",
    "model.lora_rank": "actor.lora.rank",
    "model.lora_alpha": "actor.lora.alpha",
    "model.lora_adapter_path": "actor.lora.path",
    "rollout.gpu_memory_utilization": "sglang.mem_fraction_static",
    "rollout.tensor_model_parallel_size": "allocation_mode",
    "trainer.total_epochs": "total_train_epochs",
    "trainer.total_training_steps": "total_train_steps",
    "trainer.save_freq": "saver.freq_steps",
    "trainer.test_freq": "evaluator.freq_steps",
    "trainer.resume_mode": "recover.mode",
    "custom_reward_function.path": "reward.name",
    "custom_reward_function.name": "reward.name",
}

_PREFIX = "actor_rollout_ref."  # which verl's names above leave out
_SECTIONS = {_PREFIX[:-1], *(name.partition(".")[0] for name in VERL if "." in name)}


def hint(key: str, name: str, *, is_ours: bool = False) -> str:
    """Returns what a key of TRL's or verl's (or a section of verl's) is here; empty if it has none.

    Args:
      key: dotted, as it was given.
      name: the part of it that is not there.
      is_ours: other sections have a key of that name, so that verl's last words alone tell nothing.

    Example: hint("gconfig.num_generations", "num_generations")
      == "TRL's num_generations is gconfig.n_samples here: docs/coming-from.md"
    """
    if ours := VERL.get(key.removeprefix(_PREFIX)):
        return f"verl's {key} is {ours} here: {PAGE}"
    if ours := TRL.get(name):
        return f"TRL's {name} is {ours} here: {PAGE}"
    if theirs := next((one for one in VERL if not is_ours and one.rpartition(".")[2] == name), None):
        return f"verl's {theirs} is {VERL[theirs]} here: {PAGE}"
    return f"a section of verl's: {PAGE} has its keys" if name in _SECTIONS and not is_ours else ""
