"""Summaries of diagnoses and histories, a module per question that the doctor answers.

render      the verdict on one run, as text
checklist   what to look at before, during and after training
audit       whether the reward was earned or hacked
compare     what differs between two runs
seeds       several runs of one experiment together
private     reward on prompts nobody chose anything by
"""
