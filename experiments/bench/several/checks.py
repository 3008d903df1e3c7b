"""Checks of the results: identities, bounds of the project, and goals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from rljax.experiments.bench.several.case import cards_of
from rljax.experiments.bench.several.place import Row
from rljax.shadow.differences import FLOAT32, Bounds

# In bfloat16 every layer rounds in its own order, and no run in float32 is beside these: each path alone is about 2% from the
# float32 gradient of a four-layer model.
BOUNDS = {"float32": FLOAT32, "bfloat16": Bounds(0.25, 0.05, 0.1)}
SHARE = 0.85  # of one card's tokens/s, on each of several
PLAN_OFF = 0.1  # of measured memory, that the plan may be out by
CURVES_APART = 0.1  # reward: two right runs of one config and another order of arrivals
ERRORS = 4.0  # standard errors
CLOSER = 4.0  # times closer to the learner's log-probs must servers be after a publish than before


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was checked. `ok` is None if a rehearsal can't judge it."""

    case: str
    what: str
    ok: bool | None
    text: str

    def __str__(self) -> str:
        mark = {True: "ok", False: "WRONG", None: "not judged"}[self.ok]
        return f"{mark:10s} {self.case}: {self.what}: {self.text}"


def check(rows: Mapping[str, Sequence[Row]], *, rehearsed: bool) -> list[Finding]:
    """Checks the rows of all parts (`Results.rows`); on a CPU speed and memory are not judged."""
    found: list[Finding] = []
    for part, of_part in CHECKS.items():
        found += of_part(rows.get(part, ()))
    goals = {"tokens/s a card", "peak memory"}
    return [dataclasses.replace(one, ok=None) if rehearsed and one.what in goals else one for one in found]


def of_learners(rows: Sequence[Row]) -> Iterator[Finding]:
    """Checks loss and gradient norm against one card's, and speed and memory."""
    for row in rows:
        bounds = BOUNDS[row["dtype"]]
        first = reference(rows, row, any_engine=True)
        loss = abs(row["loss"] - first["loss"]) / first["scale"]
        norm = abs(row["grad_norm"] - first["grad_norm"]) / first["grad_norm"]
        against = (
            f"{row['loss']:.6g} against {first['loss']:.6g} of {first['mode']}, bound {bounds.loss:g} of {first['scale']:.3g}"
        )
        yield Finding(row["case"], "loss", loss <= bounds.loss, against)
        text = f"{row['grad_norm']:.6g} against {first['grad_norm']:.6g}, bound {bounds.gradient:g}"
        yield Finding(row["case"], "gradient norm", norm <= bounds.gradient, text)
        alone = reference(rows, row)
        if cards_of(row["mode"]) > 1 and cards_of(alone["mode"]) == 1:
            share = share_of(row, alone)
            yield Finding(row["case"], "tokens/s a card", share >= SHARE, f"{share:.0%} of one card's, goal {SHARE:.0%}")
        if row.get("peak_gb") and row.get("planned_gb"):
            off = row["planned_gb"] / row["peak_gb"] - 1
            text = f"planned {row['planned_gb']:.1f} GB, measured {row['peak_gb']:.1f} ({off:+.0%})"
            yield Finding(row["case"], "peak memory", abs(off) <= PLAN_OFF, text)


def reference(rows: Sequence[Row], row: Row, *, any_engine: bool = False) -> Row:
    """Returns the row on the fewest cards, of the same shape or number of requests.

    It is of the same engine unless any may be.
    """
    engine = row["mode"].partition(":")[0]
    same = [other for other in rows if all(other.get(key) == row.get(key) for key in ("shape", "requests"))]
    own = [other for other in same if any_engine or other["mode"].startswith(f"{engine}:")]
    return min(own, key=lambda other: cards_of(other["mode"]))


def share_of(row: Row, alone: Row) -> float:
    """Returns tokens/s per card of a row over that of another."""
    return float(row["tokens_per_s"] / cards_of(row["mode"]) / (alone["tokens_per_s"] / cards_of(alone["mode"])))


