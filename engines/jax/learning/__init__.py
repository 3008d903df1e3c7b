"""The learner over a mesh of data, fsdp and tensor axes, in one process or several.

learner.py      its calls: score, update, publish, save
policy.py       its network, what is trained of it and what is frozen
critic.py       the critic; teacher.py, the teacher of on-policy distillation
phase.py        an optimizer on some parameters, and its step
functions.py    what is differentiated and compiled
state.py        its state as a tree, and by HF names
distributed.py  its processes
"""
