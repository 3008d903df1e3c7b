"""A learner of N fsdp ranks that restores another engine's checkpoint; run in N processes.

Each has RANK and the other variables of torchrun in its environment. Rank 0 writes OUT.

    python -m tests.unit.engines.cuda.learning.moved_torch_learner KIND MODEL WHOLE DAMAGED OUT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist

from rljax.config.allocation import Pool
from rljax.engines.cuda.learning.learner import TorchLearner
from rljax.errors import UserError
from rljax.testing.moving import KINDS, flat


def main() -> None:
    kind, (model, whole, damaged, out) = KINDS[sys.argv[1]], map(Path, sys.argv[2:])
    learner = TorchLearner(kind.config, Pool("fsdp", fsdp=int(os.environ["WORLD_SIZE"])), model)
    before = flat(learner.named_state())
    try:
        learner.restore(damaged if dist.get_rank() == 1 else whole)
    except UserError as error:
        print(f"rank {dist.get_rank()}: {error}")
    for name, array in flat(learner.named_state()).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    learner.restore(whole)
    found = flat(learner.named_state())
    if dist.get_rank() == 0:
        np.savez(out, **found)
    learner.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
