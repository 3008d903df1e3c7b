import jax
import jax.numpy as jnp

from rljax.backends.jax.profile import SKIPPED, TRACED, StepTrace, newest_trace


def test_a_trace_is_of_a_few_steps_and_written_once(tmp_path, monkeypatch):
    calls = []
    start, stop = jax.profiler.start_trace, jax.profiler.stop_trace
    monkeypatch.setattr(jax.profiler, "start_trace", lambda where: (calls.append("start"), start(where)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: (calls.append("stop"), stop()))
    trace = StepTrace(str(tmp_path))
    for _ in range(SKIPPED + TRACED + 2):
        with trace.step():
            jnp.ones(4).sum().block_until_ready()
            calls.append("step")
    assert calls == ["step"] * SKIPPED + ["start"] + ["step"] * TRACED + ["stop"] + ["step"] * 2
    assert newest_trace(tmp_path).stat().st_size


def test_without_a_directory_nothing_is_traced(monkeypatch):
    monkeypatch.delattr(jax.profiler, "start_trace")
    trace = StepTrace("")
    for _ in range(SKIPPED + 2):
        with trace.step():
            pass
