"""Every default, once. A comment where the value is a choice; `rljax/config/schema.py` says what each key means."""

from ml_collections import ConfigDict, config_dict


def _optimizer(lr: float) -> ConfigDict:
    return ConfigDict(
        dict(
            type="adamw",
            lr=lr,
            weight_decay=0.01,
            beta1=0.9,
            beta2=0.95,  # 0.999 forgets too slowly for a moving objective
            eps=1e-8,
            lr_scheduler_type="constant",
            min_lr_ratio=0.0,
            warmup_steps_proportion=0.0,
            gradient_clipping=1.0,
        )
    )


def _norm(mean_level: str, std_level: str) -> ConfigDict:
    return ConfigDict(
        dict(mean_level=mean_level, std_level=std_level, mean_leave1out=False, std_leave1out=False, eps=1e-6, std_floor=1e-3)
    )


def _dataset(split: str, batch_size: int, shuffle: bool) -> ConfigDict:
    return ConfigDict(
        dict(
            path="",
            type="prompt_answer",
            split=split,
            batch_size=batch_size,
            shuffle=shuffle,
            max_length=config_dict.placeholder(int),
            limit=config_dict.placeholder(int),
            system_prompt="",
            task=ConfigDict(),
        )
    )


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 1
    config.allocation_mode = "jax:d1"
    config.deterministic = False
    config.total_train_epochs = 1
    config.total_train_steps = config_dict.placeholder(int)

    config.gconfig = ConfigDict(
        dict(
            n_samples=8,
            max_new_tokens=512,
            min_new_tokens=0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            greedy=False,
            stop=(),
            stop_token_ids=(),
        )
    )
    config.reward = ConfigDict(dict(name="exact", workers=2, timeout=15.0, memory_mb=0, retries=1))
    config.rollout = ConfigDict(
        dict(
            max_head_offpolicyness=2,
            max_concurrent_rollouts=config_dict.placeholder(int),
            consumer_batch_size=config_dict.placeholder(int),
            enable_rollout_tracing=False,
            stale_policy="drop",
            recompute_kv_on_publish=False,
            workflow="rlvr",
            workflow_args=ConfigDict(),
            should_accept_fn=config_dict.placeholder(str),
            request_timeout=3600.0,
            request_retries=3,
            workers=0,
            listen="",
            addr="",
        )
    )
    config.actor = ConfigDict(
        dict(
            path="",
            init_from_scratch=False,
            init=dict(
                architecture="llama",
                hidden_size=128,
                intermediate_size=384,
                num_layers=4,
                num_heads=4,
                num_kv_heads=4,
                head_dim=32,
                max_position_embeddings=512,
                tie_word_embeddings=True,
                initializer_range=0.02,
                tokenizer="char",
            ),
            dtype="bfloat16",
            gradient_checkpointing="full",
            mb_spec=dict(max_tokens_per_row=4096, rows_per_mb=1),
            lora=dict(
                rank=0, alpha=16.0, target_modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
            ),
            optimizer=_optimizer(lr=1e-6),
            logprob_chunk=1024,
            loss="ppo",
            importance_sampling_level="token",
            loss_aggregation="token-mean",
            loss_aggregation_constant=config_dict.placeholder(int),
            eps_clip=0.2,
            eps_clip_higher=config_dict.placeholder(float),
            c_clip=config_dict.placeholder(float),
            use_decoupled_loss=True,
            recompute_logprob=True,
            prox_logp_method="recompute",
            prox_logp_error=False,
            behav_imp_weight_cap=5.0,
            behav_imp_weight_mode="clamp",
            behav_imp_weight_level="token",
            kl_ctl=0.0,
            kl_estimator="k3",
            kl_placement="loss",
            entropy_coef=0.0,
            ppo_n_minibatches=1,
            adv_estimator="grpo",
            discount=1.0,
            gae_lambda=1.0,
            reward_norm=_norm("group", "group"),
            adv_norm=_norm("none", "none"),
            reward_bias=0.0,
            reward_scaling=1.0,
            reward_clip=config_dict.placeholder(float),
            overlong_reward_penalty=False,
            overlong_tokens=0,
            overlong_penalty_factor=0.0,
            mask_no_eos=False,
        )
    )
    config.critic = ConfigDict(
        dict(optimizer=_optimizer(lr=5e-6), eps_clip_value=config_dict.placeholder(float), ppo_n_minibatches=1)
    )
    config.warmup = ConfigDict(dict(steps=0, batch_size=64, field="answer", optimizer=_optimizer(lr=1e-3)))
    config.train_dataset = _dataset("train", batch_size=8, shuffle=True)
    config.valid_dataset = _dataset("test", batch_size=64, shuffle=False)
    config.saver = ConfigDict(dict(freq_steps=50, freq_epochs=config_dict.placeholder(int), keep_last=2, export_final=True))
    config.evaluator = ConfigDict(
        dict(
            freq_steps=config_dict.placeholder(int),
            freq_epochs=config_dict.placeholder(int),
            n_samples=1,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            greedy=True,
            max_prompts=config_dict.placeholder(int),
        )
    )
    config.recover = ConfigDict(
        dict(
            mode="auto",
            max_consecutive_failures=32,
            max_prompt_failures=4,
            max_consecutive_rejected=1024,  # dynamic sampling rejects nine groups of ten at times
            hang_timeout=1800.0,
        )
    )
    # On by default is only what no healthy run does; the others depend on the task.
    config.guard = ConfigDict(
        dict(
            patience=3,
            finite=True,
            max_approx_kl=10.0,
            min_entropy=config_dict.placeholder(float),  # a task that is solved has none left
            max_grad_norm=config_dict.placeholder(float),
            min_reward=config_dict.placeholder(float),
            max_behave_imp_weight=10.0,
            min_behave_imp_weight=0.1,
            max_no_eos_ratio=config_dict.placeholder(float),  # a base model may begin with all of them cut
        )
    )
    config.stats_logger = ConfigDict(dict(tensorboard=False, wandb=False, wandb_project="rljax", live=True, samples_per_step=4))
    config.jax = ConfigDict(
        dict(
            slots=64,
            context_length=2048,
            prefill_chunk=256,
            decode_steps=4,
            decode_attention="auto",
            cache_dtype="bfloat16",
            sampler_dtype="bfloat16",
            precise=False,
            bitwise=False,
            release_memory=False,
            compilation_cache="",
            processes=config_dict.placeholder(int),
        )
    )
    config.fsdp = ConfigDict(dict(compile=True))
    config.sglang = ConfigDict(
        dict(
            python="",
            device="",
            dtype="auto",
            attention_backend="",
            mem_fraction_static=config_dict.placeholder(float),
            context_length=config_dict.placeholder(int),
            max_running_requests=config_dict.placeholder(int),
            stream_interval=16,
            disable_overlap_schedule=False,
            extra_args=(),
            start_timeout=600.0,
            restarts=3,
            transport="",
            bucket_mb=512,
            release_memory=False,
            log_dir="",
        )
    )
    config.serve = ConfigDict(
        dict(
            host="127.0.0.1",  # other machines can't reach it; a token should come with any other address
            port=0,
            max_requests=1024,
            max_body_mb=64.0,
            weight_roots=(),
        )
    )
    return config
