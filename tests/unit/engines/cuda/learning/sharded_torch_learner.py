"""One step of the learner on each mesh of N ranks; run in N processes.

Each has RANK and the other variables of torchrun in its environment. Rank 0 writes OUT.npz.

    python -m tests.unit.engines.cuda.learning.sharded_torch_learner MODEL OUT d2 f2 t2 ...
"""

import re
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from rljax.config.allocation import Pool
from rljax.engine import ExportToDirectory, ExportToSampler, WeightsAtLeader, WeightsBroadcast
from rljax.engines.cuda.learning.learner import TorchLearner
from rljax.testing.learner_batches import config_of, episodes, first_fit, pack, untimed

LETTERS = {"d": "data", "f": "fsdp", "t": "tensor", "c": "context"}
SETTINGS = {
    "actor.optimizer.eps": 1e-2,  # else the first step of Adam is the sign of the gradient, noise included
    "critic.optimizer.eps": 1e-2,
    "actor.kl_ctl": 0.1,
    "actor.entropy_coef": 0.01,
    "actor.adv_estimator": "gae",
    "actor.gradient_checkpointing": "full",
    "actor.mb_spec.rows_per_mb": 2,
}
VARIANTS = {  # by the name of the directory that results go to
    "lora": {"actor.lora.rank": 4, "actor.lora.alpha": 8.0},
    "sequences": {"actor.importance_sampling_level": "sequence", "actor.behav_imp_weight_level": "sequence"},
}


def pool(text: str) -> Pool:
    return Pool("fsdp", **{LETTERS[letter]: int(count) for letter, count in re.findall(r"([dftc])(\d)", text)})


def batch_of():
    items = episodes(14)
    return pack(items, first_fit(items, 64), 64)


def one_row():
    """Makes a batch with fewer rows than ranks, so that some ranks have only padding."""
    items = episodes(2, longest=16)
    return pack(items, [[0, 1]], 32)


def step(layout: str, model: Path, out: Path, settings: dict) -> dict[str, np.ndarray]:
    """Returns the results of one step and the state after it: whole arrays by name."""
    learner = TorchLearner(config_of(**SETTINGS | settings), pool(layout), model)
    batch = batch_of()
    found = {"score": learner.score(batch), "score of one row": learner.score(one_row())}
    reference = learner.score_reference(batch)
    proximal = np.where(batch.loss_mask, found["score"] + 0.1 * np.sin(batch.token_ids), 0).astype(np.float32)
    means = learner.update(batch.replace(proximal_logp=proximal, reference_logp=reference))
    means |= learner.update_critic(batch.replace(values=learner.values(batch)))
    found |= {f"metric {name}": np.array([m.sum, m.count, m.min, m.max]) for name, m in untimed(means).items()}
    state = learner.named_state()
    found |= {f"{place} {name}": np.asarray(a) for place, arrays in state.items() for name, a in arrays.items()}
    found |= {"after": learner.score(batch), "values": learner.values(batch)}
    short = one_row()
    learner.update(short.replace(reference_logp=learner.score_reference(short)))
    saved = learner.begin_save(out / f"checkpoint {layout}")
    found["later"] = learner.score(batch)
    learner.export(ExportToDirectory(out / f"export {layout}"))
    sent = learner.export(ExportToSampler("gloo", Pool("sglang")))  # the other ranks have gathered with rank 0 by now
    if isinstance(sent, WeightsBroadcast):
        found |= {f"sent {name}": tensor.float().numpy() for name, tensor in sent.sender.tensors}
    else:
        assert sent == WeightsAtLeader() and dist.get_rank() > 0
    learner.score_reference(short)  # beside the write, with collectives of its own; copies weights in and back
    saved.result()
    dist.barrier()  # rank 0 has written what describes the whole
    learner.close()
    # Collectives that were begun and never waited for: torch keeps their tensors until the process ends.
    found["left in flight"] = np.array(torch._C._distributed_c10d._get_work_registry_size())
    return found


def moved(source: str, target: str, model: Path, out: Path, settings: dict) -> np.ndarray:
    """Scores under the checkpoint of one layout, restored on another."""
    learner = TorchLearner(config_of(**SETTINGS | settings), pool(target), model)
    learner.restore(out / f"checkpoint {source}")
    score = learner.score(batch_of())
    learner.close()
    return score


def main() -> None:
    model, out, layouts = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    settings = VARIANTS.get(out.name, {})
    found = {layout: step(layout, model, out, settings) for layout in layouts}
    for source, target in zip(layouts, [*layouts[1:], layouts[0]], strict=True):
        found[target]["moved"] = moved(source, target, model, out, settings)
        found[target]["moved from"] = found[source]["later"]
    if dist.get_rank() == 0:
        arrays = {f"{layout}|{name}": array for layout, arrays in found.items() for name, array in arrays.items()}
        np.savez(out / "found.npz", **arrays)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
