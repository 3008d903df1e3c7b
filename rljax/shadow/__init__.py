"""The shadow of a run: another engine's learner, in a process of its own, recomputes batches.

differences.py   what is compared, and bounds by dtype
process.py       the shadow's process, as the run sees it
learner.py       the run's learner, which hands over every so many batches
__main__.py      the shadow's side
"""

from rljax.shadow.learner import shadowed

__all__ = ["shadowed"]
