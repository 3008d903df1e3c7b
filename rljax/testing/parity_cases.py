"""Inputs of the parity suite.

Where nothing is trained the arrays hold NaN, inf and 89.
"""

import numpy as np

R, M = 4, 12  # rows, tokens a row

# name -> keyword arguments; every term of rljax/objective/losses.py in every mode
TERMS = [
    ("clipped_surrogate", dict(clip_low=0.2, clip_high=0.28, dual_clip=None)),
    ("clipped_surrogate", dict(clip_low=0.2, clip_high=0.2, dual_clip=3.0)),
    ("sequence_surrogate", dict(clip_low=0.1, clip_high=0.15, dual_clip=None)),
    ("sequence_surrogate", dict(clip_low=0.1, clip_high=0.15, dual_clip=1.3)),
    ("cispo", dict(clip_low=0.9, clip_high=0.28)),
    ("kl_loss", dict(estimator="k1")),
    ("kl_loss", dict(estimator="k2")),
    ("kl_loss", dict(estimator="k3")),
    ("entropy_bonus", {}),
    ("value_loss", dict(clip=None)),
    ("value_loss", dict(clip=0.2)),
    ("distillation", {}),
    ("negative_log_likelihood", {}),
]

# name -> keyword arguments; functions of [R, m] without a gradient
ARRAYS = [
    ("behavior_weight", dict(cap=None, mode="clamp", level="token")),
    ("behavior_weight", dict(cap=2.0, mode="clamp", level="token")),
    ("behavior_weight", dict(cap=2.0, mode="mask", level="token")),
    ("behavior_weight", dict(cap=5.0, mode="clamp", level="sequence")),
    ("behavior_weight", dict(cap=5.0, mode="mask", level="sequence")),
    ("interpolated_proximal", {}),
    ("kl_penalty", dict(estimator="k1")),
    ("kl_penalty", dict(estimator="k2")),
    ("kl_penalty", dict(estimator="k3")),
]

KINDS = ("ordinary", "clipped", "stale", "extreme", "one_token", "all_masked", "empty")


def inputs(kind: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Draws all arguments that a term may have, by name."""
    random = np.random.default_rng([KINDS.index(kind), seed])
    shape = (R, 0) if kind == "empty" else (R, M)

    def normal(mean: float, std: float) -> np.ndarray:
        return random.normal(mean, std, shape)

    drift = {"clipped": 0.6, "extreme": 12.0}.get(kind, 0.1)
    lag = {"stale": 2.0, "extreme": 12.0}.get(kind, 0.2)
    logp = -np.abs(normal(2, 1))
    proximal_logp = logp + normal(0, drift)
    arrays = {
        "logp": logp,
        "proximal_logp": proximal_logp,
        "behavior_logp": proximal_logp + normal(0, lag),
        "reference_logp": logp + normal(0, 0.5),
        "teacher_logp": logp + normal(0, 0.5),
        "advantage": normal(0, 1),
        "weight": np.abs(normal(0, 0.1)) + 0.01,
        "importance": np.abs(normal(1, 0.2)),
        "interpolation": random.choice([0.0, 0.5, 0.75, 1.0], shape),
        "entropy": np.abs(normal(1, 0.5)),
        "values": normal(0, 1),
        "proximal_values": normal(0, 1),
        "returns": normal(0, 1),
    }
    mask = random.random(shape) < 0.7
    if kind == "all_masked":
        mask[:] = False
    if kind == "one_token":
        mask[:], mask[2, 5] = False, True
    segment_ids = np.minimum(1 + np.cumsum(random.random(shape) < 0.3, axis=1), M)
    for name, array in arrays.items():
        garbage = random.choice([np.nan, np.inf, -np.inf, 89.0, -89.0], array.shape)
        arrays[name] = np.where(mask, array, garbage)
    return arrays | {"mask": mask, "segment_ids": np.where(mask, segment_ids, 0)}
