"""Table of the keys of AReaL's configs and what each becomes, for `areal.py`.

Its schema is `areal/api/cli_args.py` in that repository, from v0.3 (August 2025) to v1 (2026);
older spellings are included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OURS = object()  # marks the default of configs/base.py

# Copied as they are: their key -> our key, and the value if their file lacks it. With OURS a null counts as missing; with a
# tuple a single value is a list of one.
SAME: Mapping[str, tuple[str, Any]] = {
    "seed": ("seed", 1),
    "total_train_epochs": ("total_train_epochs", 1),
    "total_train_steps": ("total_train_steps", None),
    "gconfig.n_samples": ("gconfig.n_samples", 1),
    "gconfig.max_new_tokens": ("gconfig.max_new_tokens", 16384),
    "gconfig.min_new_tokens": ("gconfig.min_new_tokens", 0),
    "gconfig.temperature": ("gconfig.temperature", 1.0),
    "gconfig.top_p": ("gconfig.top_p", 1.0),
    "gconfig.greedy": ("gconfig.greedy", False),
    "gconfig.stop": ("gconfig.stop", ()),
    "gconfig.stop_token_ids": ("gconfig.stop_token_ids", ()),
    "rollout.max_concurrent_rollouts": ("rollout.max_concurrent_rollouts", None),
    "rollout.consumer_batch_size": ("rollout.consumer_batch_size", None),
    "rollout.max_head_offpolicyness": ("rollout.max_head_offpolicyness", 0),
    "rollout.enable_rollout_tracing": ("rollout.enable_rollout_tracing", False),
    "rollout.request_retries": ("rollout.request_retries", 3),
    "actor.path": ("actor.path", OURS),
    "actor.dtype": ("actor.dtype", "bfloat16"),
    "actor.mb_spec.max_tokens_per_mb": ("actor.mb_spec.max_tokens_per_row", OURS),
    "actor.ppo_n_minibatches": ("actor.ppo_n_minibatches", 4),
    "actor.eps_clip": ("actor.eps_clip", 0.2),
    "actor.eps_clip_higher": ("actor.eps_clip_higher", None),
    "actor.c_clip": ("actor.c_clip", None),
    "actor.reward_scaling": ("actor.reward_scaling", 1.0),
    "actor.reward_bias": ("actor.reward_bias", 0.0),
    "actor.reward_clip": ("actor.reward_clip", 20.0),
    "actor.overlong_reward_penalty": ("actor.overlong_reward_penalty", False),
    "actor.kl_ctl": ("actor.kl_ctl", 0.1),
    "actor.kl_estimator": ("actor.kl_estimator", "k1"),
    "critic.ppo_n_minibatches": ("critic.ppo_n_minibatches", 4),
    "critic.eps_clip": ("critic.eps_clip_value", 0.5),
    "train_dataset.path": ("train_dataset.path", OURS),
    "train_dataset.split": ("train_dataset.split", "train"),
    "train_dataset.batch_size": ("train_dataset.batch_size", 1),
    "train_dataset.shuffle": ("train_dataset.shuffle", True),
    "train_dataset.max_length": ("train_dataset.max_length", None),
    "valid_dataset.path": ("valid_dataset.path", OURS),
    "valid_dataset.split": ("valid_dataset.split", "test"),
    "valid_dataset.batch_size": ("valid_dataset.batch_size", 1),
    "valid_dataset.shuffle": ("valid_dataset.shuffle", False),
    "valid_dataset.max_length": ("valid_dataset.max_length", None),
    "saver.freq_epochs": ("saver.freq_epochs", None),
    "saver.freq_steps": ("saver.freq_steps", None),
    "evaluator.freq_epochs": ("evaluator.freq_epochs", None),
    "evaluator.freq_steps": ("evaluator.freq_steps", None),
    "sglang.dtype": ("sglang.dtype", "bfloat16"),
    "sglang.attention_backend": ("sglang.attention_backend", OURS),
    "sglang.context_length": ("sglang.context_length", None),
    "sglang.mem_fraction_static": ("sglang.mem_fraction_static", None),
    "sglang.max_running_requests": ("sglang.max_running_requests", None),
    "sglang.disable_overlap_schedule": ("sglang.disable_overlap_schedule", False),
    **{
        f"{part}.optimizer.{key}": (f"{part}.optimizer.{key}", default)
        for part in ("actor", "critic")
        for key, default in (
            ("lr", 1e-3),
            ("weight_decay", 0.01),
            ("beta1", 0.9),
            ("beta2", 0.999),
            ("eps", 1e-8),
            ("min_lr_ratio", 0.0),
            ("lr_scheduler_type", "constant"),
            ("warmup_steps_proportion", 0.001),
            ("gradient_clipping", 1.0),
        )
    },
}

# Converted by functions of areal.py, several keys together.
READ = (
    "experiment_name",
    "trial_name",
    "cluster.fileroot",
    "allocation_mode",
    "async_training",
    "gconfig.top_k",
    "gconfig.max_tokens",
    "eval_gconfig.max_new_tokens",
    "eval_gconfig.stop",
    "eval_gconfig.stop_token_ids",
    "eval_gconfig.n_samples",
    "eval_gconfig.temperature",
    "eval_gconfig.greedy",
    "eval_gconfig.top_p",
    "eval_gconfig.top_k",
    "rollout.backend",
    "rollout.scheduling_strategy.type",
    "rollout.scheduling_strategy.target",
    "actor.backend",
    "actor.scheduling_strategy.type",
    "actor.scheduling_strategy.target",
    "actor.gradient_checkpointing",
    "actor.optimizer.type",
    "critic.optimizer.type",
    "actor.use_lora",
    "actor.lora_rank",
    "actor.lora_alpha",
    "actor.target_modules",
    "actor.overlong_tokens",
    "actor.overlong_penalty_factor",
    "actor.mask_no_eos_with_zero",
    "actor.discount",
    "actor.gae_lambda",
    "actor.use_decoupled_loss",
    "actor.importance_sampling_level",
    "actor.rejection_sampling",
    "actor.recompute_logprob",
    "actor.recompute_logprobs",
    "actor.prox_logp_method",
    "actor.behav_imp_weight_cap",
    "actor.behave_imp_weight_cap",
    "actor.behave_imp_weight_mode",
    *(f"actor.rejection_sampling.{key}" for key in ("level", "action", "metric", "agg", "upper", "lower")),
    *(f"actor.{norm}.{key}" for norm in ("reward_norm", "adv_norm") for key in ("mean_level", "std_level", "eps")),
    *(f"actor.{norm}.{key}" for norm in ("reward_norm", "adv_norm") for key in ("mean_leave1out", "std_unbiased")),
    "actor.group_reward_norm",
    "actor.group_adv_norm",
    "actor.dynamic_sampling",
    "actor.megatron.use_deterministic_algorithms",
    "actor.archon.use_deterministic_algorithms",
    "train_dataset.type",
    "valid_dataset.type",
    "recover.mode",
    "stats_logger.wandb.mode",
    "stats_logger.wandb.project",
    "stats_logger.tensorboard.path",
)

# Keys that would change the arithmetic in a way rljax does not implement: only these values are accepted.
ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "gconfig.frequency_penalty": ((0, 0.0), "the learner scores the softmax without penalties"),
    "gconfig.ignore_eos": ((False,), "a completion ends at EOS"),
    "eval_gconfig.frequency_penalty": ((0, 0.0), "an evaluation samples as training does"),
    "eval_gconfig.ignore_eos": ((False,), "a completion ends at EOS"),
    "gconfig.use_beam_search": ((False,), "a policy samples"),
    "actor.init_from_scratch": (
        (False,),
        "actor.init of ours makes a model on the spot; a directory's shape cannot be borrowed",
    ),
    "actor.is_critic": ((False,), "the actor is a language model"),
    "actor.m2_threshold": ((None,), "M2PO is not implemented"),
    "actor.use_sapo_loss": ((False,), "SAPO is not implemented"),
    "actor.enable_icepop": ((False,), "IcePop is not implemented"),
    "actor.enable_tree_training": ((False,), "tree training is not implemented"),
    "actor.peft_type": (("lora",), "LoRA is what there is"),
    "actor.optimizer_dtype": (("float32", "fp32"), "master weights and moments are float32"),
    "dynamic_bs": ((False,), "an update has rollout.consumer_batch_size prompts"),
    "teacher": ((None,), "set actor.distill.teacher to its directory, and actor.distill.coef"),
    "total_train_n_seqs": ((None,), "set total_train_steps"),
}

# Keys of `sglang` that rljax sets from other keys or for publishing, or that are no flags of its server.
SGLANG_OURS = (
    "model_path",
    "random_seed",
    "skip_tokenizer_init",
    "enable_nccl_nvls",
    "enable_dp_attention",
    "enable_ep_moe",
    "enable_nan_detection",
    "enable_memory_saver",
    "allow_auto_truncate",
    "enable_multimodal",
    "cuda_graph_bs",
    "dp_size",
    "ep_size",
    "enable_lora",
    "max_lora_rank",
    "max_loaded_loras",
    "lora_paths",
    "lora_backend",
    "log_level",
    "log_level_http",
    "log_requests",
    "log_requests_level",
    "show_time_cost",
    "enable_metrics",
    "decode_log_interval",
    "enable_multithread_load",
    "enable_fast_load",
    "enable_return_routed_experts",
)

# Known, but without effect here; docs/areal.md says why. A name includes all keys below it.
UNUSED = (
    "tokenizer_path",
    "enable_offload",
    "cluster",
    "scheduler",
    "launcher",
    "server_only",
    "perf_tracer",
    "memory_profiler",
    "vllm",
    "ref",
    *(f"sglang.{key}" for key in SGLANG_OURS),
    *(
        f"{part}.{key}"
        for part in ("gconfig", "eval_gconfig")
        for key in ("max_tokens", "skip_special_tokens", "lora_name", "max_workers", "interruptable_processpool")
    ),
    *(
        f"rollout.{key}"
        for key in (
            "queue_size",
            "request_timeout",  # of one attempt there; here a request with all its attempts is bounded by its episode
            "check_trajectory_format",
            "tokenizer_path",
            "dump_to_file",
            "schedule_policy",
            "setup_timeout",
            "pause_grace_period",
            "scheduling_spec",
            "scheduling_strategy",
            "use_lora",
            "openai",
            "agent",
            "return_routed_experts",
            "_version",
            "model",
            "routing_strategy",
            "poll_interval",
            "admin_api_key",
            "api_url",
            "provider_api_key",
        )
    ),
    *(
        f"{part}.{key}"
        for part in ("actor", "critic")
        for key in (
            "attn_impl",
            "use_kernels",
            "mb_spec",
            "pad_to_maximum",
            "disable_dropout",
            "grad_reduce_dtype",
            "weight_update_mode",
            "fsdp",
            "archon",
            "megatron",
            "ds_auto_tp",
            "offload",
            "scheduling_spec",
            "scheduling_strategy",
            "init_critic_from_actor",
            "_version",
            "admin_api_key",
            "log_level",
            "request_timeout",
            "setup_timeout",
            "log_agent_stats",
            "log_agent_stats_keys",
        )
    ),
    *(
        f"critic.{key}"
        for key in (
            "path",
            "dtype",
            "backend",
            "init_from_scratch",
            "is_critic",
            "gradient_checkpointing",
            "mask_no_eos_with_zero",
            "temperature",
            "optimizer_dtype",
            "use_lora",
            "lora_rank",
            "lora_alpha",
            "target_modules",
            "peft_type",
            "enable_tree_training",
        )
    ),
    *(
        f"{part}.optimizer.{key}"
        for part in ("actor", "critic")
        for key in (
            "offload",
            "initial_loss_scale",
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
            "muon_momentum",
            "muon_use_nesterov",
            "muon_num_ns_steps",
            "muon_scale_mode",
            "muon_backend_lr",
        )
    ),
    "actor.sapo_tau_pos",
    "actor.sapo_tau_neg",
    "actor.icepop_alpha",
    "actor.icepop_beta",
    *(
        f"{part}.{key}"
        for part in ("train_dataset", "valid_dataset")
        for key in (
            "pin_memory",
            "num_workers",
            "num_dataset_workers",
            "drop_last",
            "dataset_kwargs",
            "scheduling_spec",
            "setup_timeout",
        )
    ),
    "saver.freq_secs",
    "saver.mode",
    "evaluator.freq_secs",
    "evaluator.eval_before_train",
    *(f"checkpointer.freq_{unit}" for unit in ("epochs", "steps", "secs")),  # recover's, in v0.3
    *(f"recover.{key}" for key in ("freq_epochs", "freq_steps", "freq_secs", "retries", "no_save_optim", "no_load_optim")),
    "stats_logger.wandb",
    "stats_logger.swanlab",
    "stats_logger.trackio",
)

# Repetitions that must have the same value: key -> the key that has it first, or whose default it is. A null is ignored.
REPEATED: Mapping[str, str] = {
    **{
        f"{part}.{key}": key
        for part in ("rollout", "actor", "critic", "saver", "checkpointer", "recover", "evaluator", "stats_logger")
        for key in ("experiment_name", "trial_name")
    },
    **{
        f"{part}.fileroot": "cluster.fileroot"
        for part in ("rollout", "saver", "checkpointer", "recover", "evaluator", "stats_logger")
    },
    "eval_gconfig.min_new_tokens": "gconfig.min_new_tokens",
    "actor.temperature": "gconfig.temperature",
    "actor.max_new_tokens": "gconfig.max_new_tokens",
    "actor.group_size": "gconfig.n_samples",
    "actor.reward_norm.group_size": "gconfig.n_samples",
    "actor.adv_norm.group_size": "gconfig.n_samples",
    "ref.path": "actor.path",
}

# Flags of sglang.launch_server in their sections, except those for weights and requests, which rljax sets.
SGLANG_FLAGS = (
    "disable_cuda_graph",
    "disable_radix_cache",
    "disable_cuda_graph_padding",
    "disable_custom_all_reduce",
    "disable_outlines_disk_cache",
    "enable_mixed_chunk",
    "enable_p2p_check",
    "enable_torch_compile",
    "torch_compile_max_bs",
    "cuda_graph_max_bs",
    "torchao_config",
    "triton_attention_reduce_in_fp32",
    "triton_attention_num_kv_splits",
    "num_continuous_decode_steps",
    "sampling_backend",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "schedule_policy",
    "schedule_conservativeness",
    "cpu_offload_gb",
    "kv_cache_dtype",
)

_NORM_KEYS = ("mean_level", "std_level", "eps")

# Their keys that are computed with, or stand under another name here -> our key, whose declaration says what they may be. They
# are checked as they stand in the file, so that an error names what was written there.
DECLARED: Mapping[str, str] = {
    "actor.mb_spec.max_tokens_per_mb": "actor.mb_spec.max_tokens_per_row",
    "critic.eps_clip": "critic.eps_clip_value",
    "actor.lora_rank": "actor.lora.rank",
    "actor.lora_alpha": "actor.lora.alpha",
    "actor.behav_imp_weight_cap": "actor.behav_imp_weight_cap",
    "actor.behave_imp_weight_cap": "actor.behav_imp_weight_cap",
    "actor.rejection_sampling.upper": "actor.behav_imp_weight_cap",
    **{f"eval_gconfig.{key}": f"evaluator.{key}" for key in ("n_samples", "max_new_tokens", "temperature", "top_p")},
    **{f"actor.{norm}.{key}": f"actor.{norm}.{key}" for norm in ("reward_norm", "adv_norm") for key in _NORM_KEYS},
    **{key: key for key in ("actor.discount", "actor.gae_lambda", "actor.kl_ctl", "train_dataset.batch_size")},
    **{key: key for key in ("actor.overlong_tokens", "actor.overlong_penalty_factor")},
}
