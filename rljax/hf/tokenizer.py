"""The tokenizer that both paths share: token ids, text and chat templates of a HF directory.

    tokenizer = load_tokenizer(model_dir)
    prompt_ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is 12+30?"}])
    text = tokenizer.decode(completion.token_ids)

transformers renders the chat template, in its sandbox, so that a prompt has the same ids as there.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from rljax.config.schema import RolloutConfig
from rljax.errors import UserError
from rljax.hf.messages import Message, Tool
from rljax.types import Prompt

DEFAULTS = RolloutConfig()

_REPLY = "\x02reply\x03"  # placeholder for an assistant's text, to find it in a rendered template

# The character-level tokenizer
CHAR_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")  # ids 0 to 3
CHAR_ALPHABET = "\n" + "".join(map(chr, range(0x20, 0x7F)))  # ids 4 to 99: a newline, then printable ASCII in order
CHAR_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # "12+34=" in, "46" and EOS out


class Tokenizer(Protocol):
    """Tokenizer as workflows, samplers and logs use it."""

    eos_token_ids: tuple[int, ...]  # all ids that end a turn, of generation_config.json, config.json and tokenizer
    eos_token_id: int  # the one of them that ends an assistant's turn in the chat template
    pad_token_id: int  # may equal an EOS id: padding is known by length, never by id
    vocab_size: int  # ids are below it

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the text alone: no BOS, no EOS."""
        ...

    def unknown(self, text: str) -> str:
        """Returns the first character without a token, or "" if there is none.

        The policy would see the unknown token in its place.
        """
        ...

    def decode(self, token_ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = True) -> str: ...

    def pieces(self, token_ids: Sequence[int] | np.ndarray) -> list[str]:
        """Returns the text of each token, which add up to `decode` with special tokens.

        A character of several tokens is the text of the last one.
        """
        ...

    def encode_prompt(self, prompt: Prompt) -> np.ndarray:
        """Returns the ids from which the assistant's turn is sampled, [P] int32, read-only.

        A prompt that ends with an assistant's turn is a turn to be continued.
        """
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]: ...

    def next_turn(
        self,
        messages: Sequence[Message],
        last_token_id: int,
        *,
        tools: Sequence[Tool] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the ids from the end of a sampled reply to the start of the next one.

        Args:
          messages: the conversation; its last assistant turn is the reply, and the ids cover the
            messages after it.
          last_token_id: the last id that was sampled for the reply; a turn's end that the policy
            sampled is not repeated.
        """
        ...


class HFTokenizer:
    """A Tokenizer that wraps one of transformers.

    All methods may be called from any thread once it is constructed.
    """

    def __init__(self, inner: Any, directory: Path, eos_token_ids: Sequence[int], rollout: RolloutConfig) -> None:
        self._inner = inner
        self._rollout = rollout
        self._directory = directory
        self._system_role: bool | None = None  # unknown until the first system message
        turn_end = self._turn_end() if inner.chat_template else None
        known = list(dict.fromkeys([*eos_token_ids, *([] if turn_end is None else [turn_end])]))
        if not known:
            raise UserError(f"{directory}: no EOS id in generation_config.json, config.json or tokenizer_config.json")
        self.eos_token_ids: tuple[int, ...] = tuple(known)
        self.eos_token_id: int = known[0] if turn_end is None else turn_end
        self.pad_token_id: int = self.eos_token_id if inner.pad_token_id is None else int(inner.pad_token_id)
        self.vocab_size: int = 1 + max(inner.get_vocab().values())

    @property
    def transformers(self) -> Any:
        """The tokenizer of transformers that this one wraps."""
        return self._inner

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of every token, added ones included."""
        return dict(self._inner.get_vocab())

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False, verbose=False))

    def unknown(self, text: str) -> str:
        unknown = self._inner.unk_token_id
        if unknown is None or unknown not in self.encode(text):
            return ""
        return next((character for character in text if unknown in self.encode(character)), text)

    def decode(self, token_ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = True) -> str:
        ids = [int(i) for i in token_ids]
        return cast(str, self._inner.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def pieces(self, token_ids: Sequence[int] | np.ndarray) -> list[str]:
        from tokenizers.decoders import DecodeStream

        text = self.decode(token_ids, skip_special_tokens=False)
        stream, backend = DecodeStream(skip_special_tokens=False), getattr(self._inner, "backend_tokenizer", None)
        found = [] if backend is None else [stream.step(backend, int(token)) or "" for token in token_ids]
        joined = "".join(found)
        if found and text.startswith(joined):
            return [*found[:-1], found[-1] + text[len(joined) :]]  # bytes at the end that are no character yet
        return [text, *[""] * (len(token_ids) - 1)] if len(token_ids) else []

    def encode_prompt(self, prompt: Prompt) -> np.ndarray:
        ids = self.apply_chat_template(prompt.messages, tools=prompt.tools, chat_template_kwargs=prompt.chat_template_kwargs)
        return np.asarray(ids, np.int32)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        return self.encode(self.render(messages, tools, chat_template_kwargs, add_generation_prompt=add_generation_prompt))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Renders the chat template to text.

        If the template has no system role, the system message is put before the first user turn.

        Raises:
          UserError: when the directory has no chat template, or the template refuses the messages.
        """
        if not self._inner.chat_template:
            raise UserError(f"{self._directory}: the tokenizer has no chat template (put one into chat_template.jinja)")
        if messages and messages[0]["role"] == "system" and not self._has_system_role():
            messages = _without_system(messages)
        return self._render(messages, add_generation_prompt, tools, chat_template_kwargs or {})

    def next_turn(
        self,
        messages: Sequence[Message],
        last_token_id: int,
        *,
        tools: Sequence[Tool] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        reply = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        marked = [*messages[:reply], {"role": "assistant", "content": _REPLY}, *messages[reply + 1 :]]
        ids = self.encode(self._after_reply(self.render(marked, tools, chat_template_kwargs)))
        return ids[1:] if ids[:1] == [last_token_id] and last_token_id in self.eos_token_ids else ids

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Tool] = (),
        arguments: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> str:
        import jinja2

        try:
            return cast(
                str,
                self._inner.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **{**self._rollout.chat_template_kwargs, **arguments},
                ),
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(f"{self._directory}: the chat template refuses messages of roles {roles}: {error}") from error

    def _has_system_role(self) -> bool:
        """Returns whether the template renders system messages; some raise, some leave them out."""
        if self._system_role is None:
            probe = [{"role": "system", "content": _REPLY}, {"role": "user", "content": "?"}]
            try:
                self._system_role = _REPLY in self._render(probe, True)
            except UserError:
                self._system_role = False
        return self._system_role

    def _after_reply(self, text: str) -> str:
        _, mark, after = text.rpartition(_REPLY)
        if not mark:
            raise UserError(f"{self._directory}: the chat template leaves out what an assistant says")
        return after

    def _turn_end(self) -> int | None:
        """Returns the special token that the chat template puts right after an assistant's text."""
        probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _REPLY}]
        try:
            ids = self.encode(self._after_reply(self._render(probe, False)))
        except UserError:  # a template for one turn only
            return None
        special = {i for i, token in self._inner.added_tokens_decoder.items() if token.special}
        return ids[0] if ids and ids[0] in special else None


