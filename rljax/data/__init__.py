"""Prompts for training and evaluation: files and tasks, formats, shuffling, sharding, resuming.

prompts = open_prompts(config.train_dataset, seed=config.seed, tokenizer=tokenizer)
prompt = next(prompts)                  # endless over epochs
state = prompts.state()                 # JSON; restore(state) goes on with exactly the next prompt
for prompt in prompts.epoch(0): ...     # one pass, for evaluation
"""

from rljax.data.labeled import Labels, labeled, labeled_trajectory
from rljax.data.prompts import PromptSource, open_prompts

__all__ = ["Labels", "PromptSource", "labeled", "labeled_trajectory", "open_prompts"]
