"""The stream of prompts: shuffled every epoch, sharded by process, resumable at any position."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from rljax import json_fields
from rljax.chat.messages import Message, Tool, joined_tools, parse_messages, parse_template_kwargs, parse_tools, text_of
from rljax.config.schema import DatasetConfig
from rljax.data.formats import Format, find_format, told_by_columns, with_system
from rljax.data.labeled import Labels
from rljax.data.lengths import AT_ONCE, PromptLengths
from rljax.data.records import InMemory, Records, open_records
from rljax.data.selection import Selection
from rljax.data.tasks import PREFIX, make_task
from rljax.errors import UserError
from rljax.hf.tokenizer import Tokenizer
from rljax.types import Prompt

KEPT_PROMPTS = 50_000  # of a task that are kept, and if it has more, none; 0.7 KB each beside their texts
_STATE = json_fields.fields({"position": json_fields.integer(0, 2**62)})

log = logging.getLogger(__name__)


class Examples:
    """Prompts as a grain RandomAccessDataSource.

    Their uid is the index in the dataset, still without an epoch.
    """

    def __init__(
        self,
        records: Records,
        form: Format,
        system_prompt: str = "",
        tools: Sequence[Tool] = (),
        added_tools: Sequence[Tool] = (),
        *,
        identity: str | None = None,
        keep: bool = False,
    ) -> None:
        """
        Args:
          identity: of the prompts; None if nothing tells them from others.
          keep: make each prompt once, for checks, steps and epochs ask for it a dozen times.
        """
        self._records = records
        self._form = form
        self._system_prompt = system_prompt
        self._tools = tuple(tools)  # of prompts that have none of their own
        self._added_tools = tuple(added_tools)  # of all prompts
        self._made: list[Prompt | None] | None = [None] * len(records) if keep else None
        self.identity = identity
        self.digest = records.digest
        self.where = records.where

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompt(index, str(index))

    def prompt(self, index: int, uid: str) -> Prompt:
        """Returns the prompt of a record, one of its own for each call.

        Raises UserError, which names file and line.
        """
        if self._made is None:
            return self._make(index, uid)
        made = self._made[index]
        if made is None:
            made = self._made[index] = self._make(index, uid)
        messages, reply = (tuple(map(dict, turns)) for turns in (made.messages, made.reply))
        return Prompt(uid, messages, dict(made.fields), made.tools, dict(made.chat_template_kwargs), reply)

    def _make(self, index: int, uid: str) -> Prompt:
        where = self._records.where(index)
        try:
            messages, fields = self._form(self._records[index], where)
            return self._prompt(uid, messages, dict(fields), where)
        except UserError:
            raise
        except Exception as error:  # the format may be users' code
            reason = " ".join(str(error).split())
            raise UserError(f"{where}: the format can't read this record: {type(error).__name__}: {reason}") from error

    def _prompt(self, uid: str, conversation: Sequence[Message], fields: dict[str, Any], where: str) -> Prompt:
        """Checks what a format made of a record. An answer at its end becomes the reply."""
        messages, reply = parse_messages(conversation, where), cast(tuple[Message, ...], ())
        if "answer" not in fields and messages[-1]["role"] == "assistant":
            messages, reply = messages[:-1], messages[-1:]
            fields["answer"] = text_of(reply[0])
            if not messages:
                raise UserError(f"{where}: messages hold nothing but the answer")
        own, more = fields.pop("tools", None), fields.pop("chat_template_kwargs", None)
        tools = joined_tools((parse_tools(own, where) if own else ()) or self._tools, self._added_tools)
        arguments = parse_template_kwargs(more, where) if more else {}
        messages = with_system(messages, self._system_prompt)
        return Prompt(uid, messages, fields, tools, arguments, reply)


class PromptSource:
    """Endless stream of prompts. Seed and epoch alone decide the order of each epoch.

    Every epoch has each prompt once. A position is the number of prompts given out. Prompts that
    are too long are left out before the order is drawn, so that a position means the same whatever
    their lengths.
    """

    def __init__(
        self,
        examples: Examples,
        kept: np.ndarray,
        *,
        key: str,
        seed: int,
        shuffle: bool,
        skipped: int = 0,
        lengths: np.ndarray | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        """Draws the order of the prompts.

        Args:
          kept: [n] int64, rising: indices of the examples that are used.
          key: the config section, for errors.
          skipped: examples that were left out for their length, to be reported.
          lengths: [n] tokens of the prompts that are used; None if they were not measured.
          shard: (index, count) of this process among those that share the prompts of an epoch.

        Raises:
          UserError: there are fewer prompts than processes.
        """
        import grain  # takes a second, most of it for jax

        self.examples = examples
        self.key = key  # the config section, for messages
        self._kept = kept
        self._position = 0
        self.lengths = lengths
        self.skipped = skipped  # prompts longer than max_length, each epoch
        order = grain.MapDataset.source(kept)
        if shuffle:
            order = order.shuffle(seed=_grain_seed(seed))
        index, count = self._shard = shard
        self._order = order.slice(slice(index, None, count))
        if len(kept) < count:
            raise UserError(f"{key}: {len(kept)} prompts are too few for {count} processes")
        self._identity = {
            "data": examples.digest,
            "prompts": len(kept),
            "kept": hashlib.blake2b(kept.tobytes(), digest_size=8).hexdigest(),
            "shuffle": shuffle,
            "seed": seed if shuffle else 0,
            "shard": f"{index} of {count}",
        }

    def __len__(self) -> int:
        """Returns the number of prompts per epoch."""
        return len(self._order)

    def share(self, count: int) -> int:
        """Returns how many of the first `count` prompts of all processes are this process's.

        They are the first of its stream.
        """
        epochs, rest = divmod(count, len(self._kept))
        return epochs * len(self) + len(range(self._shard[0], rest, self._shard[1]))

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        prompt = self._at(self._position)
        self._position += 1
        return prompt

    def epoch(self, number: int) -> Iterator[Prompt]:
        """Yields the prompts of one epoch, in order. The stream's own position does not change."""
        return (self._at(number * len(self) + i) for i in range(len(self)))

    def every(self) -> Iterator[Prompt]:
        """Yields the prompts of the first epoch in the order of the data, which is faster."""
        return (self._numbered(0, index) for index in self._kept.tolist())

    def spread(self, most: int) -> list[Prompt]:
        """Returns at most that many prompts of the first epoch, spread evenly over the data."""
        count, every = min(most, len(self._kept)), self._kept.tolist()
        return [self._numbered(0, every[i * len(every) // count]) for i in range(count)]

    def prompt(self, uid: str) -> Prompt:
        """Returns the prompt of a uid, as the stream gave it out. Raises UserError."""
        epoch, _, index = uid.partition("/")
        if not (epoch.isdigit() and index.isdigit() and self._has(int(index))):
            raise UserError(f"{self.key}: no prompt {uid!r} in this dataset")
        return self._numbered(int(epoch), int(index))

    def where(self, uid: str) -> str:
        """Returns the origin of a prompt, whose uid may have no epoch: "train.jsonl:17"."""
        return self.examples.where(int(uid.rpartition("/")[2]))

    def require_fit(self, tokenizer: Tokenizer, *, most: int, why: str) -> None:
        """Checks that no prompt has more than `most` tokens.

        Raises UserError, which ends with `why`.
        """
        lengths = PromptLengths(tokenizer, self.examples.where, most)
        long: dict[int, int] = {}
        for start in range(0, len(self._kept), AT_ONCE):
            part = [int(index) for index in self._kept[start : start + AT_ONCE]]
            counted = lengths.of([self.examples[index] for index in part])
            long |= {index: tokens for index, tokens in zip(part, counted, strict=True) if tokens > most}
        if long:
            index, length = next(iter(long.items()))
            others = f" (and {len(long) - 1} more are too long)" if len(long) > 1 else ""
            raise UserError(
                f"{self.key}.max_length: None, and {self.examples.where(index)} has {length} tokens{others}:"
                f" {why} ({self.key}.max_length={most} leaves such prompts out)"
            )

    @property
    def identity(self) -> Mapping[str, object]:
        """Digest and number of the prompts, and what decides their order."""
        return dict(self._identity)

    def state(self) -> dict[str, Any]:
        """Returns the stream's position and the identity of its data, as JSON values."""
        return {"position": self._position, **self._identity}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state`. Raises UserError if the data has changed since."""
        for name, now in self._identity.items():
            if state.get(name) != now:
                change = f"{name} was {state.get(name)}, now {now}"
                remedy = "set it back" if name == "seed" else "restore the data"
                raise UserError(f"{self.key}: cannot resume: {change} ({remedy}, or start a fresh --workdir)")
        json_fields.demand(state, _STATE, f"{self.key}: cannot resume: the position in the data")
        self._position = state["position"]

    def _has(self, index: int) -> bool:
        position = int(np.searchsorted(self._kept, index))
        return position < len(self._kept) and int(self._kept[position]) == index

    def _at(self, position: int) -> Prompt:
        return self._numbered(position // len(self), int(self._order[position]))

    def _numbered(self, epoch: int, index: int) -> Prompt:
        return self.examples.prompt(index, f"{epoch}/{index}")


def open_prompts(
    dataset: DatasetConfig,
    *,
    key: str = "train_dataset",
    seed: int,
    tokenizer: Tokenizer | None = None,
    labels: Labels | None = None,
    shard: tuple[int, int] = (0, 1),
    added_tools: Sequence[Tool] = (),
    measure: bool = False,
    seen: Callable[[Prompt], None] | None = None,
    like: PromptSource | None = None,
) -> PromptSource:
    """Opens and checks a dataset. Reads every record once, so that a broken one fails at the start.

    Args:
      key: the config section, for errors.
      tokenizer: counts the tokens of prompts; needed with `max_length` only.
      labels: makes the examples to be learned, which then have to fit as well.
      shard: (index, count) of this process among those that share the prompts of an epoch.
      added_tools: those that the workflow adds to each prompt (rljax.workflows.tools_of).
      measure: find the length of every prompt (`lengths`).
      seen: called with each prompt that is used, in the order of the data, which spares another
        pass over them. Their uids are still without an epoch.
      like: a source of the same dataset and tools, whose records are read and not opened again.

    Raises:
      UserError: one line with file, line and remedy.
    """
    if like is not None:
        examples = like.examples
    else:
        examples = _open_examples(dataset, key, added_tools, said=labels is not None)
    selection = Selection(examples, dataset, tokenizer, labels, key, examples.identity, measure=measure, seen=seen)
    selection.log()
    return PromptSource(
        examples,
        selection.kept,
        key=key,
        seed=seed,
        shuffle=dataset.shuffle,
        skipped=selection.skipped,
        lengths=selection.lengths,
        shard=shard,
    )


def _open_examples(dataset: DatasetConfig, key: str, added_tools: Sequence[Tool], *, said: bool) -> Examples:
    """Opens the records of a dataset as prompts. Raises UserError.

    Args:
      said: which format was chosen for want of a `type` was said before.
    """
    if dataset.path.startswith(PREFIX):
        records: Records = make_task(dataset.path, dataset.split, dataset.task, key)
    elif dataset.type == "task":
        raise UserError(f"{key}.type: 'task' needs a path such as task:addition, not {dataset.path!r}")
    else:
        records = open_records(dataset.path, dataset.split, key)
    name, tools = _format_name(dataset, records, key, said=said), _tools(dataset.tools, key)
    own = ":" not in name  # a format of users' may read whatever it likes
    keep = own and isinstance(records, InMemory) and len(records) <= KEPT_PROMPTS
    identity = json.dumps([records.digest, name, dataset.system_prompt, tools, [*added_tools]]) if own else None
    return Examples(records, find_format(name, key), dataset.system_prompt, tools, added_tools, identity=identity, keep=keep)


def _format_name(dataset: DatasetConfig, records: Records, key: str, *, said: bool) -> str:
    """Returns `type`; without one, what the first record's columns tell, and says so.

    Args:
      said: not again, as for the labeled examples of a set whose prompts were opened before.
    """
    if dataset.type:
        return dataset.type
    if dataset.path.startswith(PREFIX):
        return "task"
    name = told_by_columns(records[0], records.where(0))
    if not said:
        log.warning("%s.type: not set; read as %r, by the columns %s", key, name, ", ".join(records[0]))
    return name


def _tools(path: str, key: str) -> tuple[Tool, ...]:
    """Reads the file of `tools`. Raises UserError."""
    if not path:
        return ()
    try:
        return parse_tools(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}.tools: cannot read {path}: {error} (a JSON list of OpenAI tool definitions)") from None


def _grain_seed(seed: int) -> int:
    """Spreads the seed over 32 bits: grain adds the epoch to it, so near seeds would share epochs."""
    return int.from_bytes(hashlib.blake2b(f"prompts/{seed}".encode(), digest_size=4).digest(), "big")
