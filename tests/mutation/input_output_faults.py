"""Faults of what goes into a run and what comes out of it: `python -m tests.mutation "in: "`, `"out: "`.

Each is one that a user of such a system has met: a wrong answer that looks like a right one.
"""

from __future__ import annotations

from tests.mutation.fault import Fault

UNIT = "tests/unit"
RECORDS, CHAT = f"{UNIT}/data/test_chat_records.py", f"{UNIT}/chat/test_chat.py"
FORMATS, FUNCTIONS = f"{UNIT}/data/test_formats.py", f"{UNIT}/rewards/test_reward_functions.py"
AMOUNTS = f"{UNIT}/rewards/test_amounts.py"
LIBRARY, LOOP, DIRECTORY = (
    f"{UNIT}/experiments/test_library.py",
    f"{UNIT}/test_loop_end.py",
    f"{UNIT}/sinks/test_run_directory.py",
)
AREAL, AGREEMENT, EXPORT = (
    f"{UNIT}/config/test_areal_formulas.py",
    f"{UNIT}/hf/test_agreement.py",
    f"{UNIT}/checkpoints/test_export.py",
)
SANITY, FINDINGS = f"{UNIT}/sanity/test_sanity.py", f"{UNIT}/experiments/test_check_findings.py"
CONTROL, LENGTHS = f"{UNIT}/chat/test_control_tokens.py", f"{UNIT}/data/test_lengths.py"
TORCH, JAX = "tests/parity/test_torch_parity.py::TestTorchParity", "tests/parity/test_jax_parity.py::TestJaxParity"
RATE, SHOWN = f"{UNIT}/config/test_learning_rate.py", f"{UNIT}/sinks/test_display_sinks.py"
WRITTEN = f"{UNIT}/experiments/test_train.py::test_a_run_says_what_it_is_and_a_start_that_fails_changes_no_record"


def _seen_by(what: str, tests: str, *lines: tuple[str, str, str]) -> list[Fault]:
    """Returns faults of one kind, each a file, its line and the wrong one, that the same tests see."""
    return [Fault(file, old, new, tuple(tests.split()), what=what) for file, old, new in lines]


