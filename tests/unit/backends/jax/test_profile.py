import jax
import jax.numpy as jnp

from rljax.backends.jax.profile import SKIPPED, TRACED, Span, StepTrace, newest_trace, op_times, own_times


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


def test_own_times_add_up_to_what_the_outermost_spans_cover():
    spans = [Span("loop", 0, 100), Span("dot", 10, 40), Span("pack", 15, 20), Span("add", 40, 45), Span("other", 120, 130)]
    alone = {span.name: time for span, time in own_times(spans)}
    assert alone == {"loop": 100 - 30 - 5, "dot": 30 - 5, "pack": 5, "add": 5, "other": 10}
    assert {span.name: time for span, time in own_times(spans[::-1])} == alone


def test_a_trace_of_the_cpu_counts_the_operations_of_a_loop(tmp_path):
    turns, calls = 7, 3
    program = jax.jit(lambda x: jax.lax.fori_loop(0, turns, lambda _, y: jnp.cumsum(y @ x, axis=0), x))
    x = jnp.eye(64)
    program(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(calls):
            program(x).block_until_ready()
    counted = {name: count for name, _, count in op_times(newest_trace(tmp_path))}
    assert counted["while"] == calls
    assert max(counted.values()) >= turns * calls
