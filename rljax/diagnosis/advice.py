"""Causes and next experiments of rules, in the words of another trainer whose log is judged."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Mapping

from rljax.config.schema import Config

OWN = "rljax"
# Config keys of ours, and the trainer's own for the same
KEYS: Mapping[str, Mapping[str, str]] = {
    "trl": {
        "actor.optimizer.lr": "learning_rate",
        "actor.optimizer.gradient_clipping": "max_grad_norm",
        "actor.eps_clip": "epsilon",
        "actor.kl_ctl": "beta",
        "actor.mask_no_eos": "mask_truncated_completions",
        "gconfig.max_new_tokens": "max_completion_length",
        "gconfig.n_samples": "num_generations",
        "gconfig.temperature": "temperature",
    },
    "verl": {
        "actor.optimizer.lr": "actor_rollout_ref.actor.optim.lr",
        "actor.optimizer.gradient_clipping": "actor_rollout_ref.actor.grad_clip",
        "actor.eps_clip": "actor_rollout_ref.actor.clip_ratio",
        "actor.kl_ctl": "actor_rollout_ref.actor.kl_loss_coef",
        "actor.entropy_coef": "actor_rollout_ref.actor.entropy_coeff",
        "gconfig.max_new_tokens": "data.max_response_length",
        "gconfig.n_samples": "actor_rollout_ref.rollout.n",
        "gconfig.temperature": "actor_rollout_ref.rollout.temperature",
        "train_dataset.batch_size": "data.train_batch_size",
    },
}
_SECTIONS = "|".join(field.name for field in dataclasses.fields(Config))
_KEY = re.compile(rf"(?<![\w./])(?:{_SECTIONS})\.[a-z][\w.]*\w")
_NAME = re.compile(r"[a-z][\w-]*(?:/[\w-]+)+")  # of a metric: words with slashes between them
_REFERENCE = re.compile(r": see ([a-z]+\.[a-z_]+(?: and [a-z]+\.[a-z_]+)*)")  # to rules
# Commands, files, flags and metrics that only a run of rljax has
_OURS = re.compile(
    r"\brljax\b|\bWORKDIR\b|--workdir|\b(?:config|context)\.json\b|\w\.jsonl\b|deterministic=|(?:rollout|ppo_actor|timeperf)/"
)


def reword(text: str, trainer: str) -> str:
    """Returns advice with the trainer's keys for ours, less the clauses that only rljax can follow.

    Args:
      text: clauses with "; " between them.
      trainer: the trainer that wrote the log; OWN leaves the text as it is.
    """
    if trainer == OWN:
        return text
    reworded = (_clause(clause, KEYS.get(trainer, {})) for clause in text.split("; "))
    return "; ".join(clause for clause in reworded if clause)


def rename(text: str, theirs: Mapping[str, str]) -> str:
    """Returns a text with names of metrics replaced.

    Args:
      theirs: our name -> their name, of whole distributions and of their /avg, /min and /max.
    """
    if not theirs:
        return text
    return _NAME.sub(lambda match: theirs.get(match[0], match[0]), text)


def refer(text: str, unjudged: Container[str]) -> str:
    """Returns a cause without its references to rules that could not be judged.

    Example: refer("tokens are stale: see freshness.stale_weights", {"freshness.stale_weights"})
        gives "tokens are stale"
    """

    def judged(match: re.Match[str]) -> str:
        rules = [rule for rule in match[1].split(" and ") if rule not in unjudged]
        return f": see {' and '.join(rules)}" if rules else ""

    return _REFERENCE.sub(judged, text)


def _clause(clause: str, keys: Mapping[str, str]) -> str:
    """Rewords a clause; "" if it names what the trainer does not have."""
    clause = clause.replace("rljax train ", "train ")
    if _OURS.search(clause) or any(key not in keys for key in _KEY.findall(clause)):
        return ""
    return _KEY.sub(lambda match: keys[match[0]], clause)
