"""Faults that the tests of the core must see, each one line: `python -m tests.mutation`."""

from __future__ import annotations

from tests.mutation.fault import Fault
from tests.mutation.input_output_faults import COMES_OUT, GOES_IN

MODEL = "tests/unit/rollout/test_buffer_and_journal_model.py"
PRODUCER = "tests/unit/rollout/test_producer.py"
GUARD = "tests/unit/test_guard_actions.py"  # rollbacks
BUFFER = ("tests/unit/rollout/test_buffer.py", PRODUCER, GUARD, MODEL)
JOURNAL = ("tests/unit/rollout/test_journal.py", MODEL)
TRACKER = (PRODUCER,)
CHECKPOINTS = ("tests/unit/checkpoints",)
PACKING = ("tests/unit/batching",)
LOSSES = ("tests/unit/objective/test_losses.py",)
ADVANTAGES = (
    "tests/unit/objective/test_advantages.py",
    "tests/unit/objective/test_reward_shaping.py",
    "tests/unit/rollout/test_episode_parts.py",
)
STEP = ("tests/unit/test_train_step.py",)
EPISODES = (
    PRODUCER,
    "tests/unit/test_driver.py",
    "tests/unit/rollout/test_episode_timeout.py",
    "tests/unit/rollout/test_episode_parts.py",
)
DOORS = ("tests/unit/messaging",)
FILES = ("tests/unit/test_file_fuzz.py", *CHECKPOINTS)
GUARDS = ("tests/unit/metrics/test_guardrails.py",)


def _of(file: str, tests: tuple[str, ...], *lines: tuple[str, str]) -> list[Fault]:
    return [Fault(file, old, new, tests, EQUIVALENT.get(old, "")) for old, new in lines]


# Faults that nothing can see, and why; docs/testing.md has them too.
EQUIVALENT = {
    "os.ftruncate(self._file, whole)": "what is left of a torn record is overwritten by the next ones, and a reader ends at it",
    "if count * dtype.itemsize > len(body) - start:": "numpy refuses a body that is too short with a ValueError too",
}


