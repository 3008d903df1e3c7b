"""Checks at every start of a run: what is known of data and tokenizer without sampling or scoring."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rljax.config.schema import Config
from rljax.config.validation import best_set, key_of, validation_sets
from rljax.data.held_out import HeldOut
from rljax.data.prompts import PromptSource
from rljax.evaluation.uses import is_test
from rljax.hf.tokenizer import Tokenizer
from rljax.sanity.blanks import learned_field
from rljax.sanity.findings import Finding, Report, Severity
from rljax.sanity.golds import SAMPLES, check_golds
from rljax.sanity.prompts import shared
from rljax.sanity.survey import Survey
from rljax.sanity.template import check_template, check_tokenizer
from rljax.sanity.whole_numbers import compares_text

MOST = 20_000  # training prompts that are read at a start, in order to be quick; experiments.check reads all

log = logging.getLogger(__name__)


def at_start(
    config: Config, prompts: PromptSource, held_out: Sequence[HeldOut], tokenizer: Tokenizer, model_dir: Path
) -> Report:
    """Checks what is cheap, and logs errors and warnings; the run goes on."""
    findings = [*check_tokenizer(tokenizer, model_dir), *check_template(tokenizer), *check_splits(config)]
    some, system_prompt = itertools.islice(prompts.every(), MOST), config.train_dataset.system_prompt
    train = Survey("train_dataset", learned_field(config), some, system_prompt=system_prompt, as_text=compares_text(config))
    findings += [*train.check(prompts.where), *check_sets(train, held_out)]
    return _told(findings)


def warn_of_golds(config: Config, prompts: PromptSource, tokenizer: Tokenizer) -> Report:
    """Logs a warning if the reward asks for gold answers that no policy writes."""
    return _told(check_golds(config, prompts.spread(SAMPLES), tokenizer))


def _told(findings: Iterable[Finding]) -> Report:
    """Logs errors and warnings."""
    report = Report(tuple(findings))
    for finding in [*report.of(Severity.ERROR), *report.of(Severity.WARNING)]:
        log.warning("%s", finding)
    return report


def check_sets(train: Survey, held_out: Sequence[HeldOut]) -> Iterator[Finding]:
    """Checks the prompts of each validation set, and what they share with those of training."""
    for each in held_out:
        section, system_prompt = key_of(each.name), each.dataset.system_prompt
        theirs = Survey(section, prompts=each.prompts, system_prompt=system_prompt, as_text=train.as_text)
        yield from theirs.check(each.where)
        yield from shared(train.index, theirs.index)


def check_splits(config: Config) -> Iterator[Finding]:
    """Warns if a test split chooses the best checkpoint."""
    name = best_set(config)
    split = validation_sets(config)[name].split
    if config.evaluator.best is not None and is_test(split):
        line = f"evaluator.best chooses the checkpoint by split {split}, a test split: its score is optimistic afterwards"
        yield Finding(Severity.WARNING, key_of(name), line, f"{key_of(name)}.split=dev, and report another split at the end")
