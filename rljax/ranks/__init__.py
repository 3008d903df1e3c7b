"""One learner of several processes, with one controller.

    rank 0   the run: loop, sampler, buffer, checkpoints ---- and its part of the learner
    rank 1   the follower: makes the same learner                 | collectives of the framework
    ...      and the same calls, in the same order               | (gloo, NCCL, XLA)

The leader's `TeamLearner` sends each call with its arrays to every follower over a socket and makes it itself; every rank sees
the whole batch and takes its own rows. An error that all ranks raise alike is raised once; one that a rank has alone ends the
run, and so does a rank that dies or hangs. The same command then goes on from the last checkpoint.

place.py        which process this is: torchrun's environment, the engine's own way (a TPU pod), or alone
team.py         the leader: starts or awaits the others, `TeamLearner`
links.py        its connections: calls, replies, and which rank began the trouble
follower.py     what the others do
rendezvous.py   how they find each other: WORKDIR/ranks/leader.json, while they gather
wire.py         frames: JSON and raw arrays, checksummed; a token
"""

from rljax.ranks.follower import follow
from rljax.ranks.place import Place, find_place
from rljax.ranks.team import Team

__all__ = ["Place", "Team", "find_place", "follow"]
