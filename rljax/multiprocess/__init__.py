"""One learner of several processes, with one controller.

    rank 0   the run: loop, sampler, buffer, checkpoints ---- and its part of the learner
    rank 1   the follower: makes the same learner                 | collectives of the framework
    ...      and the same calls, in the same order               | (gloo, NCCL, XLA)

The leader's `DistributedLearner` sends each call with its arrays to every follower over a socket
and makes it itself; every rank sees the whole batch and takes its own rows. An error that all
ranks raise alike is raised once; one that a rank has alone ends the run, and so does a rank that
dies or hangs. The same command then goes on from the last checkpoint.

find.py         which process this is: torchrun's environment, the engine's own way (a TPU pod), or alone
leader.py       rank 0: starts or awaits the others, `DistributedLearner`
followers.py    rank 0's connections: calls, replies, and which rank failed first
follower.py     what the other ranks do
rendezvous.py   how they find each other: WORKDIR/ranks/leader.json, until all are connected
"""

from rljax.engine.rank import ProcessRank
from rljax.multiprocess.find import find_rank
from rljax.multiprocess.follower import follow
from rljax.multiprocess.leader import Leader

__all__ = ["Leader", "ProcessRank", "find_rank", "follow"]
