"""Checks all that can be known before a run starts: config, data, tokenizer, model, rewards.

    python -m experiments.check --config=configs/quickstart.py
    python -m experiments.check --config=configs/quickstart.py --rollouts=8  # and samples

It makes no run directory and trains nothing. Exit status 0: ready, with or without warnings; 1: an
error, which would end the run or make it learn something else than what is meant. --rollouts=N also
samples N prompts as training would, and scores them. --json prints the findings as JSON
(docs/check.md). What is cheap of it is done at every start of a run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from absl import flags

from rljax.errors import UserError
from rljax.experiments import main

if TYPE_CHECKING:
    from rljax.chat.messages import Tool
    from rljax.config.allocation import Allocation
    from rljax.config.schema import Config
    from rljax.data import Labels
    from rljax.data.held_out import HeldOut
    from rljax.data.prompts import PromptSource
    from rljax.hf.tokenizer import Tokenizer
    from rljax.hf.weights import WeightReader
    from rljax.rewards import RewardPool
    from rljax.rollout.workflow import Workflow
    from rljax.sanity.findings import Finding
    from rljax.sanity.survey import Survey
    from rljax.types import Prompt

main.define_config_flags(workdir=False)
ROLLOUTS = flags.DEFINE_integer("rollouts", 0, "Prompts to sample and score as training would; 0: none.", lower_bound=0)
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of text.")

MOST_BYTES = 8_000_000_000  # of weights that are read for numbers that are not finite

T = TypeVar("T")


def check() -> None:
    from rljax.sanity.findings import Report

    config = main.config_from_flags()
    with main.scratch_directory() as scratch:
        report = Report(Checks(config, scratch).run())
    print(json.dumps(report.json()) if JSON.value else report, flush=True)
    if not report.is_ready:
        sys.exit(1)


class Checks:
    """Findings of a config. An error becomes a finding, and checks that don't need its part go on."""

    def __init__(self, config: Config, scratch: Path) -> None:
        """
        Args:
          scratch: an empty directory, for a model that is made from scratch.
        """
        self._config, self._scratch = config, scratch
        self._model_dir = scratch  # once there is one
        self._findings: list[Finding] = []

    def run(self) -> list[Finding]:
        """Makes all checks, in the order in which a run comes to their parts."""
        from rljax.rollout.limits import require_step
        from rljax.sanity.blanks import learned_field
        from rljax.sanity.survey import Survey
        from rljax.sanity.whole_numbers import compares_text

        pools = self._attempt("config", self._check_config)
        self._check_requirements(pools)
        tokenizer = self._attempt("actor.path", self._check_model, needs=("actor.path", "actor.init"))
        tools = self._attempt("rollout.workflow", self._added_tools) or ()
        system_prompt = self._config.train_dataset.system_prompt
        as_text = compares_text(self._config)
        survey = Survey("train_dataset", learned_field(self._config), system_prompt=system_prompt, as_text=as_text)
        opens = functools.partial(self._open_prompts, tokenizer, tools, survey)
        prompts = self._attempt("train_dataset", opens, needs=("train_dataset.path",))
        held_out = self._attempt("valid_dataset", lambda: self._open_held_out(tokenizer, tools)) or []
        if prompts is not None:
            sizes = ("train_dataset.batch_size", "rollout.consumer_batch_size", "total_train_")
            self._attempt("train_dataset", lambda: require_step(self._config, len(prompts)), needs=sizes)
        if tokenizer is not None and prompts is not None:
            self._check_texts(tokenizer, prompts)
            self._attempt("train_dataset", lambda: self._check_lengths(pools, tokenizer, prompts, held_out))
        workflow = None if tokenizer is None else self._attempt("rollout.workflow", lambda: self._workflow(tokenizer))
        builds = tokenizer is None or workflow is not None
        if workflow is not None:
            self._attempt("rollout.workflow", lambda: self._check_prompts(workflow, prompts, held_out))
        self._attempt("rollout.should_accept_fn", lambda: asyncio.run(self._check_filter()))
        if prompts is not None:
            played = self._attempt("train_dataset", lambda: self._check_sets(prompts, survey, held_out)) or []
            # An environment gives its own rewards
            if not self._attempt("environment", lambda: asyncio.run(self._check_environments(played))) and builds:
                rewards = functools.partial(self._check_rewards, prompts, tokenizer)
                self._attempt("reward", lambda: asyncio.run(rewards()), needs=("reward.name", "reward.weights"))
        if ROLLOUTS.value and pools is not None and tokenizer is not None and prompts is not None and builds:
            self._attempt("rollouts", lambda: asyncio.run(self._check_rollouts(pools, tokenizer, prompts)))
        return [self._without_scratch(finding) for finding in self._findings]

    def _without_scratch(self, finding: Finding) -> Finding:
        part, line, remedy = (
            main.without_scratch(text, self._scratch) for text in (finding.part, finding.line, finding.remedy)
        )
        return dataclasses.replace(finding, part=part, line=line, remedy=remedy)

    def _attempt(self, part: str, action: Callable[[], T], *, needs: Sequence[str] = ()) -> T | None:
        """Returns what an action returns; None after a UserError, which becomes a finding.

        Args:
          needs: keys, or beginnings of keys, without which the action has no sense: it is not tried
            if one of them has an error already, which it would only repeat.
        """
        from rljax.sanity.findings import Severity, of_error

        if any(found.severity is Severity.ERROR and found.part.startswith(tuple(needs)) for found in self._findings):
            return None
        try:
            return action()
        except UserError as error:
            self._findings.append(of_error(error, part))
            return None

    def _good(self, part: str, line: str) -> None:
        from rljax.sanity.findings import Finding, Severity

        self._findings.append(Finding(Severity.GOOD, part, line))

    def _check_config(self) -> Allocation | None:
        """Checks the config. Returns None after a value that can't be.

        The other parts go on with the defaults of such keys; what contradicts what is not looked
        at, as it depends on values that nobody chose.
        """
        from rljax import engine
        from rljax.config import checks as config_checks
        from rljax.config import io as config_io
        from rljax.config.no_effect import without_effect
        from rljax.sanity.findings import Finding, Severity, of_error

        if wrong := dict(config_checks.wrong_values(self._config)):
            self._findings += [of_error(error, key) for key, error in wrong.items()]
            self._config = config_io.with_defaults(self._config, wrong)
            line = f"the other parts are checked with the default of {', '.join(wrong)}"
            self._findings.append(Finding(Severity.NOTE, "config", line))
            return None
        config_checks.check(self._config)
        for line in without_effect(self._config):
            self._findings.append(Finding(Severity.NOTE, "config", line))
        self._config = config_io.resolve(self._config)
        pools = engine.allocate(self._config)
        engine.require_both(pools)
        engine.check(self._config, pools)
        self._good("config", f"no contradiction; allocation {pools}")
        return pools

    def _check_requirements(self, pools: Allocation | None) -> None:
        """Checks what a run needs of the machine, and does not need its model for."""
        from rljax import engine
        from rljax.run import requirements

        for require in requirements.OF_CONFIG:
            self._attempt("config", functools.partial(require, self._config))
        if pools is not None:
            self._attempt("allocation_mode", lambda: engine.check_devices(self._config, pools))

    def _check_model(self) -> Tokenizer:
        from rljax.hf.model_directory import prepare_model_directory
        from rljax.hf.read_model import read_model
        from rljax.hf.spec import ModelSpec
        from rljax.hf.tensors import parameter_count
        from rljax.hf.tokenizer import load_tokenizer
        from rljax.hf.weights import WeightReader
        from rljax.run import requirements
        from rljax.sanity import template

        directory = prepare_model_directory(self._config.actor, self._scratch / "init", seed=self._config.seed)
        self._model_dir = directory
        tokenizer = load_tokenizer(directory, self._config.rollout)
        self._findings += [*template.check_tokenizer(tokenizer, directory), *template.check_template(tokenizer)]
        for require in requirements.OF_MODEL:
            self._attempt("actor.path", functools.partial(require, self._config, directory))
        spec = read_model(directory)
        reader = WeightReader(directory)
        reader.check(spec)
        where = "made from scratch" if self._config.actor.init_from_scratch else str(directory)
        tensors = "all tensors there" if isinstance(spec, ModelSpec) else "tried when it is loaded (docs/families.md)"
        size, numbers = parameter_count(spec) / 1e6, _check_numbers(reader)
        self._good("model", f"{where}: {spec.architecture}, {size:.4g}M parameters, {tensors}, {numbers}")
        return tokenizer

    def _added_tools(self) -> Sequence[Tool]:
        from rljax.workflows import tools_of

        return tools_of(self._config.rollout)

    def _check_prompts(self, workflow: Workflow, prompts: PromptSource | None, held_out: Sequence[HeldOut]) -> None:
        """Checks that prompts have what the workflow needs of them. Raises UserError."""
        from rljax.workflows import check_prompts

        if prompts is not None and self._config.actor.loss != "sft":
            check_prompts(workflow, prompts.every(), prompts.where)
        for each in held_out:
            check_prompts(workflow, each.prompts, each.where)

    def _open_prompts(self, tokenizer: Tokenizer | None, tools: Sequence[Tool], survey: Survey) -> PromptSource:
        """Opens the training prompts, and adds all of them to the survey."""
        from rljax.data import open_prompts

        dataset = self._config.train_dataset
        if tokenizer is None:  # the model has an error of its own, and lengths can't be counted
            dataset = dataclasses.replace(dataset, max_length=None)
        return open_prompts(
            dataset,
            key="train_dataset",
            seed=self._config.seed,
            tokenizer=tokenizer,
            added_tools=tools,
            measure=tokenizer is not None,
            seen=survey.add,
        )

    def _open_held_out(self, tokenizer: Tokenizer | None, tools: Sequence[Tool]) -> list[HeldOut]:
        from rljax.data.held_out import open_held_out
        from rljax.sanity.findings import Finding, Severity

        if not self._config.valid_dataset.path:
            line = "none: learning and reward hacking will look the same"
            self._findings.append(Finding(Severity.WARNING, "valid_dataset", line, "valid_dataset.path, evaluator.freq_steps"))
            return []
        return open_held_out(self._config, tokenizer, tools)

    def _check_texts(self, tokenizer: Tokenizer, prompts: PromptSource) -> None:
        from rljax.sanity import template
        from rljax.sanity.prompts import ANSWER

        some = prompts.spread(1000)
        texts = {f"prompt {p.uid}": str(p.fields[ANSWER]) for p in some if isinstance(p.fields.get(ANSWER), str)}
        self._findings += template.check_text(tokenizer, texts)

    def _check_lengths(
        self, pools: Allocation | None, tokenizer: Tokenizer, prompts: PromptSource, held_out: Sequence[HeldOut]
    ) -> None:
        from rljax import engine
        from rljax.config.validation import key_of
        from rljax.data import Labels
        from rljax.sanity.lengths import check_lengths

        config = self._config
        room, why = engine.room_for_prompt(config, pools) if pools is not None else (None, "")
        lengths = prompts.lengths
        assert lengths is not None, "there is a tokenizer"
        limit = None if config.actor.loss == "sft" else room
        self._findings += check_lengths("train_dataset", lengths, limit=limit, why=why, skipped=prompts.skipped)
        if config.warmup.steps or config.actor.loss == "sft":
            most, why = engine.room_for_example(config)
            labels = Labels(config.warmup, tokenizer, most=most, why=why)
            examples = [_length(labels, prompt, prompts.where(prompt.uid)) for prompt in prompts.every()]
            self._findings += check_lengths("labeled examples", examples, limit=most, why=why)
        sampler = pools.sampler.engine if pools is not None and pools.sampler is not None else ""
        context = engine.find_plugin(sampler).context_length(config) if sampler else None
        if context is not None:
            self._check_turns(tokenizer, prompts, context, f"{sampler}.context_length={context}")
        for each in held_out:
            theirs = tokenizer.prompt_lengths(each.prompts)
            limit = None if context is None else context - 1
            self._findings += check_lengths(key_of(each.name), theirs, limit=limit, why=f"{sampler}.context_length={context}")

    def _check_turns(self, tokenizer: Tokenizer, prompts: PromptSource, context: int, why: str) -> None:
        from rljax.sanity.lengths import check_turns
        from rljax.workflows import tokens_between

        between = tokens_between(self._config.rollout, tokenizer, prompts.spread(1)[0])
        if between is not None and prompts.lengths is not None and self._config.actor.loss != "sft":
            why = f"{why}, rollout.workflow_args.feedback"
            self._findings += check_turns("train_dataset", prompts.lengths, between=between, context=context, why=why)

    def _check_sets(self, prompts: PromptSource, survey: Survey, held_out: Sequence[HeldOut]) -> list[Prompt]:
        """Checks the sets of prompts. Returns the training prompts that name an environment."""
        from rljax.sanity import start

        self._findings += [
            *start.check_splits(self._config),
            *survey.check(prompts.where),
            *start.check_sets(survey, held_out),
        ]
        return survey.played

    async def _check_environments(self, prompts: Sequence[Prompt]) -> bool:
        """Checks the environments that prompts name.

        Returns whether there is one; its rewards are its own.
        """
        from rljax.environments.checks import check_environments
        from rljax.sanity.findings import Finding, Severity

        remarks = await check_environments(prompts)
        self._findings += [Finding(Severity(remark.severity), "environment", remark.line, remark.remedy) for remark in remarks]
        return bool(remarks)

    async def _check_filter(self) -> None:
        from rljax.sanity.filters import check_filter
        from rljax.workflows import find_filter

        if (name := self._config.rollout.should_accept_fn) is not None:
            accept = find_filter(name, mask_no_eos=self._config.actor.mask_no_eos)
            self._findings += await check_filter(accept, self._config.gconfig.n_samples)

    async def _check_rewards(self, prompts: PromptSource, tokenizer: Tokenizer | None) -> None:
        from rljax.rewards import RewardPool
        from rljax.rewards.check import Records, check_records
        from rljax.sanity.findings import Finding, Severity
        from rljax.sanity.golds import SAMPLES, check_golds
        from rljax.sanity.prompts import ANSWER
        from rljax.sanity.rewards import check_rewards
        from rljax.workflows import scores_by_rewards

        if self._config.actor.loss == "sft":
            return
        async with RewardPool(self._config.reward) as rewards:
            if tokenizer is not None and not scores_by_rewards(self._workflow(tokenizer, rewards)):
                line = "the workflow does not say that it scores by the rewards of the config, so that none was tried"
                self._findings.append(Finding(Severity.NOTE, "reward", line))
                return
            records, success = Records.of_stream(prompts), self._config.evaluator.success
            every = records.prompts
            if len(every) < len(prompts):
                line = f"{len(every)} of {len(prompts)} records looked at, spread over the data"
                self._findings.append(Finding(Severity.NOTE, "reward", line))
            self._findings += check_golds(self._config, prompts.spread(SAMPLES), tokenizer)
            await check_records(rewards, records)
            self._findings += await check_rewards(rewards, every, tokenizer, field=ANSWER, success=success)

    def _workflow(self, tokenizer: Tokenizer, rewards: RewardPool | None = None) -> Workflow:
        """Makes the workflow. Raises UserError for arguments that it does not take."""
        from rljax.rewards import RewardPool
        from rljax.workflows import workflow_of

        return workflow_of(self._config, tokenizer, rewards or RewardPool(self._config.reward))

    async def _check_rollouts(self, pools: Allocation, tokenizer: Tokenizer, prompts: PromptSource) -> None:
        """Samples prompts as training would, by the weights that the run begins with."""
        from rljax import engine
        from rljax.rewards import RewardPool
        from rljax.rollout.evaluation import Evaluation, run
        from rljax.sanity.rollouts import check_rollouts
        from rljax.workflows import sampling_params

        config = self._config
        assert pools.sampler is not None
        engine.prepare(pools)
        async with RewardPool(config.reward) as rewards:
            workflow = self._workflow(tokenizer, rewards)
            params = sampling_params(config.gconfig, tokenizer)
            chosen = [next(prompts) for _ in range(ROLLOUTS.value)]
            evaluation = Evaluation(chosen, workflow, params, config.gconfig.n_samples)
            sampler = engine.make_lone_sampler(config, pools.sampler, self._model_dir)
            try:
                episodes = await run(sampler, evaluation, config, lambda _: None)
                self._findings += check_rollouts(episodes, warms_up=config.warmup.steps > 0)
            finally:
                await sampler.close()


def _check_numbers(reader: WeightReader) -> str:
    """Reads every tensor of a model that is not too large, for a number that is not finite.

    Returns what was read. Raises UserError for such a number.
    """
    if reader.nbytes > MOST_BYTES:
        return f"numbers not read (more than {MOST_BYTES / 1e9:g} GB; the load looks at them)"
    reader.check_numbers()
    return "all numbers finite"


def _length(labels: Labels, prompt: Prompt, where: str) -> int:
    """Returns the tokens of a labeled example. Raises UserError, which names the record."""
    labels.require(prompt, where)
    try:
        return len(labels(prompt))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


if __name__ == "__main__":
    main.run_main(check)
