"""One learner in several processes, with a single controller.

    rank 0   the leader: runs loop, sampler, buffer, checkpoints -- and its part of the learner
    rank 1   a follower: makes the same learner                   | collectives of the framework
    ...      and the same calls, in the same order                | (gloo, NCCL, XLA)

The leader's `DistributedLearner` sends each call with its arrays to all followers over sockets, and
makes the call itself. Each rank sees the whole batch and takes its own rows. An error that all
ranks raise alike is raised once. A rank that fails alone, dies or hangs ends the run; the same
command then resumes from the last checkpoint.

find.py         finds this process's rank: from the engine (a TPU pod), or in torchrun's variables
leader.py       rank 0: starts the others or waits for them; `DistributedLearner`
followers.py    rank 0's connections: calls, replies, and which rank failed first
follower.py     ranks 1 and up
pending.py      calls that go on after their reply, in all ranks
rendezvous.py   connects followers to their leader through WORKDIR/ranks/leader.json
"""

from rljax.engine.rank import ProcessRank
from rljax.multiprocess.find import find_rank
from rljax.multiprocess.follower import follow
from rljax.multiprocess.leader import Leader

__all__ = ["Leader", "ProcessRank", "find_rank", "follow"]
