"""Prompts for training and evaluation: files and tasks, formats, shuffling, sharding, resuming.

prompts = open_prompts(config.train_dataset, seed=config.seed, tokenizer=tokenizer)
prompt = next(prompts)                  # endless over epochs
state = prompts.state()                 # JSON; restore(state) goes on with exactly the next prompt
for prompt in prompts.epoch(0): ...     # one pass, for evaluation

prompts.py    the stream of prompts: shuffled, sharded, resumable
records.py    files as random-access records; given_records.py, those of a program
shards.py     numbered files of one split, and which are missing
formats.py    a record as messages and the fields that rewards read
tasks.py      examples made in memory; count_objects.py, those with pictures
labeled.py    prompts with the reply that supervised training learns
held_out.py   validation sets
selection.py  which examples are used; remembered.py keeps that for large sets
lengths.py    lengths of prompts in tokens, many at once
"""

from rljax.data.labeled import Labels, labeled, labeled_trajectory
from rljax.data.prompts import PromptSource, open_prompts

__all__ = ["Labels", "PromptSource", "labeled", "labeled_trajectory", "open_prompts"]
