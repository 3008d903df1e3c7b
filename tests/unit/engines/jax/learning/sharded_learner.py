"""Run in a process of its own with 8 forced host devices: one step of the learner on each mesh,
and results in an .npz file.

python -m tests.unit.engines.jax.learning.sharded_learner VOCABULARY OUT.npz d1 f2t2 ...
"""

import re
import sys
from pathlib import Path

import jax
import numpy as np

from rljax.backends.jax.multihost import fetch
from rljax.config.allocation import Pool
from rljax.config.schema import ModelConfig
from rljax.engines.jax.learning.learner import JaxLearner
from rljax.hf import init_directory
from rljax.testing.learner_batches import config_of, episodes, first_fit, pack, untimed

LETTERS = {"d": "data", "f": "fsdp", "t": "tensor"}
SETTINGS = {
    "actor.optimizer.eps": 1e-2,  # else the first step of Adam is the sign of the gradient, noise included
    "actor.kl_ctl": 0.1,
    "actor.entropy_coef": 0.01,
    "actor.gradient_checkpointing": "full",
}


def pool(text: str) -> Pool:
    return Pool("jax", **{LETTERS[letter]: int(count) for letter, count in re.findall(r"([dft])(\d)", text)})


def batch_of(vocabulary: int):
    items = episodes(14)
    batch = pack(items, first_fit(items, 64), 64)
    return batch.replace(token_ids=batch.token_ids % vocabulary)


def flat(tree) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): fetch(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def step(mesh: str, directory: Path, vocabulary: int) -> dict[str, np.ndarray]:
    shards = pool(mesh).data * pool(mesh).fsdp
    learner = JaxLearner(config_of(**SETTINGS, **{"actor.mb_spec.rows_per_mb": max(4 // shards, 1)}), pool(mesh), directory)
    batch = batch_of(vocabulary)
    found = {"score": learner.score(batch)}
    reference = learner.score_reference(batch)
    proximal = np.where(batch.loss_mask, found["score"] + 0.1 * np.sin(batch.token_ids), 0).astype(np.float32)
    means = learner.update(batch.replace(proximal_logp=proximal, reference_logp=reference))
    found |= {f"metric {name}": np.array([m.sum, m.count, m.min, m.max]) for name, m in untimed(means).items()}
    saved = learner._phases.rl.actor.saved()
    found |= {f"gradient {name}": array for name, array in flat(saved["mu"]).items()}
    found |= {f"parameter {name}": array for name, array in flat(learner._policy.trained).items()}
    spread = [a.sharding.is_fully_replicated for a in jax.tree.leaves(saved["nu"]["layers"])]
    assert pool(mesh).fsdp * pool(mesh).tensor == 1 or not all(spread), "moments lie as the parameters do"
    learner.save(directory / f"checkpoint {mesh}")
    return found | {"after": learner.score(batch)}


def moved(source: str, target: str, directory: Path, vocabulary: int) -> None:
    """A checkpoint of one mesh on another and back: not a bit changes, and the target goes on from
    it.
    """
    config = config_of(**SETTINGS)
    there = JaxLearner(config, pool(target), directory)
    there.restore(directory / f"checkpoint {source}")
    there.save(directory / "there")
    back = JaxLearner(config, pool(source), directory)
    back.restore(directory / f"checkpoint {source}")
    want = flat(back._tree(back._phases))
    back.restore(directory / "there")
    jax.tree.map(np.testing.assert_array_equal, flat(back._tree(back._phases)), want)
    score = there.score(batch_of(vocabulary))
    np.testing.assert_allclose(score, back.score(batch_of(vocabulary)), atol=2e-5)


def main() -> None:
    vocabulary, out, meshes = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    directory = out.parent / f"model{vocabulary}"
    make_model(directory, vocabulary)
    found = {mesh: step(mesh, directory, vocabulary) for mesh in meshes}
    moved(meshes[0], meshes[-1], directory, vocabulary)
    np.savez(out, **{f"{mesh}|{name}": array for mesh, arrays in found.items() for name, array in arrays.items()})


def make_model(directory: Path, vocabulary: int) -> None:
    shape = dict(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
    model = ModelConfig(
        "qwen3", **shape, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.02, tokenizer="char"
    )
    init_directory(model, directory, seed=0, vocab_size=vocabulary, eos_token_ids=[2])


if __name__ == "__main__":
    main()
