"""The config as frozen dataclasses: every key, its type and its unit. `configs/base.py` has every default, once.

Binaries turn the ConfigDict into a `Config` at the edge; below that nothing reads a ConfigDict.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """`gconfig`: how completions are sampled."""

    n_samples: int  # completions a prompt
    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_p: float
    top_k: int  # 0: no limit
    greedy: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]  # beside the model's own EOS ids


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """`reward`: what scores an episode, and the processes it runs in."""

    name: str  # a registered reward ("exact", "gsm8k", "math", "reasoning_gym"), or "package.module:function"
    workers: int  # processes
    timeout: float  # seconds a call; then the process is killed
    memory_mb: int  # address space a process; 0: no limit
    retries: int  # times an episode is scored again after an error or a timeout, before it is dropped


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """`rollout`: the asynchronous side."""

    max_head_offpolicyness: int  # versions; 0 is synchronous RL
    max_concurrent_rollouts: int | None  # prompts in flight; None: (max_head_offpolicyness + 1) * consumer_batch_size
    consumer_batch_size: int | None  # prompts an update; None: train_dataset.batch_size
    enable_rollout_tracing: bool  # one line an episode event in trace.jsonl
    stale_policy: str  # "drop" (and generate again) or "mask" the tokens that would exceed the bound
    recompute_kv_on_publish: bool  # prefill in-flight requests again with the new weights
    workflow: str  # a registered workflow ("rlvr", "multi_turn"), or "package.module:Class"
    workflow_args: dict[str, object]  # keyword arguments of the workflow, beside tokenizer and rewards
    should_accept_fn: str | None  # a registered filter ("mixed_rewards": DAPO's), or "package.module:function"
    request_timeout: float  # seconds
    request_retries: int
    workers: int  # processes that run workflow, tokeniser and rewards; 0: the trainer's own does
    listen: str  # "HOST:PORT" where workers from elsewhere attach (docs/runtime.md); empty: none do
    addr: str  # "HOST:PORT" of a running server to attach to; empty: start our own sampler


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """`actor.optimizer`, `critic.optimizer`."""

    type: str  # "adamw"
    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    lr_scheduler_type: str  # "constant", "linear", "cosine"
    min_lr_ratio: float
    warmup_steps_proportion: float  # of all optimizer steps
    gradient_clipping: float  # global norm; 0: none


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """`actor.init`: the shape of a model made on the spot, when `actor.init_from_scratch` is set."""

    architecture: str  # "llama", "qwen2", "qwen3", "gemma3"
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    initializer_range: float  # std of every matrix; those that write to the residual stream have less
    tokenizer: str  # "char": one token a printable ASCII character; or a directory with tokenizer.json


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """`actor.lora`: rank 0 is off."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]  # "q_proj", ... as in HF


@dataclasses.dataclass(frozen=True)
class MicroBatchConfig:
    """`actor.mb_spec`: how much a device holds at once."""

    max_tokens_per_row: int  # T of a packed row; at least the longest trajectory
    rows_per_mb: int  # rows a data-parallel shard takes in one forward and backward


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """`actor.reward_norm`, `actor.adv_norm`: where mean and std are taken."""

    mean_level: str  # "batch", "group", "none"
    std_level: str  # "batch", "group", "none"
    mean_leave1out: bool
    std_leave1out: bool
    eps: float  # added to the std
    std_floor: float  # a std below it counts as it


