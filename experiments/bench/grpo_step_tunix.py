"""google-tunix's side of `grpo_step.py`: prints the seconds of each GRPOLearner step as JSON.

python -m experiments.bench.grpo_step_tunix MODEL WORKDIR STEPS THREADS

WORKDIR and THREADS are not used: it writes nothing, and XLA takes as many threads as there are
cores.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from rljax.experiments.bench import grpo_step_task
from rljax.experiments.bench.grpo_step_task import BATCH, COMPLETION, MODEL, PROMPT, SAMPLES, WORDS


def main(model: str, steps: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from transformers import AutoTokenizer
    from tunix.models.llama3 import model as llama
    from tunix.models.llama3 import params
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
    from tunix.rl.rollout.base_rollout import RolloutConfig

    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    shape = llama.ModelConfig(
        num_layers=MODEL.num_layers,
        vocab_size=WORDS,
        embed_dim=MODEL.hidden_size,
        hidden_dim=MODEL.intermediate_size,
        num_heads=MODEL.num_heads,
        head_dim=MODEL.head_dim,
        num_kv_heads=MODEL.num_kv_heads,
        rope_theta=10000,
        norm_eps=1e-5,
        weight_tying=True,
    )
    rewarded: list[float] = []  # moments at which the completions of a step were scored

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        rewarded.append(time.perf_counter())
        return [grpo_step_task.distinct_words(None, text) for text in completions]

    def batches() -> Iterator[dict[str, Any]]:
        prompts = itertools.cycle(grpo_step_task.prompts())
        while True:
            yield {"prompts": np.array(list(itertools.islice(prompts, BATCH)))}

    with mesh:
        cluster = RLCluster(
            actor=params.create_model_from_safe_tensors(model, shape, mesh, dtype=jnp.float32),
            tokenizer=AutoTokenizer.from_pretrained(model),
            cluster_config=ClusterConfig(
                role_to_mesh={role: mesh for role in (Role.ACTOR, Role.REFERENCE, Role.ROLLOUT)},
                training_config=RLTrainingConfig(
                    actor_optimizer=optax.adamw(1e-4), mini_batch_size=BATCH, eval_every_n_steps=10**9, max_steps=steps
                ),
                rollout_config=RolloutConfig(
                    max_tokens_to_generate=COMPLETION,
                    max_prompt_length=PROMPT,
                    kv_cache_size=PROMPT + COMPLETION,
                    temperature=1.0,
                    data_type=jnp.float32,
                ),
            ),
        )
        learner = GRPOLearner(cluster, GRPOConfig(num_generations=SAMPLES, beta=0.0), reward)
        learner.train(itertools.islice(batches(), steps + 1))
    print(json.dumps([after - before for before, after in itertools.pairwise(rewarded)]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[3]))
