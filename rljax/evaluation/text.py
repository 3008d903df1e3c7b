"""Text of a result, as experiments.evaluate prints it."""

from __future__ import annotations

import statistics
from pathlib import Path

from rljax.evaluation.estimates import Estimate
from rljax.evaluation.results import Result
from rljax.evaluation.uses import History, role_of


def text(result: Result, history: History, path: Path) -> str:
    """Returns a table of the estimates, what they leave out, and a warning where one is due.

    Args:
      history: uses of the split, this one included.
      path: file of the result.
    """
    protocol, samples = result.protocol, [sample for prompt in result.prompts for sample in prompt.samples]
    sampled = "greedy" if protocol.greedy else f"temperature {protocol.temperature:g}, top_p {protocol.top_p:g}"
    lines = [
        f"{result.policy} on {result.name or 'valid_dataset'}",
        f"  split {protocol.split} ({role_of(protocol.split)}), {protocol.prompts} prompts x {protocol.n_samples} samples,"
        f" {sampled}, at most {protocol.max_new_tokens} tokens; protocol {protocol.digest}",
    ]
    table = result.estimates | {f"reward/{name}": estimate for name, estimate in result.components.items()}
    width = max(map(len, table))
    lines += [f"  {name:{width}}  {estimate}" for name, estimate in table.items()]
    lines += [f"  {line}" for line in _methods(list(table.values()))]
    cut = sum(sample.finish in ("length", "abort") for sample in samples) / len(samples)
    tokens = statistics.fmean(sample.tokens for sample in samples)
    lines.append(f"  {tokens:.1f} tokens per sample, {cut:.1%} cut at the limit")
    if failed := result.failed:
        kinds = ", ".join(f"{count} {kind}" for kind, count in failed.items())
        lines.append(f"  {kinds}: left out above; pass@1 with them as failures {result.pass_at_1_if_failures_fail:.4f}")
    if history.warning:
        lines.append(f"  warning: {history.warning}")
    return "\n".join([*lines, f"  {path}"])


def _methods(table: list[Estimate]) -> list[str]:
    """Says how the intervals are made, once for each method."""
    return [f"{table[0].level:.0%} intervals: {method}" for method in dict.fromkeys(each.method for each in table)]
