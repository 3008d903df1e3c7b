"""One of the processes of a learner: as sharded_learner, then a checkpoint and both kinds of
export by all processes together.

python -m tests.unit.engines.jax.learning.process_learner VOCABULARY DIRECTORY MESH, its place in the
environment
"""

import sys
from pathlib import Path

import jax
import numpy as np

from rljax.backends.jax.multihost import leave, together
from rljax.config.allocation import Pool
from rljax.engine import ExportToDirectory, ExportToSampler
from rljax.engines.jax.learning.distributed import join
from rljax.engines.jax.learning.learner import JaxLearner
from rljax.errors import UserError
from rljax.testing.learner_batches import config_of
from tests.unit.engines.jax.learning.sharded_learner import SETTINGS, batch_of, flat, pool, step


def adapted(mesh: str, model: Path, directory: Path, vocabulary: int) -> dict[str, np.ndarray]:
    """With adapters, a critic and a warm-up, saved and restored."""
    settings = {"actor.lora.rank": 4, "actor.adv_estimator": "gae", "warmup.steps": 1}
    learner, batch = JaxLearner(config_of(**SETTINGS, **settings), pool(mesh), model), batch_of(vocabulary)
    learner.update_supervised(batch)
    reference = learner.score_reference(batch)
    learner.update(batch.replace(reference_logp=reference, values=learner.values(batch)))
    learner.update_critic(batch.replace(values=learner.values(batch)))
    saved = learner.begin_save(directory / "adapted")
    learner.export(ExportToDirectory(directory / "merged"))  # beside the write, with collectives of its own
    saved.result()
    together(lambda: None)  # process 0 has written what describes the whole
    again = JaxLearner(config_of(**SETTINGS, **settings), pool(mesh), model)
    again.restore(directory / "adapted")
    found = {"reference": again.score_reference(batch), "values": again.values(batch), "score": again.score(batch)}
    np.testing.assert_array_equal(found["score"], learner.score(batch))
    np.testing.assert_array_equal(found["values"], learner.values(batch))
    return found


def main() -> None:
    vocabulary, directory, mesh = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    join()
    model = directory / "model"
    found = step(mesh, model, vocabulary)  # leaves a checkpoint
    learner = JaxLearner(config_of(**SETTINGS), pool(mesh), model)
    learner.restore(model / f"checkpoint {mesh}")
    batch = batch_of(vocabulary)
    found["restored"] = learner.score(batch)
    found |= {f"restored parameter {name}": array for name, array in flat(learner._policy.trained).items()}
    try:
        learner.restore(directory / "nothing")
    except UserError as error:
        found["refusal"] = np.array(str(error))
    found["still"] = learner.score(batch)
    source = learner.export(ExportToSampler("memory", Pool("jax")))
    assert jax.process_count() == 1 or all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(source.params))
    found |= {
        f"published {jax.tree_util.keystr(path)}": np.asarray(leaf, np.float32)
        for path, leaf in jax.tree_util.tree_leaves_with_path(source.params)
    }
    learner.export(ExportToDirectory(directory / "export"))
    found |= {f"adapted {name}": array for name, array in adapted(mesh, model, directory, vocabulary).items()}
    if jax.process_index() == 0:
        np.savez(directory / "found.npz", **found)
    leave()


if __name__ == "__main__":
    main()
