"""The PyTorch learner over a mesh of ranks.

learner.py      its calls: score, update, publish, save
policy.py       its network, and the sets of weights that take turns in it
critic.py       the critic; teacher.py, the teacher of on-policy distillation
phase.py        an optimizer on some parameters, and its step
rows.py         micro-batches of this rank
adapters.py     share of the adapters' update that merging rounds away
state.py        the checkpoint as shards and by HF names; portable.py, without a learner
distributed.py  the ranks
"""
