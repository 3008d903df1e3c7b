"""Keys of what is trained: model, objective, optimizer, critic and warm-up."""

from __future__ import annotations

import dataclasses

from rljax.config.keys import ABOVE_ONE, BELOW_ONE, NOT_NEGATIVE, POSITIVE, UNIT, key, section

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # that can get an adapter
_LEVELS = ("batch", "group", "none")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and its schedule."""

    type: str = key("adamw", "Update rule.", choices=("adamw",))
    lr: float = key(1e-6, "Learning rate, at the peak of the schedule.", NOT_NEGATIVE)
    weight_decay: float = key(0.01, "Decoupled weight decay.", NOT_NEGATIVE)
    beta1: float = key(0.9, "Decay of the first moment.", BELOW_ONE)
    # 0.999 averages too long for a moving objective
    beta2: float = key(0.95, "Decay of the second moment.", BELOW_ONE)
    eps: float = key(1e-8, "Added to the root of the second moment.", NOT_NEGATIVE)
    lr_scheduler_type: str = key(
        "constant", "Shape of the schedule after its warm-up.", choices=("constant", "linear", "cosine")
    )
    min_lr_ratio: float = key(0.0, "Learning rate after the last step, as a share of `lr`.", UNIT)
    warmup_steps_proportion: float = key(0.0, "Share of all optimizer steps in which the rate rises from 0.", UNIT)
    gradient_clipping: float = key(1.0, "Largest global norm of a gradient. 0: no clipping.", NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a model made on the spot, when `actor.init_from_scratch` is set."""

    architecture: str = key("llama", "Model family.", choices=("llama", "qwen2", "qwen3", "gemma3"))
    hidden_size: int = key(128, "Width of the residual stream.", POSITIVE)
    intermediate_size: int = key(384, "Width of the MLP.", POSITIVE)
    num_layers: int = key(4, "Transformer blocks.", POSITIVE)
    num_heads: int = key(4, "Query heads.", POSITIVE)
    num_kv_heads: int = key(4, "Key and value heads; they divide the query heads.", POSITIVE)
    head_dim: int = key(32, "Width of a head; even, because rotary embeddings rotate pairs.", POSITIVE)
    max_position_embeddings: int = key(512, "Longest context.", POSITIVE, unit="tokens")
    tie_word_embeddings: bool = key(True, "Share the weights of embedding and unembedding.")
    initializer_range: float = key(
        0.02, "Standard deviation of the matrices; smaller for those that write to the residual stream.", POSITIVE
    )
    tokenizer: str = key("char", '"char": one token per printable ASCII character; or a directory with tokenizer.json.')


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters in place of full weights."""

    rank: int = key(0, "Rank of the adapters. 0: all weights are trained.", NOT_NEGATIVE)
    alpha: float = key(16.0, "Scale of the adapters, which add alpha / rank times their product.", POSITIVE)
    target_modules: tuple[str, ...] = key(PROJECTIONS, "Projections that get an adapter, by their Hugging Face names.")
    path: str = key("", "Directory of an adapter, as peft writes it, that the run begins with. Empty: a new one.")


@dataclasses.dataclass(frozen=True)
class MicroBatchConfig:
    """Size of one forward and backward pass on a device."""

    max_tokens_per_row: int = key(4096, "Length of a packed row; the longest trajectory has to fit.", POSITIVE, unit="tokens")
    rows_per_mb: int = key(1, "Rows that a data-parallel shard takes in one forward and backward pass.", POSITIVE)


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """Samples over which mean and standard deviation are taken."""

    mean_level: str = key("none", "Set whose mean is subtracted.", choices=_LEVELS)
    std_level: str = key("none", "Set whose standard deviation divides.", choices=_LEVELS)
    mean_leave1out: bool = key(False, "Leave the sample itself out of its mean.")
    std_leave1out: bool = key(False, "Leave the sample itself out of its standard deviation.")
    eps: float = key(1e-6, "Added to the standard deviation.", NOT_NEGATIVE)
    std_floor: float = key(1e-3, "Smallest divisor: a smaller standard deviation counts as this.", NOT_NEGATIVE)
    std_unbiased: bool = key(False, "Divide squares by n - 1 (of the sample, as torch.std does), not by n (of the population).")


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """On-policy distillation: beside the reward, or with `actor.reward_scaling` 0 instead of it."""

    teacher: str = key("", "A Hugging Face model directory with the policy's tokenizer. Empty: no distillation.")
    coef: float = key(1.0, "Coefficient of the reverse KL to the teacher at each trained token.", POSITIVE)


@dataclasses.dataclass(frozen=True)
class ActorConfig:
    """The policy, its objective and its optimizer."""

    path: str = key("", "A Hugging Face model directory.")
    init_from_scratch: bool = key(False, "Make the model in WORKDIR/init from `actor.init`, seeded by `seed`.")
    init: ModelConfig = section(ModelConfig)
    dtype: str = key(
        "bfloat16", "Dtype of the arithmetic; master weights and moments are float32.", choices=("float32", "bfloat16")
    )
    gradient_checkpointing: str = key(
        "auto",
        "Activations to recompute in the backward pass; dots keeps the outputs of matmuls. auto: none if the JAX learner "
        "finds that half of a device's memory is enough, else full.",
        choices=("auto", "none", "full", "dots"),
    )
    mb_spec: MicroBatchConfig = section(MicroBatchConfig)
    lora: LoraConfig = section(LoraConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    logprob_chunk: int | None = key(
        None,
        "Rows of the logits in memory at once in the log-prob op. None: 2048, and on the JAX path up to 8192 if their logits "
        "take at most a tenth of a device's memory.",
        POSITIVE,
    )
    # The objective
    loss: str = key("ppo", "The policy loss; sft is supervised training, without sampling.", choices=("ppo", "cispo", "sft"))
    importance_sampling_level: str = key(
        "token", "Level of the ratio to the proximal policy; sequence is GSPO.", choices=("token", "sequence")
    )
    loss_aggregation: str = key(
        "token-mean", "Aggregation of token losses to the loss of a minibatch.",
        choices=("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"),
    )  # fmt: skip
    loss_aggregation_constant: int | None = key(
        None, "Divisor of seq-mean-token-sum (Dr. GRPO). None: gconfig.max_new_tokens.", POSITIVE, unit="tokens"
    )
    eps_clip: float = key(0.2, "The ratio is clipped at 1 - eps_clip.", UNIT)
    eps_clip_higher: float | None = key(None, "The ratio is clipped at 1 + eps_clip_higher. None: eps_clip.", NOT_NEGATIVE)
    c_clip: float | None = key(None, "Dual clip: bound on the ratio where the advantage is negative. None: off.", ABOVE_ONE)
    use_decoupled_loss: bool = key(True, "Weigh tokens by proximal over behavior policy, without a gradient.")
    recompute_logprob: bool = key(True, "Score the batch before the update, for the proximal policy's log-probs.")
    prox_logp_method: str = key(
        "recompute", "Source of proximal log-probs; loglinear interpolates them by version.",
        choices=("recompute", "loglinear"),
    )  # fmt: skip
    prox_logp_error: bool = key(
        False, "Score as well, and report the error of loglinear; costs the forward pass that it saves."
    )
    behav_imp_weight_cap: float | None = key(5.0, "Cap on the decoupled weight. None: no cap.", POSITIVE)
    behav_imp_weight_mode: str = key(
        "clamp", "Above the cap, a token weighs as much as the cap (clamp) or nothing (mask).", choices=("clamp", "mask")
    )
    behav_imp_weight_level: str = key(
        "token",
        "Level of the decoupled weight; sequence is the product over a trajectory.",
        choices=("token", "sequence"),
    )
    kl_ctl: float = key(0.0, "Coefficient of the KL divergence to the reference policy. 0: no reference model.", NOT_NEGATIVE)
    kl_estimator: str = key("k3", "Estimator of that divergence.", choices=("k1", "k2", "k3"))
    kl_placement: str = key("loss", "Where to add the divergence: to the reward or to the loss.", choices=("reward", "loss"))
    entropy_coef: float = key(0.0, "Coefficient of the entropy bonus.", unit="nats")
    distill: DistillConfig = section(DistillConfig)
    ppo_n_minibatches: int = key(1, "Optimizer steps per batch.", POSITIVE)
    # Advantages
    adv_estimator: str = key(
        "grpo", "Estimator of advantages; gae learns a critic.", choices=("grpo", "rloo", "reinforce_pp", "gae")
    )
    discount: float = key(1.0, "Discount of later rewards, per token.", UNIT)
    gae_lambda: float = key(1.0, "Lambda of GAE.", UNIT)
    reward_norm: NormConfig = section(NormConfig, mean_level="group", std_level="group")
    adv_norm: NormConfig = section(NormConfig)
    # Reward shaping
    reward_bias: float = key(0.0, "Added to a reward.")
    reward_scaling: float = key(1.0, "Factor of a reward, after the bias.")
    reward_clip: float | None = key(None, "Largest magnitude of a shaped reward. None: no clip.", POSITIVE)
    overlong_reward_penalty: bool = key(
        False, "Subtract from the reward of completions close to max_new_tokens (DAPO), before bias and scale."
    )
    overlong_tokens: int = key(
        0, "Tokens before gconfig.max_new_tokens over which the penalty rises.", NOT_NEGATIVE, unit="tokens"
    )
    overlong_penalty_factor: float = key(0.0, "Penalty at gconfig.max_new_tokens.", NOT_NEGATIVE)
    mask_no_eos: bool = key(False, "Leave completions cut at the length limit untrained.")


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The critic of adv_estimator=gae. It starts from the actor's weights with a zero value head."""

    optimizer: OptimizerConfig = section(OptimizerConfig, lr=5e-6)
    eps_clip_value: float | None = key(None, "Largest change of a value per batch. None: no clip.", POSITIVE)
    ppo_n_minibatches: int = key(1, "Optimizer steps per batch.", POSITIVE)


@dataclasses.dataclass(frozen=True)
class WarmupConfig:
    """Supervised steps on the labeled training set, before reinforcement."""

    steps: int = key(0, "Supervised steps. 0: none.", NOT_NEGATIVE)
    batch_size: int = key(64, "Examples per step.", POSITIVE)
    field: str = key("answer", "Field of a record whose text is learned; a task may have others.")
    turns: str = key(
        "all", "Turns of the assistant that are learned: all of a conversation, those behind the prompt, or the last.",
        choices=("all", "reply", "last"),
    )  # fmt: skip
    optimizer: OptimizerConfig = section(OptimizerConfig, lr=1e-3)
