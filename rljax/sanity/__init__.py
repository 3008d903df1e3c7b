"""Sanity of a run before it starts: data, template, tokenizer and model, rewards, a few rollouts.

    findings.py    what a check says: errors, warnings, notes; the verdict
    lengths.py     prompts and labeled examples against the limits in tokens
    prompts.py     duplicates, contradictions, prompts shared by training and validation
    blanks.py      prompts and answers without text
    survey.py      both, in one pass over a set
    system_prompts.py  records with a system message of their own
    whole_numbers.py  gold answers of a column of floats
    template.py    chat template, EOS, pad, vocabulary, the model's own files
    golds.py       gold answers that reward `exact` can't find in a completion
    rewards.py     rewards of gold answers and of wrong ones
    filters.py     the filter of groups, on a made-up one
    trial.py       reward and filter, at the start of a run
    start.py       what is checked at every start of a run (`at_start`)
    rollouts.py    rewards of real episodes

experiments.check makes all of them.
"""