def of_samplers(rows: Sequence[Row]) -> Iterator[Finding]:
    """Checks that every layout makes all tokens that were asked for."""
    for row in rows:
        wanted = reference(rows, row, any_engine=True)["tokens"]
        yield Finding(
            row["case"], "tokens", row["tokens"] == wanted, f"{row['tokens']} of {row['requests']} requests, {wanted} elsewhere"
        )


def of_runs(rows: Sequence[Row]) -> Iterator[Finding]:
    """Checks that no group is lost, no token is too old, and the curves are alike."""
    for row in rows:
        yield from of_steps(row)
        first = min(rows, key=lambda other: cards_of(other["mode"]))
        apart = abs(row["reward_last"] - first["reward_last"])
        bound = CURVES_APART + ERRORS * math.hypot(row["reward_error"], first["reward_error"])
        text = f"{row['reward_last']:.3f} at the end against {first['reward_last']:.3f} of {first['mode']}, bound {bound:.3f}"
        yield Finding(row["case"], "curves", apart <= bound, text)


def of_steps(row: Row) -> Iterator[Finding]:
    """Checks that every step was made, on as many groups as it takes, of young enough tokens.

    Each publish must have gone by the run's own transport.
    """
    whole = row["state"] == "finished" and row["steps"] == row["asked"]
    yield Finding(row["case"], "steps", whole, f"{row['steps']} of {row['asked']}, {row['state']}")
    wanted = row["steps"] * row["batch"]
    lost = f"{row['groups']:g} of {wanted} trained on, {row['dropped']:g} dropped"
    yield Finding(row["case"], "groups", row["groups"] == wanted and not row["dropped"], lost)
    back = row["fell_back"]
    yield Finding(row["case"], "transport", not back, f"{back} publishes went by a directory because the run's own failed")
    young = row["lag_least"] >= 0 and row["lag"] <= row["lag_bound"]
    yield Finding(row["case"], "lag", young, f"{row['lag_least']:g} to {row['lag']:g}, bound {row['lag_bound']}")


def of_publishes(rows: Sequence[Row]) -> Iterator[Finding]:
    """Checks that all servers have the learner's weights after the last publish."""
    for row in rows:
        near = row["error"] * CLOSER < row["before"]
        text = f"log-probs {row['error']:.2g} nats from the learner's, {row['before']:.2g} before"
        yield Finding(row["case"], f"weights by {row['transport']}", near, text)


def of_faults(rows: Sequence[Row]) -> Iterator[Finding]:
    """Checks that the run goes on, or ends and says why, within its bound, and drops no group."""
    for row in rows:
        bound = row["bound_s"] + (row["after"] * row["step_s"] if row["survived"] else 0.0)
        if row["survived"]:
            right, text = (
                row["went_on"],
                f"went on for {row['after']} steps" if row["went_on"] else f"did not go on: {row['said']}",
            )
        else:
            right = not row["went_on"] and row["exit_status"] == 1 and row["state"] == "failed" and "rank" in row["said"]
            text = f"status {row['exit_status']}, {row['state']}: {row['said'] or 'nothing said'}"
        yield Finding(row["case"], "outcome", bool(right), text)
        yield Finding(row["case"], "seconds", row["seconds"] <= bound, f"{row['seconds']:.1f}, bound {bound:.0f}")
        yield Finding(row["case"], "groups", not row["dropped"], f"{row['dropped']:g} dropped")


def of_moves(rows: Sequence[Row]) -> Iterator[Finding]:
    """Checks that each path goes on with the step behind the other's last."""
    last: dict[str, int] = {}
    for row in rows:
        yield from of_steps(row)
        wanted = last.get(row["case"], 0) + 1
        yield Finding(
            row["case"], f"goes on, {row['mode']}", row["first_step"] == wanted, f"step {row['first_step']}, due {wanted}"
        )
        last[row["case"]] = row["last_step"]


CHECKS: dict[str, Callable[[Sequence[Row]], Iterator[Finding]]] = {
    "learners": of_learners,
    "samplers": of_samplers,
    "runs": of_runs,
    "publish": of_publishes,
    "faults": of_faults,
    "move": of_moves,
}