@dataclasses.dataclass(frozen=True)
class ActorConfig:
    """`actor`: the policy, its objective and its optimizer."""

    path: str  # a HF model directory
    init_from_scratch: bool  # make the model in WORKDIR/init from `actor.init`, seeded by `seed`
    init: ModelConfig
    dtype: str  # compute: "float32", "bfloat16"; master weights and moments are float32
    gradient_checkpointing: str  # "none", "full", "dots" (keep matmul outputs)
    mb_spec: MicroBatchConfig
    lora: LoraConfig
    optimizer: OptimizerConfig
    logprob_chunk: int  # rows of the logits held at once by the log-prob op
    # The objective
    loss: str  # "ppo", "cispo", "sft"
    importance_sampling_level: str  # "token", "sequence" (GSPO)
    loss_aggregation: str  # "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"
    loss_aggregation_constant: int | None  # tokens the Dr. GRPO sum is divided by; None: gconfig.max_new_tokens
    eps_clip: float
    eps_clip_higher: float | None  # None: eps_clip
    c_clip: float | None  # dual clip, > 1; None: off
    use_decoupled_loss: bool
    recompute_logprob: bool
    prox_logp_method: str  # "recompute", "loglinear"
    prox_logp_error: bool  # score as well, and tell how far loglinear is off; costs the forward pass that it saves
    behav_imp_weight_cap: float | None
    behav_imp_weight_mode: str  # "clamp", "mask"
    behav_imp_weight_level: str  # "token", "sequence"
    kl_ctl: float  # 0: no reference model
    kl_estimator: str  # "k1", "k2", "k3"
    kl_placement: str  # "reward", "loss"
    entropy_coef: float
    ppo_n_minibatches: int
    # Advantages
    adv_estimator: str  # "grpo", "rloo", "reinforce_pp", "gae"
    discount: float
    gae_lambda: float
    reward_norm: NormConfig
    adv_norm: NormConfig
    # Reward shaping
    reward_bias: float
    reward_scaling: float
    reward_clip: float | None
    overlong_reward_penalty: bool
    overlong_tokens: int  # length of the soft zone before max_new_tokens
    overlong_penalty_factor: float
    mask_no_eos: bool  # truncated completions are not trained on


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """`critic`: used by adv_estimator "gae"; starts from the actor's weights with a value head of zeros."""

    optimizer: OptimizerConfig
    eps_clip_value: float | None  # None: no clip
    ppo_n_minibatches: int


@dataclasses.dataclass(frozen=True)
class WarmupConfig:
    """`warmup`: supervised steps on the labelled training set before RL; 0 steps is none."""

    steps: int
    batch_size: int  # examples
    field: str  # of a record: the text that is learned ("answer"; a task may bring others)
    optimizer: OptimizerConfig


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
    """`train_dataset`, `valid_dataset`."""

    # A directory with <split>.jsonl or .parquet, one such file, or "task:addition", "task:reasoning_gym/<dataset>"
    path: str
    type: str  # a format: "gsm8k", "prompt_answer", "task" (which a "task:" path implies), or "package.module:function"
    split: str
    batch_size: int  # prompts: of an update; of the validation set, at once
    shuffle: bool
    max_length: int | None  # prompts longer than this many tokens are skipped and counted
    limit: int | None  # use only the first so many examples
    system_prompt: str
    task: dict[str, object]  # arguments of a "task:" dataset


@dataclasses.dataclass(frozen=True)
class FrequencyConfig:
    """`saver`, `evaluator`: None is never."""

    freq_steps: int | None
    freq_epochs: int | None


@dataclasses.dataclass(frozen=True)
class SaverConfig(FrequencyConfig):
    keep_last: int  # checkpoints
    export_final: bool  # HF safetensors and tokenizer in WORKDIR/export at the end


@dataclasses.dataclass(frozen=True)
class EvaluatorConfig(FrequencyConfig):
    n_samples: int
    temperature: float
    top_p: float
    top_k: int  # 0: no limit
    greedy: bool
    max_prompts: int | None


@dataclasses.dataclass(frozen=True)
class RecoverConfig:
    """`recover`: what ends a run and what doesn't."""

    mode: str  # "auto": continue what WORKDIR holds; "fresh": refuse a WORKDIR that holds a run
    max_consecutive_failures: int  # groups that fail with none that works between them
    max_prompt_failures: int  # times a prompt may fail by its own fault; then it is dropped and counted
    max_consecutive_rejected: int  # groups that rollout.should_accept_fn rejects in a row
    hang_timeout: float  # seconds without progress; then all stacks are dumped and the run ends non-zero


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """`guard`: bounds on a step's metrics that end a run; None is no bound. A mean over the step's batch each."""

    patience: int  # steps in a row out of a bound, until the run ends; one that is far out ends it at once
    finite: bool  # loss and gradient norm are numbers
    max_approx_kl: float | None  # nats: of the policy from its proximal policy
    min_entropy: float | None  # nats a token: below it the policy has collapsed
    max_grad_norm: float | None
    min_reward: float | None
    max_behave_imp_weight: float | None  # proximal over behavior; 1 where sampler and learner agree
    min_behave_imp_weight: float | None
    max_no_eos_ratio: float | None  # share of completions that were cut


