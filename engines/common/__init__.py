"""What learners of every framework share: their phases, the parts of their checkpoints, and going
on from one. No framework.
"""