FAULTS = (
    *_of(
        "rljax/rollout/buffer.py",
        BUFFER,
        ("+ self.version - self.undone + 1)", "+ self.version - self.undone + 2)"),
        ("+ self.version - self.undone + 1)", "+ self.version + 1)"),
        ("fresh - self.accepted - running)", "fresh - self.accepted)"),
        ("min(limits.max_concurrent - running,", "min(limits.max_concurrent,"),
        ("self.drawn >= self.limits.prompts", "self.drawn > self.limits.prompts"),
        ("ticket = self._requeued.popleft()", "ticket = self._requeued[0]"),
        ("failures=ticket.failures + own_fault))", "failures=ticket.failures + 1))"),
        ("attempt=ticket.attempt + 1, failures=", "attempt=ticket.attempt, failures="),
        ("if not (self._ready and self.complete):", "if not self._ready:"),
        ("self.consumed += size", "self.consumed += 1"),
        ("self._ready[0].oldest < self._floor:", "self._ready[0].oldest < self._floor - 1:"),
        ("return self.version - self.limits.max_lag", "return self.version - self.limits.max_lag - 1"),
        ("dataclasses.replace(entry.ticket, attempt=entry.ticket.attempt + 1)", "entry.ticket"),
        ("t.loss_mask & (t.versions >= self._floor)", "t.loss_mask & (t.versions > self._floor)"),
        ("[*self._running.values(), *self._requeued], key", "[*self._running.values()], key"),
        ("self.undone = self.version - (state", "self.undone = self.version - 1 - (state"),
        ('self._source.restore(state["source"])', "pass"),
        ("[entry.ticket for entry in entries]", "[]"),
    ),
    *_of(
        "rljax/rollout/journal.py",
        JOURNAL,
        ("if newest > version:", "if newest > version + 1:"),
        ("Record(ticket, group) if accepted else", "Record(ticket, group) if True else"),
        ("os.ftruncate(self._file, whole)", "pass"),
        ("os.lseek(self._file, whole, os.SEEK_SET)", "os.lseek(self._file, 0, os.SEEK_SET)"),
        ("data = data[os.write(self._file, data) :]", "os.write(self._file, data); break"),
        ("(r.ticket.prompt.uid, r.ticket.attempt): r", "(r.ticket.prompt.uid, 0): r"),
        ("if path.name not in names:", "if path.name in names:"),
        ("        self._path(step).unlink(missing_ok=True)\n        self._open[step]", "        self._open[step]"),
        ("            if newest > version:\n                continue\n", ""),
        ("for other in self._open.keys() - {step}:", "for other in ():"),
        ("start += length", "start += length - 1"),
    ),
    *_of(
        "rljax/checkpoints/recovery.py",
        CHECKPOINTS,
        ("self.journals.begin_beside(step, self.buffer.version)", "self.journals.begin(step, self.buffer.version)"),
        ("undone = self.checkpoints.take_away([step])", "undone = []"),
        ("        self.journals.settle(draft.step)\n", ""),
        ("self.journals.abandon(draft.step)", "pass"),
        ("learned.result()  #", "pass  #"),
        ('write_entries(directory / "ready.journal", self.entries)', 'write_entries(directory / "ready.journal", [])'),
        ("self.buffer.restore(saved.book, entries)", "self.buffer.restore(saved.book, [])"),
        ("if usable is not None and checkpoint.step not in usable:", "if False:"),
        ("[step for step in steps if step <= last]", "[step for step in steps if step < last]"),
    ),
    *_of("rljax/checkpoints/loop_state.py", CHECKPOINTS, ('json.dumps(loop | {"book"', 'json.dumps({} | {"book"')),
    *_of("rljax/checkpoints/store.py", CHECKPOINTS, ("        sync_tree(self.path)\n", ""), ("sync(self.directory)", "pass")),
    *_of(
        "rljax/rollout/tracker.py",
        TRACKER,
        ("self._buffer.requeue(ticket, own_fault=False)", "self._buffer.requeue(ticket, own_fault=True)"),
        ("self._count_failure(Failure(error.kind, error))", "pass"),
        ("oldest >= version - self._buffer.limits.max_lag:", "True:"),
        ("if result.failures and not result.trajectories:", "if result.failures:"),
        ("        self._failures = []\n        group", "        group"),
        ("ticket.failures + 1 >= self._config", "ticket.failures >= self._config"),
        ("if not (own_fault and ticket.failures):", "if True:"),
        ("if len(self._failures) >= limit:", "if len(self._failures) > limit:"),
        ("            self._rejected = 0\n", ""),
        ("self._journals.append(ticket, group, accepted=result.wanted)", "pass"),
    ),
    *_of(
        "rljax/batching/packing.py",
        PACKING,
        ("* self.shape[1] + self.offset", "* self.shape[1]"),
        ("- first[self.row[order]] + 1", "- first[self.row[order]]"),
        ("- np.repeat(first, self.length)], np.int32)", "], np.int32)"),
        ("np.where(mask, weight, np.float32(0))", "weight"),
        ("+ nth * np.repeat(length, taken)", "+ nth"),
    ),
    *_of(
        "rljax/objective/losses.py",
        LOSSES,
        ("inside & (used == ratio), -ratio", "inside, -ratio"),
        ("over_segments(difference, mask, segment_ids) / length)", "over_segments(difference, mask, segment_ids))"),
        ("np.clip(ratio, 1 - clip_low, 1 + clip_high)", "np.clip(ratio, 1 - clip_low, 1 + clip_low)"),
        ('cap if mode == "clamp" else 0.0, weight)', "cap, weight)"),
        ("np.where(interpolation == 1, logp,", "np.where(interpolation == 1, behavior_logp,"),
        ("return 0.5 * difference**2", "return difference**2"),
        ("logp=weight * importance * log_ratio(", "logp=weight * log_ratio("),
        ("np.where(larger & (moved != values), 0.0, slope)", "slope"),
        ("1 + clip_high, np.inf if", "1 + clip_low, np.inf if"),
        ("np.where(advantage >= 0, 0.0, 1 - clip_low)", "np.where(advantage >= 0, 0.0, 1 - clip_high)"),
    ),
    *_of(
        "rljax/objective/oracle.py",
        LOSSES,
        ("loss + coef * term.sum", "loss + term.sum"),
        ("d_entropy = loss + objective.entropy_coef * term.sum", "d_entropy = loss - objective.entropy_coef * term.sum"),
    ),
    *_of(
        "rljax/objective/advantages.py",
        (*ADVANTAGES, *STEP),
        ("rewards -= actor.kl_ctl * kl", "rewards -= 0 * kl"),
        ("later = np.where(trained, 0.0, reward)", "later = np.zeros_like(reward)"),
        ("next_value = np.where(trained, value, next_value)", "next_value = value"),
        ("discount * gae_lambda * next_advantage", "gae_lambda * next_advantage"),
        ("np.where(equal, 0.0, x - mean)", "x - mean"),
        ("n = np.rint(np.bincount(ids, weight))", "n = np.bincount(ids)"),
        ("others = np.maximum(n - 1, 1)[ids]", "others = np.maximum(n, 1)[ids]"),
        ('mean_leave1out=True, std_level="none")', 'mean_leave1out=False, std_level="none")'),
    ),
    *_of(
        "rljax/train_step.py",
        STEP,
        ("packed.gather(learner.score_reference(rows))", "packed.gather(learner.score(rows))"),
        ("reference_logp=reference)", "reference_logp=None if reference is None else [t.behavior_logp for t in trajectories])"),
        (
            "config.actor.loss_aggregation, config.aggregation_constant)",
            "config.actor.loss_aggregation, config.gconfig.max_new_tokens)",
        ),
        ("in_loss = reference if actor.kl_placement", "in_loss = None if actor.kl_placement"),
        (
            "minibatches = split(scored.trajectories, config.actor.ppo_n_minibatches)",
            "minibatches = split(scored.trajectories, 1)",
        ),
        ("versions, version, k, len(minibatches))", "versions, version, 0, len(minibatches))"),
        ("groups = without_truncated(groups)", "pass"),
    ),
    *_of(
        "rljax/objective/aggregation.py",
        ("tests/unit/objective/test_aggregation.py",),
        ("/ (sequences * max(count, 1))", "/ max(count, 1)"),
        ("[1.0 / (sequences * constant)]", "[1.0 / constant]"),
    ),
    *_of(
        "rljax/objective/proximal.py",
        ("tests/unit/objective/test_proximal.py",),
        ("span = lag + progress", "span = lag + 1"),
    ),
    *_of(
        "rljax/objective/reward_shaping.py",
        ADVANTAGES,
        ("(task - penalty + actor.reward_bias) *", "(task + actor.reward_bias) * actor.reward_scaling - penalty + 0 *"),
        ("if trajectory.finish != Finish.LENGTH:", "if trajectory.finish == Finish.STOP:"),
        ("lengths - (max_new_tokens - overlong_tokens)", "lengths - max_new_tokens"),
    ),
    *_of(
        "rljax/rollout/producer.py",
        EPISODES,
        ("isinstance(error, RequestLost) or attempt >", "attempt >"),
        ("attempt > self._retries:", "attempt >= self._retries:"),
        ("isinstance(error, TimeoutError) and limit.expired()", "isinstance(error, TimeoutError)"),
        ("prompt.uid, sample, ticket.attempt)", "prompt.uid, 0, ticket.attempt)"),
        ("prompt.uid, sample, ticket.attempt)", "prompt.uid, sample, 0)"),
        ("check_token_ids(parts_of(result, 0), vocab_size)", "pass"),
        ("if not isinstance(verdict, bool | np.bool_):", "if False:"),
        ("async with asyncio.timeout(self._timeout):", "async with asyncio.timeout(None):"),
        ("if not self._tracker.settle_recovered(ticket):", "if True:"),
    ),
    *_of(
        "rljax/messaging/listener.py",
        DOORS,
        ("while len(self._unproved) >= MAX_UNPROVED and", "while False and"),
        ("_hang_up(oldest)  # its thread forgets it", "pass"),
        ("self._forget(connection)  # it has proved", "pass  # it has proved"),
        ("if (reason := self._refusal_reason(hello)) is not None:", "if (reason := self._refusal_reason(hello)) and False:"),
        ("if oldest is not None and error.errno in EXHAUSTED:", "if False:"),
    ),
    *_of(
        "rljax/messaging/web_server.py",
        DOORS,
        ("while len(self._strangers) >= MAX_STRANGERS:", "while False:"),
        (">= MIN_TURNS:", ">= 0:"),
        ("            oldest.abort()", "            pass"),
        ("        self._came(self._transport)", "        pass"),
        ("        if error.errno in EXHAUSTED:", "        if False:"),
        ("        server.forget(request.transport)", "        pass"),
    ),
    *_of(
        "rljax/messaging/handshake.py",
        DOORS,
        ("[*self._transcript, reason])", "self._transcript)"),
        ('if message.kind != "hello" or not _is_nonce(nonce) or', 'if message.kind != "hello" or'),
        ("or not _is_flat(hello):", ":"),
        ("transcript = [self._nonce, nonce, hello]", "transcript = [nonce, hello]"),
    ),
    *_of(
        "rljax/messaging/framing.py",
        DOORS,
        ("prefix.header > limits.header or prefix.body > limits.body:", "prefix.header > limits.header:"),
        ("if not _is_whole(prefix, header, body):", "if False:"),
        ("    if start != len(body):", "    if False:"),
        ("or name in arrays or", "or"),
        ("if count * dtype.itemsize > len(body) - start:", "if False:"),
    ),
    *_of(
        "rljax/checkpoints/integrity.py",
        FILES,
        ("value = zlib.crc32(chunk, value)", "pass"),
        ("files_below(directory) - recorded - {directory / MANIFEST, ", "files_below(directory) - {directory / MANIFEST, "),
        ('needed=("files", "step")', 'needed=("files",)'),
    ),
    *_of(
        "rljax/metrics/guardrails.py",
        GUARDS,
        ("if not fatal and self._bad[key] %", "if self._bad[key] %"),
        ("for record in (self._bad, self._lines, self._since):", "for record in (self._lines, self._since):"),
        ("self._rewarded**2 * self._prob", "self._prob"),
        ('"finite" not in self._lines', '"finite" in self._lines'),
        ('if last == "skipped" and mean.sum > 0:', "if False:"),
    ),
    *GOES_IN,
    *COMES_OUT,
)