@dataclasses.dataclass(frozen=True)
class StatsLoggerConfig:
    """`stats_logger`: sinks beside metrics.jsonl."""

    tensorboard: bool
    wandb: bool
    wandb_project: str
    live: bool  # progress on a terminal
    samples_per_step: int  # trajectories a step in samples.jsonl


@dataclasses.dataclass(frozen=True)
class JaxConfig:
    """`jax`: the JAX sampler and learner."""

    slots: int  # requests decoded at once
    context_length: int  # tokens of prompt and completion a slot holds
    prefill_chunk: int  # prompt tokens a dispatch
    decode_steps: int  # decode steps a dispatch
    decode_attention: str  # "auto", or one of rljax/backends/jax/decode_attention: "pallas_gpu", "xla"
    cache_dtype: str
    sampler_dtype: str
    precise: bool  # float32 sums in blocks: logits within 1e-4 of transformers on the CPU (docs/parity.md); costs time
    bitwise: bool  # sampler scores its tokens by the learner's own program, so that law 3 is exact
    release_memory: bool  # a sampler on the learner's devices lets go of weights and cache while it updates (synchronous runs)
    compilation_cache: str  # a directory; empty: that of JAX_COMPILATION_CACHE_DIR, if any
    # Of the learner. None: as many as torchrun started, else one; N: exactly so many, started on this host unless torchrun did;
    # 0: those that jax.distributed finds by itself (a TPU pod, Slurm, Open MPI, Kubernetes). See docs/processes.md
    processes: int | None


@dataclasses.dataclass(frozen=True)
class FsdpConfig:
    """`fsdp`: the PyTorch learner."""

    compile: bool  # layers through torch.compile, on a GPU: a minute at the start, then fewer passes over memory


@dataclasses.dataclass(frozen=True)
class SglangConfig:
    """`sglang`: the SGLang servers that a run starts, one a data-parallel replica; what is empty or None SGLang decides."""

    python: str  # interpreter of the environment SGLang is installed in; empty: this one
    device: str  # "cuda", "cpu"; empty: SGLang's choice
    dtype: str  # "auto", "bfloat16", "float32", "float16"
    attention_backend: str
    mem_fraction_static: float | None  # of a device's memory, for weights and KV cache
    context_length: int | None  # tokens of prompt and completion
    max_running_requests: int | None
    stream_interval: int  # tokens a reply brings at once; fewer cost time, more are lost with a server
    disable_overlap_schedule: bool
    extra_args: tuple[str, ...]  # more flags of sglang.launch_server, as on its command line
    start_timeout: float  # seconds until a server answers
    restarts: int  # times a server that died is started again, before it is dropped
    # How weights reach the servers, with a learner that can: "ipc" (the same devices), "nccl" (other devices), "gloo" (CPU),
    # "directory"; empty: the first of these that is possible
    transport: str
    bucket_mb: int  # what ipc, nccl and gloo send at once, and each side holds beside the model
    # Servers that share devices with the learner let go of their memory while it updates (synchronous runs only)
    release_memory: bool
    log_dir: str  # of the servers' logs; empty: a directory in the system's temporary one


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """`serve`: our own server, of `experiments.serve`. A bearer token comes from the environment variable RLJAX_TOKEN."""

    host: str  # address to listen on
    port: int  # 0: a free one
    max_requests: int  # completions under way at once; more are answered 503
    max_body_mb: float  # of a request
    weight_roots: tuple[str, ...]  # weights are loaded from directories below these only; empty: memory-backed storage


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    seed: int
    allocation_mode: str
    deterministic: bool  # SGLang: a completion depends on its seed alone, at some cost; the JAX sampler's always does
    total_train_epochs: int
    total_train_steps: int | None  # None: as many as the epochs hold
    gconfig: GenerationConfig
    reward: RewardConfig
    rollout: RolloutConfig
    actor: ActorConfig
    critic: CriticConfig
    warmup: WarmupConfig
    train_dataset: DatasetConfig
    valid_dataset: DatasetConfig
    saver: SaverConfig
    evaluator: EvaluatorConfig
    recover: RecoverConfig
    guard: GuardConfig
    stats_logger: StatsLoggerConfig
    jax: JaxConfig
    fsdp: FsdpConfig
    sglang: SglangConfig
    serve: ServeConfig
