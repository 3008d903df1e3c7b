"""Runs of the loop on the fake engine: what the tests of it share."""

from rljax.testing.harness import MemorySink

ASYNC = {"rollout.max_head_offpolicyness": 2}


NOT_COMPARED = ("timeperf/", "perf/", "rollout/wait/")  # of this machine, at that time


class Killed(BaseException):
    """Stands for kill -9 at a point of the run: nothing of ours catches it."""


class Sinks:
    """Makes the sinks of successive runs in the same directory."""

    def __init__(self, at=None, act=None):
        self.opened = []
        self._at, self._act = at, act

    def __call__(self, first_step):
        self.opened.append(MemorySink(first_step))
        outer = self

        class Acting(MemorySink):
            def write(self, step, metrics):
                super().write(step, metrics)
                if step == outer._at and outer._act:
                    act, outer._act = outer._act, None
                    act()

        self.opened[-1] = Acting(first_step)
        return self.opened[-1]

    def lines(self):
        """Returns the lines of metrics.jsonl: a later run cuts those after its first step."""
        lines = {}
        for sink in self.opened:
            lines = {step: line for step, line in lines.items() if step <= sink.first_step}
            for step, line in sink.steps.items():
                lines[step] = lines.get(step, {}) | line
        return lines


def kill():
    raise Killed


def compared(lines):
    """Compares to the bit; NaN equals NaN."""
    return {step: {k: repr(v) for k, v in line.items() if not k.startswith(NOT_COMPARED)} for step, line in lines.items()}


def assert_once(run, n_prompts, epochs):
    """Exactly once."""
    trained = run.engine.learner.trained
    assert {uid: len(steps) for uid, steps in trained.items()} == {
        f"{epoch}/{index}": 1 for epoch in range(epochs) for index in range(n_prompts)
    }