GOES_IN = (
    *_seen_by(
        "in: labeled examples are not measured before the start",
        f"{RECORDS}::test_an_example_that_is_too_long_is_refused_or_left_out_and_counted",
        ("rljax/data/selection.py", "(whole := length_of_example(prompt)) > self._labels.most:", "(whole := 0):"),
        ("rljax/data/selection.py", "if self._dataset.max_length is None:", "if False:"),
    ),
    *_seen_by(
        "in: labeled examples are not measured before the start",
        f"{LIBRARY}::test_what_can_be_known_of_the_data_is_one_line_before_a_run_begins",
        ("experiments/train.py", "            labels=labels,\n", ""),
    ),
    *_seen_by(
        "in: a tokenizer has ids that the model has not",
        f"{AGREEMENT}::test_a_model_with_fewer_ids_than_its_tokenizer_is_refused_with_the_first_of_them",
        ("rljax/hf/agreement.py", "    if needed:", "    if False:"),
    ),
    *_seen_by(
        "in: a tokenizer has ids that the model has not",
        f"{LIBRARY}::test_what_can_be_known_of_the_data_is_one_line_before_a_run_begins",
        ("experiments/train.py", "    agreement.check(model_dir, tokenizer)\n", ""),
    ),
    *_seen_by(
        "in: a reward is no number within float32",
        f"{UNIT}/rollout/test_rewards_of_workflows.py",
        ("rljax/rollout/producer.py", "checked = tuple(map(with_numbers, parts))", "checked = tuple(parts)"),
        ("rljax/types.py", "    if abs(number) > LARGEST_REWARD:", "    if False:"),
    ),
    *_seen_by(
        "in: a model that no learner reads is damaged",
        f"{UNIT}/hf/test_hf_weights.py::test_a_model_that_only_a_server_reads_is_checked_as_the_learner_does",
        ("rljax/hf/read_model.py", "    reader.check_numbers()", "    pass"),
        ("rljax/hf/read_model.py", "            reader.check(spec)", "            pass"),
    ),
    *_seen_by(
        "in: an edit in another file of the user's goes unnoticed",
        f"{UNIT}/config/test_sources.py",
        ("rljax/config/sources.py", "                self._want(target, (*names, *rest))", "                pass"),
        ("rljax/config/sources.py", "                self.add(target, [", "                print(target, ["),
        ("rljax/config/sources.py", "                self.add(module.__name__, [", "                print(["),
    ),
    *_seen_by(
        "in: bytes that are no text",
        f"{FORMATS}::test_a_mark_of_utf8_is_no_part_of_the_first_record "
        f"{FORMATS}::test_a_surrogate_that_stands_alone_is_no_text",
        ("rljax/data/records.py", "if self._bytes[: len(codecs.BOM_UTF8)] == codecs.BOM_UTF8:", "if False:"),
        ("rljax/data/records.py", 'if "\\\\u" in text:', "if False:"),
    ),
    *_seen_by(
        "in: gold answers without dollars",
        f"{FUNCTIONS}::test_a_gold_answer_is_mathematics_with_or_without_dollars",
        ("rljax/rewards/mathematics.py", 'f"${escaped(as_union(text) or text)}$")', "escaped(as_union(text) or text))"),
    ),
    *_seen_by(
        "in: gold answers that are not understood",
        f"{FUNCTIONS}::test_a_gold_answer_that_is_not_understood_rejects_its_samples_and_is_known_at_the_start",
        (
            "rljax/rewards/mathematics.py",
            "if all(isinstance(part, str) for part in parsed):",
            "if not parsed and answer is None:",
        ),
    ),
    *_seen_by(
        "in: answers in the forms that models write",
        f"{FUNCTIONS}::test_four_hashes_count_where_a_number_follows",
        ("rljax/rewards/final_answer.py", 're.compile(rf"[\\s*_($]*{AMOUNT}")', 're.compile(rf"[^\\d]*?{AMOUNT}")'),
        ("rljax/rewards/amounts.py", "(?:(?:[A-Z]{{1,3}})?\\s?\\\\?[$€£¥])?", "(?:\\\\?[$€£¥])?"),
        ("rljax/rewards/amounts.py", "(?P<sign>[-+]?)", "(?P<sign>-?)"),
        (
            "rljax/rewards/final_answer.py",
            "for match in reversed(list(_HASHES.finditer(text))):",
            "for match in _HASHES.finditer(text):",
        ),
    ),
    *_seen_by(
        "in: amounts with the words around them",
        f"{AMOUNTS}::test_a_number_in_a_box_is_that_number_whatever_its_unit",
        ("rljax/rewards/units.py", "has_vowel = re.search(", "has_vowel = lower in _NAMES and re.search("),
        ("rljax/rewards/amounts.py", 'latex.replace("\\\\$", "$")', "latex"),
    ),
    *_seen_by(
        "in: amounts with the words around them",
        f"{AMOUNTS}::test_a_word_that_changes_the_number_makes_another_answer",
        ("rljax/rewards/mathematics.py", "if amount.modifiers and amount.modifiers !=", "if False and amount.modifiers !="),
        (
            "rljax/rewards/mathematics.py",
            "return [] if gold.amount and is_changed(given.source) else [given.text]",
            "return [given.text]",
        ),
        ("rljax/rewards/mathematics.py", "or _asks_for_percent(prompt)", "or True"),
    ),
    *_seen_by(
        "in: amounts with the words around them",
        f"{AMOUNTS}::test_a_different_unit_is_wrong_and_another_spelling_is_right",
        ("rljax/rewards/mathematics.py", "if units.differ(gold.unit, _unit_of(given)):", "if False:"),
        ("rljax/rewards/mathematics.py", "else unit_at_end(given.source)", "else units.Unit()"),
    ),
    *_seen_by(
        "in: amounts with the words around them",
        f"{AMOUNTS}::test_a_base_is_not_lost",
        ("rljax/rewards/mathematics.py", "if gold.digits is not None:", "if False:"),
    ),
    *_seen_by(
        "in: answers in the forms that models write",
        f"{FUNCTIONS}::test_the_last_box_that_is_closed_wins",
        ("rljax/rewards/final_answer.py", "reversed(list(_BOX.finditer(text))):", "list(_BOX.finditer(text)):"),
    ),
    *_seen_by(
        "in: answers in the forms that models write",
        f"{FUNCTIONS}::test_a_hedge_is_no_answer",
        ("rljax/rewards/final_answer.py", "return other is None or", "return True or"),
        ("rljax/rewards/final_answer.py", "_LAST_ALTERNATIVES.search(plain)) and", "None) and"),
    ),
    *_seen_by(
        "in: what a template opens for sampling is learned as if it were said",
        f"{CHAT}::test_what_is_learned_is_what_the_conversation_has_behind_the_prompt",
        (
            "rljax/chat/labeled_turns.py",
            "text = template.render(chat, generation=False)",
            'text = prompts[len(chat.messages) - 1] + chat.messages[-1]["content"]',
        ),
        (
            "rljax/chat/labeled_turns.py",
            "return Turn(start, start + found[1], True)",
            "return Turn(start, start + found[0], True)",
        ),
    ),
    *_seen_by(
        "in: what a message says is dropped",
        f"{RECORDS}::test_a_record_keeps_its_calls_reasoning_tools_and_arguments_up_to_the_workers "
        f"{RECORDS}::test_what_a_template_can_not_take_is_told_by_file_and_line_before_anything_starts "
        f"{UNIT}/chat/test_messages.py",
        ("rljax/chat/messages.py", 'return found | ({"tool_calls": calls} if calls else {})', "return found"),
        ("rljax/chat/messages.py", "        if key not in KEYS:", "        if False:"),
        (
            "rljax/chat/messages.py",
            'KEYS = ("role", "content", "tool_calls", "tool_call_id",',
            'KEYS = ("role", "content", "tool_calls",',
        ),
    ),
    *_seen_by(
        "in: prompts are left out in silence",
        f"{UNIT}/data/test_prompts.py::test_what_max_length_leaves_out_is_counted_and_said",
        (
            "rljax/data/selection.py",
            'log.warning("%s: %d of %d prompts are longer',
            'log.debug("%s: %d of %d prompts are longer',
        ),
    ),
    *_seen_by(
        "in: a run says nothing of itself",
        WRITTEN,
        ("experiments/main.py", 'standard_logging.getLogger("rljax").setLevel(standard_logging.INFO)', "pass"),
        (
            "experiments/recording.py",
            'handler = _log_to(run.path / "log.txt", max_log_mb << 19)',
            'handler = _log_to(Path("/dev/null"), 1)',
        ),
        ("rljax/run/announcement.py", 'log.info("data: %d', 'log.debug("data: %d'),
    ),
    *_seen_by(
        "in: a run that goes on does not say from where",
        f"{LIBRARY}::test_a_cosine_that_goes_on_says_what_becomes_of_the_rate",
        ("rljax/run/announcement.py", '"" if saved is None else f", to go on from step {saved}"', '""'),
    ),
    *_seen_by(
        "in: an async function is called and not awaited",
        f"{UNIT}/test_driver.py::test_a_filter_may_be_async_or_a_name_and_has_to_answer "
        f"{FORMATS}::test_a_format_that_is_async_is_refused",
        (
            "rljax/rollout/producer.py",
            "    if inspect.isawaitable(verdict):",
            "    if inspect.isawaitable(verdict):\n        return True\n    if False:",
        ),
        ("rljax/config/registry.py", "    if not may_be_async and (", "    if False and ("),
    ),
    *_seen_by(
        "in: a reward reads fields that records lack",
        f"{UNIT}/rewards/test_check.py {UNIT}/rewards/test_shapes.py",
        ("rljax/rewards/check.py", "if fault.lacks_field or len(faults)", "if len(faults)"),
        ("rljax/rewards/shapes.py", "missing = [field for field in self.reads if field not in prompt.fields]", "missing = []"),
    ),
    *_seen_by(
        "in: a reward reads fields that records lack",
        f"{LIBRARY}::test_what_can_be_known_of_the_data_is_one_line_before_a_run_begins",
        (
            "experiments/train.py",
            "await trials.enter_async_context(checked(rewards, config.reward.name, records, tokenizer))",
            "pass",
        ),
    ),
    *_seen_by(
        "in: a key of another system by its name",
        AREAL,
        ("rljax/config/foreign/areal_objective.py", 'if mode == "disabled":', "if False:"),
        (
            "rljax/objective/reward_shaping.py",
            "(task - penalty + actor.reward_bias) * actor.reward_scaling",
            "(task + actor.reward_bias) * actor.reward_scaling - penalty",
        ),
        ("rljax/config/foreign/areal_objective.py", 'lambda t: t.get("actor.mask_no_eos_with_zero"),', "lambda t: False,"),
        (
            "rljax/config/foreign/areal_objective.py",
            'lambda t: _has_section(t, "critic") and _has_section(t, "actor.reward_norm"),',
            "lambda t: False,",
        ),
        ("rljax/config/foreign/areal.py", 'else "areal_gsm8k"', 'else "gsm8k"'),
    ),
    *_seen_by(
        "in: texts that are not there are not told",
        f"{SANITY}::test_prompts_that_ask_nothing_and_answers_that_teach_nothing_are_counted_with_the_first_place",
        ("rljax/sanity/blanks.py", 'if m["role"] != "system")', ")"),
        (
            "rljax/sanity/blanks.py",
            "return not (text_of(message).strip() or shown or told)",
            "return not text_of(message).strip()",
        ),
        ("rljax/sanity/blanks.py", "if FIELD not in prompt.fields and all", "if all"),
        ("rljax/sanity/blanks.py", "if field == OWN_REPLY and prompt.reply:", "if False:"),
        ("rljax/sanity/blanks.py", "{where(uids[0])}", "{where(uids[-1])}"),
    ),
    *_seen_by(
        "in: a check names what is no longer there",
        f"{FINDINGS}::test_an_error_about_a_model_from_scratch_names_no_directory_that_is_gone",
        ("experiments/main.py", '.replace(str(scratch / "init"), FROM_SCRATCH)', ""),
    ),
    *_seen_by(
        "in: prompts are counted otherwise than they are sampled",
        f"{CONTROL}::test_counts_of_many_texts_are_those_of_their_ids",
        ("rljax/chat/control_tokens.py", "return [length + sum(shared) for length in lengths]", "return lengths"),
        ("rljax/chat/control_tokens.py", "head = max((match.start()", "head = max((match.end()"),
    ),
    *_seen_by(
        "in: some prompts are not looked at",
        f"{LENGTHS}::test_every_prompt_that_is_used_is_seen_once_and_in_order_be_it_remembered_or_not",
        ("rljax/data/selection.py", "        elif seen is not None:", "        elif seen is None:"),
        ("rljax/data/selection.py", "for index in selected.kept.tolist():", "for index in range(self.count):"),
    ),
    *_seen_by(
        "in: a family is refused by a field of its config",
        f"{AGREEMENT}::test_fields_of_a_family_that_is_not_implemented_here_may_be_anything",
        ("rljax/hf/spec.py", "json_fields.read_object(path, OF_ANY_FAMILY)", "json_fields.read_object(path, SCHEMA)"),
        (
            "rljax/hf/spec.py",
            "    json_fields.check(config, OF_ANY_FAMILY, where)\n",
            "    json_fields.check(config, SCHEMA, where)\n",
        ),
    ),
    *_seen_by(
        "in: a plan of a model whose layers it does not know",
        f"{UNIT}/planning/test_plan_refusals.py",
        ("rljax/planning/model_shape.py", "if not _has_shape(described):", "if False:"),
    ),
    *_seen_by(
        "in: a job on several hosts that its run would refuse",
        f"{UNIT}/launching/test_job.py",
        ("rljax/launching/job.py", "        find_plugin(engine).check_settings(config, pools)\n", "        pass\n"),
        ("rljax/launching/job.py", "            planner.usable(hosts.topology.chip)\n", "            pass\n"),
        ("rljax/launching/job.py", "    _check_learner(config, where, learns)\n", ""),
        ("rljax/launching/job.py", "        raise UserError(problem)\n", "        pass\n"),
        ("rljax/launching/job.py", "    _check_sampler(config, where, share)\n", ""),
    ),
    *_seen_by(
        "in: a job on several hosts that its run would refuse",
        f"{UNIT}/launching/test_files.py",
        ("rljax/launching/slurm.py", "if not value and name not in ALONE:", "if False:"),
        ("rljax/launching/slurm.py", "{_quoted(f'--{option}')}", "{f'--{option}'}"),
    ),
    *_seen_by(
        "in: the text model inside an image-text one is not found",
        f"{AGREEMENT}::test_the_text_part_of_an_image_text_model_is_a_model",
        ("rljax/hf/spec.py", 'part = TEXT_PARTS.get(config.get("model_type", ""))', "part = None"),
    ),
)

