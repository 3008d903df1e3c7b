"""Ways of weights from the learner to SGLang servers.

routes.py     the ways, and which ones a run may take
ipc.py        by handles of shared memory, on the same devices
broadcast.py  by NCCL or gloo
buckets.py    what both have in common
"""
