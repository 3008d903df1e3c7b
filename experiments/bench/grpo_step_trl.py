"""The peer's side of `grpo_step.py`: prints the seconds of each step of TRL's GRPOTrainer as JSON.

python -m experiments.bench.grpo_step_trl MODEL WORKDIR STEPS THREADS
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

from rljax.experiments.bench import grpo_step_task


def main(model: str, workdir: str, steps: int, threads: int) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    ends = [time.perf_counter()]

    class PhaseTimer(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [grpo_step_task.distinct_words(None, text) for text in completions]

    settings = GRPOConfig(
        output_dir=workdir,
        per_device_train_batch_size=grpo_step_task.BATCH * grpo_step_task.SAMPLES,
        num_generations=grpo_step_task.SAMPLES,
        max_completion_length=grpo_step_task.COMPLETION,
        max_steps=steps,
        learning_rate=1e-4,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=10_000,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": text} for text in grpo_step_task.prompts()]),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[PhaseTimer()],
    )
    trainer.train()
    print(json.dumps([after - before for before, after in itertools.pairwise(ends)]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