COMES_OUT = (
    *_seen_by(
        "out: less than asked, called finished",
        f"{LOOP}::test_a_run_whose_groups_are_all_rejected_is_not_finished "
        f"{LOOP}::test_a_run_that_did_less_than_it_was_asked_to_is_not_finished",
        (
            "rljax/rollout/limits.py",
            "return line, bool(failed) or by_steps or buffer.consumed",
            "return line, False and buffer.consumed",
        ),
        ("rljax/run/ending.py", "if not is_incomplete:", "if True:"),
        ("rljax/run/ending.py", "        raise IncompleteRun(error)\n", ""),
    ),
    *_seen_by(
        "out: more steps than asked, after a stop",
        f"{LOOP}::test_a_limit_on_steps_holds_where_a_run_goes_on_with_more_groups_ready",
        ("rljax/rollout/buffer.py", "self.consumed >= self.limits.groups", "self.consumed > self.limits.groups"),
    ),
    *(
        fault
        for backend, suite, exp in (("torch", TORCH, "torch.exp"), ("jax", JAX, "jnp.exp"))
        for fault in (
            *_seen_by(
                "out: a share of capped tokens beside a cap of sequences",
                f"{suite}::test_metrics_of_a_capped_sequence_are_those_of_the_sequence",
                (
                    f"backends/{backend}/objective.py",
                    "_weight_metrics(ratio, applied, mask, objective))",
                    f"_weight_metrics({exp}(losses.log_ratio(proximal, given[1], mask)), applied, mask, objective))",
                ),
            ),
            *_seen_by(
                "out: a clip ratio of another loss",
                f"{suite}::test_clip_ratio_is_of_what_the_loss_clipped",
                (
                    f"backends/{backend}/losses.py",
                    "return _surrogate(term, clipped, ratio, advantage)",
                    "return _surrogate(term, ratio, ratio, advantage)",
                ),
            ),
            *_seen_by(
                "out: means over the tokens that have an advantage, under the name of all",
                f"{suite}::test_metrics_are_over_all_trained_tokens_and_over_those_with_an_advantage",
                (
                    f"backends/{backend}/objective.py",
                    "for prefix, chosen in ((PREFIX, mask), (WITH_ADVANTAGE, active)):",
                    "for prefix, chosen in ((PREFIX, active), (WITH_ADVANTAGE, active)):",
                ),
            ),
        )
    ),
    *_seen_by(
        "out: config.json holds what no step was made with",
        f"{DIRECTORY}::test_configs_are_those_that_steps_were_made_with",
        ("rljax/sinks/config_record.py", "if not has_steps or not (workdir / FILE).exists():", "if True:"),
        (
            "rljax/sinks/run_directory.py",
            "if step > self._first_step and self._run.configs is not None:",
            "if self._run.configs is not None:",
        ),
        ("rljax/sinks/config_record.py", "            if first > step:", "            if False:"),
    ),
    *_seen_by(
        "out: a damaged line takes those behind it",
        f"{DIRECTORY}::test_a_damaged_line_is_kept_and_told_and_a_torn_last_one_goes",
        ("rljax/json_lines.py", "                damaged.append(position)", "                last, end = None, 0"),
        ("rljax/json_lines.py", "    if damaged:", "    if False:"),
        ("rljax/json_lines.py", 'json.loads(line) if line.endswith(b"\\n") else None', "json.loads(line)"),
    ),
    *_seen_by(
        "out: no model, or another",
        f"{EXPORT}",
        ("rljax/checkpoints/export.py", "found = checkpoints.best()", "found = next(checkpoints.intact(), None)"),
        ("rljax/checkpoints/export.py", "found = next(checkpoints.intact(), None)", "found = checkpoints.best()"),
        ("rljax/checkpoints/export.py", "whole + scale * (b", "whole + (b"),
        ("rljax/checkpoints/export.py", '"lora_alpha": lora.alpha', '"lora_alpha": lora.rank'),
        (
            "rljax/checkpoints/export.py",
            "whole = reader.read(name).astype(np.float32)",
            "whole = reader.read(name).astype(np.float16)",
        ),
    ),
    *_seen_by(
        "out: no model, or another",
        f"{UNIT}/run/test_evaluator.py",
        ("rljax/run/ending.py", "await asyncio.to_thread(self._export_best, step)", "pass"),
        ("rljax/run/ending.py", 'self.run.engine.learner.restore(best.path / "learner")', "pass"),
        (
            "rljax/loop.py",
            "return self.config.evaluator.best is not None and self.evaluator.score(self.step) is not None",
            "return False",
        ),
    ),
    *_seen_by(
        "out: no model, or another",
        f"{LIBRARY}::test_a_function_goes_to_the_reward_processes_with_what_it_refers_to",
        ("rljax/loop.py", "        if every and self.step % every == 0:", "        if False:"),
    ),
    *_seen_by(
        "out: an adapter that others don't read, or a run that does not begin with theirs",
        f"{UNIT}/hf/test_adapter.py",
        ("rljax/checkpoints/export.py", 'f"base_model.model.{name}": array', "name: array"),
        ("rljax/hf/adapter.py", '("rank", "r", config.rank), ', ""),
    ),
    *_seen_by(
        "out: what rounding eats of an update is not said",
        f"-m slow {UNIT}/engines/cuda/learning/test_torch_learner.py::test_both_learners_tell_what_rounding_takes_of_an_update",
        (
            "engines/cuda/learning/learner.py",
            "return phase.step(loss, cut) | {ROUNDED_AWAY: before.rounded_away()}",
            "return phase.step(loss, cut)",
        ),
    ),
    *_seen_by(
        "out: rewards of what is not trained decide on a group",
        f"{UNIT}/workflows/test_workflows.py::test_mixed_rewards_is_decided_on_what_is_trained",
        ("rljax/workflows/filters.py", "if mask_no_eos and name in FILTERS else accept", "if False else accept"),
    ),
    *_seen_by(
        "out: rewards of what is not trained decide on a group",
        f"{LIBRARY}::test_a_run_trains_on_no_group_that_differs_only_in_what_is_not_trained",
        ("experiments/train.py", "mask_no_eos=config.actor.mask_no_eos", "mask_no_eos=False"),
    ),
    *_seen_by(
        "out: a last step without a rate",
        f"{RATE}",
        (
            "rljax/config/learning_rate.py",
            "decay = max(total_steps - max(warmup - 1, 0), 1)",
            "decay = max(total_steps - max(warmup - 1, 0) - 1, 1)",
        ),
    ),
    *_seen_by(
        "out: a rate that changes in silence",
        f"{RATE} {LIBRARY}::test_a_cosine_that_goes_on_says_what_becomes_of_the_rate",
        ("rljax/config/learning_rate.py", "if was(done) == becomes(done) and done < before:", "if True:"),
        ("rljax/run/announcement.py", "    if before is None or before.total_steps is None:", "    if True:"),
    ),
    *_seen_by(
        "out: two views of one run that differ",
        f"{SHOWN}::test_wandb_shows_what_metrics_jsonl_shows_after_a_stop_and_after_a_kill",  # needs W&B's client
        ("rljax/sinks/wandb.py", "if newest is not None and newest > first_step:", "if False:"),
        ("rljax/sinks/wandb.py", "            self._tell_past(run)\n", "            pass\n"),
    ),
    *_seen_by(
        "out: two views of one run that differ",
        f"{SHOWN}",
        ("rljax/sinks/tensorboard.py", "step=first_step + 1, session_log=start", "step=0, session_log=start"),
    ),
)