def load_tokenizer(directory: str | Path, rollout: RolloutConfig = DEFAULTS) -> HFTokenizer:
    """Loads the tokenizer of a HF model directory.

    Imports transformers (about a second), not torch.

    Args:
      rollout: arguments of the chat template, and how text of users is read.

    Raises:
      UserError: the directory or its tokenizer is missing or broken.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"tokenizer: no such directory: {directory} (a HF model directory with tokenizer.json)")
    try:
        inner = _transformers_class(directory).from_pretrained(str(directory), local_files_only=True)
    except UserError:
        raise
    except Exception as error:  # tokenizers raises bare Exception on a broken file
        reason = " ".join(str(error).split())
        raise UserError(f"tokenizer: cannot load {directory}: {reason}") from error
    return HFTokenizer(inner, directory, _eos_ids(directory, inner), rollout)


def build_char_tokenizer(directory: str | Path) -> int:
    """Writes the character-level tokenizer, which transformers and SGLang load as well.

    One token per character, 100 in all; text outside ASCII becomes `<unk>`. The chat template is
    the messages' content and nothing around it. The files are tokenizer.json, tokenizer_config.json
    and chat_template.jinja.

    Returns:
      The vocabulary's size, for config.json.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate((*CHAR_SPECIAL, *CHAR_ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CHAR_SPECIAL])

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAR_TEMPLATE, encoding="utf-8")
    return len(vocabulary)


def _without_system(messages: Sequence[Message]) -> list[Message]:
    system, rest = messages[0], list(messages[1:])
    if rest and rest[0]["role"] == "user":
        first = {**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}
        return [first, *rest[1:]]
    return [{"role": "user", "content": system["content"]}, *rest]


def _transformers_class(directory: Path) -> Any:
    if (directory / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast  # reads tokenizer.json as it is

        return PreTrainedTokenizerFast
    if (directory / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer  # makes one from sentencepiece or vocabulary files

        return AutoTokenizer
    raise UserError(f"tokenizer: {directory} has no tokenizer.json")


def _eos_ids(directory: Path, inner: Any) -> list[int]:
    """Returns the EOS ids of generation_config.json, config.json and the tokenizer, in that order.

    Those of config.json's text_config are included.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: not JSON: {error}") from None
        for section in (content, content.get("text_config")):
            found = section.get("eos_token_id") if isinstance(section, dict) else None
            ids += found if isinstance(found, list) else [] if found is None else [found]
    if inner.eos_token_id is not None:
        ids.append(inner.eos_token_id)
    return list(dict.fromkeys(int(i) for i in ids))
