"""Summaries of diagnoses and histories, a module per question that the doctor answers.

render.py     the verdict on one run, as text
checklist.py  what to look at before, during and after training
audit.py      whether the reward was earned or hacked
compare.py    what differs between two runs
seeds.py      several runs of one experiment together
private.py    reward on prompts nobody chose anything by
"""
