"""The results as Markdown, for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rljax.experiments.bench.several.checks import reference, share_of
from rljax.experiments.bench.several.place import Row

Cells = Sequence[str]


def markdown(machine: Row, rows: Mapping[str, Sequence[Row]]) -> str:
    """Returns a table for each part that has rows, below a line with machine, versions and date."""
    sglang = f", SGLang {machine['SGLang']}" if machine["SGLang"] else ""
    where = f"{machine['device']}; {machine['versions']}{sglang}; {machine['date']}"
    if machine["rehearsed"]:
        where += (
            ". A rehearsal on the CPU: forced devices, gloo in place of NCCL, tiny shapes; CUDA IPC and NCCL are not rehearsed"
        )
    beside = max((row.get("beside", 0) for of_part in rows.values() for row in of_part), default=0)
    if beside:
        where += f". Cases that take fewer cards ran beside up to {beside} others, each on cards of its own"
    found = [where]
    for part, (head, cells) in TABLES.items():
        if of_part := list(rows.get(part, ())):
            found.append(f"### {part}\n\n{table(head, cells(of_part))}")
    return "\n\n".join(found) + "\n"


def table(head: Cells, rows: Iterator[Cells]) -> str:
    """Returns a table; a | in a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _learners(rows: Sequence[Row]) -> Iterator[Cells]:
    for row in rows:
        share = share_of(row, reference(rows, row))
        memory = [number(row.get("peak_gb")), number(row.get("planned_gb"))]
        numbers = [f"{row['tokens_per_s']:,}", f"{share:.0%}", number(row["mfu"] and 100 * row["mfu"], 1), *memory]
        yield [row["shape"], row["mode"], number(row["ms"], 0), *numbers, f"{row['loss']:.6f}", f"{row['grad_norm']:.6f}"]


def _samplers(rows: Sequence[Row]) -> Iterator[Cells]:
    for row in rows:
        alone = reference(rows, row)
        times = row["tokens_per_s"] / alone["tokens_per_s"]
        yield [
            row["mode"],
            str(row["requests"]),
            str(row["tokens"]),
            f"{row['tokens_per_s']:,}",
            number(times),
            number(row.get("peak_gb")),
        ]


def _runs(rows: Sequence[Row]) -> Iterator[Cells]:
    for row in rows:
        median = row["median"]
        phases = [number(median[phase], 3) for phase in ("wall", "update", "publish", "score", "wait")]
        reward = f"{row['reward_first']:.2f}, {row['reward_last']:.2f}"
        yield [
            row["mode"],
            str(row["steps"]),
            reward,
            f"{row['lag']:g} ({row['lag_bound']})",
            f"{row['groups']:g}, {row['dropped']:g}",
            *phases,
        ]


def _publishes(rows: Sequence[Row]) -> Iterator[Cells]:
    for row in rows:
        seconds = [number(row[key], 3) for key in ("seconds", "least", "first", "export")]
        yield [row["model"], row["mode"], row["transport"], str(row["decoding"]), *seconds, f"{row['error']:.1e}"]


def _faults(rows: Sequence[Row]) -> Iterator[Cells]:
    for row in rows:
        became = f"went on ({row['after']} steps)" if row["went_on"] else f"status {row['exit_status']}: {row['said']}"
        yield [row["fault"], row["mode"], became, number(row["seconds"], 1), number(row["bound_s"], 0)]


def _moves(rows: Sequence[Row]) -> Iterator[Cells]:
    for row in rows:
        steps = f"{row['first_step']} to {row['last_step']}"
        yield [
            row["mode"],
            steps,
            f"{row['reward_last']:.2f}",
            f"{row['lag']:g} ({row['lag_bound']})",
            f"{row['groups']:g}, {row['dropped']:g}",
        ]


TABLES: dict[str, tuple[Cells, Callable[[Sequence[Row]], Iterator[Cells]]]] = {
    "learners": (
        (
            "model",
            "learner",
            "step (ms)",
            "tokens/s",
            "a card, of one card's",
            "MFU (%)",
            "GB",
            "planned",
            "loss",
            "gradient norm",
        ),
        _learners,
    ),
    "samplers": (("sampler", "requests", "tokens", "tokens/s", "times one card's", "GB"), _samplers),
    "runs": (
        (
            "mode",
            "steps",
            "reward, first and last",
            "lag (bound)",
            "groups, dropped",
            "step (s)",
            "update",
            "publish",
            "score",
            "wait",
        ),
        _runs,
    ),
    "publish": (("model", "mode", "by", "decoding", "seconds", "least", "first", "export", "error (nats)"), _publishes),
    "faults": (("fault", "mode", "what became of it", "seconds", "bound"), _faults),
    "move": (("mode", "steps", "reward at the end", "lag (bound)", "groups, dropped"), _moves),
}
