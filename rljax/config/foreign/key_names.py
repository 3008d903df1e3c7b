"""Names of keys in TRL, verl and OpenRLHF, and ours for each, for the error of an unknown key.

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
    "model_name_or_path": "actor.path",
    "dataset_name": "train_dataset.path",
    "max_prompt_length": "train_dataset.max_length",
    "shuffle_dataset": "train_dataset.shuffle",
    "warmup_ratio": "actor.optimizer.warmup_steps_proportion",
    "optim": "actor.optimizer.type",
    "adam_beta1": "actor.optimizer.beta1",
    "adam_beta2": "actor.optimizer.beta2",
    "adam_epsilon": "actor.optimizer.eps",
    "bf16": "actor.dtype",
    "torch_dtype": "actor.dtype",
    "lora_r": "actor.lora.rank",
    "lora_alpha": "actor.lora.alpha",
    "lora_target_modules": "actor.lora.target_modules",
    "use_vllm": "allocation_mode",
    "vllm_mode": "allocation_mode",
    "logging_steps": "stats_logger.line_every",
    "report_to": "stats_logger.wandb",
    "save_total_limit": "saver.keep_last",
    "num_generations_eval": "evaluator.n_samples",
    "per_device_eval_batch_size": "valid_dataset.batch_size",
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
    "model.path": "actor.path",
    "model.target_modules": "actor.lora.target_modules",
    "model.enable_gradient_checkpointing": "actor.gradient_checkpointing",
    "data.shuffle": "train_dataset.shuffle",
    "data.seed": "seed",
    "rollout.temperature": "gconfig.temperature",
    "rollout.top_p": "gconfig.top_p",
    "rollout.top_k": "gconfig.top_k",
    "rollout.max_model_len": "sglang.context_length",
    "rollout.val_kwargs.n": "evaluator.n_samples",
    "rollout.val_kwargs.temperature": "evaluator.temperature",
    "rollout.val_kwargs.do_sample": "evaluator.greedy",
    "actor.ppo_micro_batch_size_per_gpu": "actor.mb_spec.rows_per_mb",
    "actor.clip_ratio": "actor.eps_clip",
    "actor.grad_clip": "actor.optimizer.gradient_clipping",
    "actor.optim.lr": "actor.optimizer.lr",
    "actor.optim.lr_warmup_steps": "actor.optimizer.warmup_steps_proportion",
    "actor.optim.weight_decay": "actor.optimizer.weight_decay",
    "actor.optim.lr_scheduler_type": "actor.optimizer.lr_scheduler_type",
    "actor.optim.min_lr_ratio": "actor.optimizer.min_lr_ratio",
    "algorithm.adv_estimator": "actor.adv_estimator",
    "reward_model.reward_manager": "actor.overlong_reward_penalty",
    "reward_model.overlong_buffer.enable": "actor.overlong_reward_penalty",
    "reward_model.overlong_buffer.len": "actor.overlong_tokens",
    "reward_model.overlong_buffer.penalty_factor": "actor.overlong_penalty_factor",
    "trainer.n_gpus_per_node": "allocation_mode",
    "trainer.nnodes": "allocation_mode",
    "trainer.project_name": "stats_logger.wandb_project",
    "trainer.max_actor_ckpt_to_keep": "saver.keep_last",
}

OPENRLHF = {  # flags of train_ppo_ray
    "pretrain": "actor.path",
    "prompt_data": "train_dataset.path",
    "prompt_split": "train_dataset.split",
    "input_key": "train_dataset.type",
    "label_key": "train_dataset.type",
    "prompt_max_len": "train_dataset.max_length",
    "rollout_batch_size": "train_dataset.batch_size",
    "train_batch_size": "actor.ppo_n_minibatches",
    "micro_train_batch_size": "actor.mb_spec.rows_per_mb",
    "n_samples_per_prompt": "gconfig.n_samples",
    "generate_max_len": "gconfig.max_new_tokens",
    "num_episodes": "total_train_epochs",
    "actor_learning_rate": "actor.optimizer.lr",
    "critic_learning_rate": "critic.optimizer.lr",
    "lr_warmup_ratio": "actor.optimizer.warmup_steps_proportion",
    "lr_scheduler": "actor.optimizer.lr_scheduler_type",
    "l2": "actor.optimizer.weight_decay",
    "max_norm": "actor.optimizer.gradient_clipping",
    "adam_betas": "actor.optimizer.beta2",
    "eps_clip_low_high": "actor.eps_clip_higher",
    "dual_clip": "actor.c_clip",
    "value_clip": "critic.eps_clip_value",
    "policy_loss_type": "actor.importance_sampling_level",
    "entropy_loss_coef": "actor.entropy_coef",
    "advantage_estimator": "actor.adv_estimator",
    "lambd": "actor.gae_lambda",
    "gamma": "actor.discount",
    "no_advantage_std_norm": "actor.adv_norm.std_level",
    "init_kl_coef": "actor.kl_ctl",
    "use_kl_loss": "actor.kl_placement",
    "remote_rm_url": "reward.name",
    "reward_clip_range": "actor.reward_clip",
    "overlong_buffer_len": "actor.overlong_tokens",
    "dynamic_filtering": "rollout.should_accept_fn",
    "agent_func_path": "rollout.workflow",
    "async_train": "rollout.max_head_offpolicyness",
    "enable_vllm_is_correction": "actor.use_decoupled_loss",
    "vllm_is_truncated_threshold": "actor.behav_imp_weight_cap",
    "is_correction_level": "actor.use_decoupled_loss",
    "is_correction_mode": "actor.behav_imp_weight_mode",
    "is_correction_threshold": "actor.behav_imp_weight_cap",
    "loss_agg_mode": "actor.loss_aggregation",
    "lora_rank": "actor.lora.rank",
    "lora_alpha": "actor.lora.alpha",
    "actor_num_nodes": "allocation_mode",
    "actor_num_gpus_per_node": "allocation_mode",
    "vllm_num_engines": "allocation_mode",
    "colocate_all_models": "allocation_mode",
    "eval_dataset": "valid_dataset.path",
    "eval_temperature": "evaluator.temperature",
    "eval_n_samples_per_prompt": "evaluator.n_samples",
    "max_ckpt_num": "saver.keep_last",
    "use_wandb": "stats_logger.wandb",
}

_WORKDIR = "the flag --workdir says where a run is written"
_ONE_PASS = "a batch is passed over once here"
NO_COUNTERPART = {  # a name of theirs, and what there is instead
    "min_p": "training samples from the whole softmax",
    "repetition_penalty": "training samples from the softmax as it is",
    "gradient_accumulation_steps": "an optimizer step takes a whole minibatch, in parts that actor.mb_spec says",
    "output_dir": _WORKDIR,
    "trainer.default_local_dir": _WORKDIR,
    "save_path": _WORKDIR,
    "ckpt_path": _WORKDIR,
    "actor.ppo_epochs": _ONE_PASS,
    "critic.ppo_epochs": _ONE_PASS,
    "max_epochs": _ONE_PASS,
    "reward_model.enable": "a model that scores is called by a function of yours, in reward.name",
    "normalize_reward": "rewards are normalized by actor.reward_norm, not by statistics of a reward model",
    "kl_target": "the coefficient actor.kl_ctl does not move",
    "kl_unbiased_gradient": "the gradient of a KL in the loss always is that of reverse KL",
    "is_correction_gating": "the decoupled weight is bounded by actor.behav_imp_weight_cap, and by no divergence",
    "freezing_actor_steps": "the actor learns from the first step on",
    "packing_samples": "rows are always packed",
    "apply_chat_template": "the chat template is always applied",
    "zero_stage": "the fsdp learner shards weights, gradients and moments",
}
_MORE = {  # what one key can't say
    "actor.policy_loss.loss_mode": ", gspo actor.importance_sampling_level=sequence",
    "policy_loss_type": " for gspo",
    "warmup_steps": " as a share of all steps",
    "lr_warmup_steps": " as a share of all steps",
}

_PREFIX = "actor_rollout_ref."  # which verl's names above leave out
_SECTIONS = {
    **dict.fromkeys(("algo", "ckpt", "ds", "eval", "logger", "train"), "OpenRLHF"),  # not vllm: an engine may be that
    **dict.fromkeys((_PREFIX[:-1], *(name.partition(".")[0] for name in VERL if "." in name)), "verl"),
}


def knows(key: str, name: str) -> bool:
    """Returns whether a key is another system's beyond doubt, however near one of ours is.

    A name of one short word, as TRL's beta, is so only without a section.

    Example: knows("actor.grad_clip", "grad_clip") is True, which has nothing to do with reward_clip
    """
    verls = key.removeprefix(_PREFIX)
    is_flag = (name in TRL or name in OPENRLHF) and (key == name or "_" in name)
    return is_flag or name in NO_COUNTERPART or verls in NO_COUNTERPART or ("." in verls and verls in VERL)


def hint(key: str, name: str, *, is_ours: bool = False) -> str:
    """Returns what a key of another system (or a section of one) is here; empty if it has none.

    Args:
      key: dotted, as it was given.
      name: the part of it that is not there.
      is_ours: other sections have a key of that name, so that verl's last words alone tell nothing.

    Example: hint("gconfig.num_generations", "num_generations")
      == "TRL's num_generations is gconfig.n_samples here: docs/coming-from.md"
    """
    verls = key.removeprefix(_PREFIX)
    last_words = (one for one in VERL if not is_ours and one.rpartition(".")[2] == name)
    candidates = ("verl", VERL, verls), ("TRL", TRL, name), ("OpenRLHF", OPENRLHF, name), ("verl", VERL, next(last_words, ""))
    for theirs in (verls, name):
        if reason := NO_COUNTERPART.get(theirs):
            return f"{theirs} has no counterpart: {reason}; {PAGE}"
    for system, table, theirs in candidates:
        if ours := table.get(theirs):
            said = key if theirs == verls else theirs
            return f"{system}'s {said} is {ours}{_MORE.get(theirs, '')} here: {PAGE}"
    return f"a section of {_SECTIONS[name]}'s: {PAGE} has its keys" if name in _SECTIONS and not is_ours else ""
