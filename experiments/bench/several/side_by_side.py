"""Cases beside each other, each on cards of its own: a host of eight cards stands idle for less."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rljax.experiments.bench.several.case import Case

Measure = Callable[[Case, tuple[str, ...], Callable[[], int]], None]  # of case, cards, and the cases beside it so far


class Beside:
    """Counts the most cases that ran at the same time as one."""

    def __init__(self) -> None:
        self.most = 0

    def __call__(self) -> int:
        return self.most


def side_by_side(todo: Sequence[Case], cards: Sequence[str], may_begin: Callable[[Case], bool], measure: Measure) -> list[Case]:
    """Measures cases as cards become free, those of fewer cards first.

    Args:
      todo: cases; none takes more than all `cards`.
      cards: names of the cards, as CUDA_VISIBLE_DEVICES has them.
      may_begin: whether there is time for a case.
      measure: measures one on the cards that it is given, in a thread of its own; raises nothing.

    Returns:
      The cases that were not begun.
    """
    waiting = sorted(todo, key=lambda case: case.cards)
    free, left = list(cards), list[Case]()
    running: dict[str, Beside] = {}
    changed = threading.Condition()

    def one(case: Case, taken: tuple[str, ...], beside: Beside) -> None:
        try:
            measure(case, taken, beside)
        finally:
            with changed:
                free.extend(taken)
                free.sort(key=list(cards).index)
                del running[case.name]
                changed.notify()

    with changed:
        while waiting or running:
            fits = next((case for case in waiting if case.cards <= len(free)), None)
            if fits is None:
                changed.wait()
                continue
            waiting.remove(fits)
            if not may_begin(fits):
                left.append(fits)
                continue
            taken = tuple(free[: fits.cards])
            del free[: fits.cards]
            running[fits.name] = Beside()
            for beside in running.values():
                beside.most = max(beside.most, len(running) - 1)
            threading.Thread(target=one, args=(fits, taken, running[fits.name]), name=fits.name, daemon=True).start()
    return left
