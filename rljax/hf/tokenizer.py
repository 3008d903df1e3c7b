"""The tokenizer that both paths share: token ids, text and chat templates of a HF directory.

    tokenizer = load_tokenizer(model_dir)
    prompt_ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is 12+30?"}])
    text = tokenizer.decode(completion.token_ids)

transformers renders the chat template, in its sandbox, so that a prompt has the same ids as there.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from rljax.chat.labeled_turns import learned_turns
from rljax.chat.messages import Message, Tool
from rljax.chat.pictures import EncodedPictures, PictureProcessor, has_pictures, load_processor
from rljax.chat.template import Chat, ChatTemplate
from rljax.config.schema import RolloutConfig
from rljax.errors import UserError
from rljax.hf.tokenizer_files import eos_ids, transformers_class
from rljax.types import Prompt

DEFAULTS = RolloutConfig()
KEPT_PROMPTS = 256  # whose ids are kept

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
    has_chat_template: bool  # False: of those below, `encode` and `decode` alone

    @property
    def digest(self) -> str:
        """Digest of all that decides the ids of a conversation."""
        ...

    def encode(self, text: str, *, as_text: bool = False) -> list[int]:
        """Returns the ids of the text alone: no BOS, no EOS.

        Args:
          as_text: read what looks like a control token, as `<|im_end|>`, as plain text.
        """
        ...

    def unknown(self, text: str) -> str:
        """Returns the first character without a token, or "" if there is none.

        The policy would see the unknown token in its place.
        """
        ...

    def all_unknown(self, texts: Sequence[str]) -> list[str]:
        """Returns `unknown` of each text, faster for many of them."""
        ...

    def decode(self, token_ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = True) -> str: ...

    def pieces(self, token_ids: Sequence[int] | np.ndarray) -> list[str]:
        """Returns the text of each token, which add up to `decode` with special tokens.

        A character of several tokens is the text of the last one.
        """
        ...

    def encode_prompt(self, prompt: Prompt) -> np.ndarray:
        """Returns the ids from which the assistant's turn is sampled, [P] int32, read-only.

        A prompt that ends with an assistant's turn is a turn to be continued. Raises UserError for
        a prompt with pictures.
        """
        ...

    def prompt_lengths(self, prompts: Sequence[Prompt]) -> list[int]:
        """Returns the tokens of prompts, with or without pictures; many at once on all cores.

        Raises UserError for one that the template refuses.
        """
        ...

    def encode_pictures(self, prompt: Prompt) -> EncodedPictures:
        """Returns the same of a prompt with pictures, as the model's processor makes them.

        The arrays of the pictures are left out. Raises UserError for a model that takes none.
        """
        ...

    def encode_labeled(self, prompt: Prompt, reply: Sequence[Message], *, turns: str = "all") -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a prompt and its reply, and which of them supervised training learns.

        The conversation is rendered as a whole, and what it has behind the prompt is learned, up to
        the end of the turn: what the policy would have to sample.

        Args:
          reply: turns behind the prompt, the last of them the assistant's.
          turns: the assistant's turns that are learned: "all", those of the "reply", or the "last".

        Returns:
          Token ids, [T] int32, and whether each is learned, [T] bool.

        Raises:
          UserError: the template refuses the conversation, or renders a turn in another way when
            others follow it.
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
        self.directory = directory
        self._inner = inner
        self._template = ChatTemplate(inner, directory, rollout.chat_template_kwargs, rollout.allow_control_tokens)
        self._control = self._template.control
        self._encoded: OrderedDict[str, tuple[Prompt, np.ndarray]] = OrderedDict()  # prompts of late, by uid
        self._pictured: OrderedDict[str, tuple[Prompt, EncodedPictures]] = OrderedDict()  # the same of those with pictures
        self._processor: PictureProcessor | None = None  # loaded for the first prompt with pictures
        self._chat_template_kwargs = dict(rollout.chat_template_kwargs)
        self._settings = sorted(rollout.chat_template_kwargs.items()), rollout.allow_control_tokens
        turn_end = self._template.turn_end() if self._template.source else None
        known = list(dict.fromkeys([*eos_token_ids, *([] if turn_end is None else [turn_end])]))
        if not known:
            raise UserError(f"{directory}: no EOS id in generation_config.json, config.json or tokenizer_config.json")
        self.eos_token_ids: tuple[int, ...] = tuple(known)
        self.eos_token_id: int = known[0] if turn_end is None else turn_end
        self.pad_token_id: int = self.eos_token_id if inner.pad_token_id is None else int(inner.pad_token_id)
        self.vocab_size: int = 1 + max(inner.get_vocab().values())
        self.has_chat_template = bool(self._template.source)

    @functools.cached_property
    def digest(self) -> str:
        """Digest of all that decides the ids of a conversation."""
        files = (path for path in sorted(self.directory.iterdir()) if path.suffix in (".json", ".jinja", ".model", ".txt"))
        digest = hashlib.blake2b(repr(self._settings).encode(), digest_size=16)
        for path in files:
            digest.update(path.name.encode() + hashlib.blake2b(path.read_bytes()).digest())
        return digest.hexdigest()

    @property
    def transformers(self) -> Any:
        """The tokenizer of transformers that this one wraps."""
        return self._inner

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of every token, added ones included."""
        return dict(self._inner.get_vocab())

    def is_spare(self, token: str) -> bool:
        """Returns whether no text of a chat gives a token: it was added, and no template writes it."""
        index = self._inner.get_vocab().get(token)
        used = token in self._template.source or index in self.eos_token_ids
        return index in self._inner.added_tokens_decoder and not used

    def encode(self, text: str, *, as_text: bool = False) -> list[int]:
        return self._control.encode(self._control.disguise(text) if as_text else text)

    @property
    def chat_template(self) -> str:
        """Source of the chat template; "" if there is none."""
        return self._template.source

    def encode_document(self, text: str) -> list[int]:
        """Returns the ids of plain text as a whole prompt: with a BOS if the tokenizer adds one."""
        return list(self._inner.encode(text, add_special_tokens=True, verbose=False))

    def unknown(self, text: str) -> str:
        return self.all_unknown([text])[0]

    def all_unknown(self, texts: Sequence[str]) -> list[str]:
        unknown = self._inner.unk_token_id
        doubtful = [] if unknown is None else [i for i, text in enumerate(texts) if not self._can_write(text)]
        found = dict.fromkeys(range(len(texts)), "")
        for i, has in zip(doubtful, self._control.with_token([texts[i] for i in doubtful], unknown), strict=True):
            if has:
                found[i] = next((character for character in texts[i] if unknown in self.encode(character)), texts[i])
        return list(found.values())

    def _can_write(self, text: str) -> bool:
        """Returns True if each byte of a text has a token: none of it is unknown. False: perhaps."""
        missing = self._missing_bytes
        encoded = b"" if missing is None else text.encode()
        return missing is not None and len(encoded.translate(None, missing)) == len(encoded)

    @functools.cached_property
    def _missing_bytes(self) -> bytes | None:
        """Bytes without a token of their own; None if texts are not written by bytes at all."""
        backend, vocabulary = getattr(self._inner, "backend_tokenizer", None), self._inner.get_vocab()
        if backend is not None and "ByteLevel(" in str(backend.pre_tokenizer):
            from transformers.convert_slow_tokenizer import bytes_to_unicode

            names = bytes_to_unicode()
        elif getattr(getattr(backend, "model", None), "byte_fallback", False):
            names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
        else:
            return None
        return bytes(byte for byte, name in names.items() if name not in vocabulary)

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
        if has_pictures(prompt.messages):
            raise UserError(
                f"prompt {prompt.uid}: has pictures, and this workflow takes text (rlvr takes them; docs/vision.md has another)"
            )
        # The samples of a prompt ask for the same ids, one after another
        known = self._encoded.get(prompt.uid)
        if known is not None and known[0] == prompt:  # another dataset may have the uid too
            return known[1]
        ids = np.array(self._control.encode(self._opened(prompt)), np.int32)
        ids.flags.writeable = False
        self._encoded[prompt.uid] = prompt, ids
        while len(self._encoded) > KEPT_PROMPTS:
            self._encoded.pop(next(iter(self._encoded), ""), None)  # of several threads, one finds it gone
        return ids

    def prompt_lengths(self, prompts: Sequence[Prompt]) -> list[int]:
        pictured = {i: len(self.encode_pictures(p).token_ids) for i, p in enumerate(prompts) if has_pictures(p.messages)}
        texts = {i: self._opened(prompt) for i, prompt in enumerate(prompts) if i not in pictured and _is_open(prompt)}
        begun = [i for i in range(len(prompts)) if i not in pictured and i not in texts]
        chats = [Chat(prompts[i].messages, prompts[i].tools, prompts[i].chat_template_kwargs) for i in begun]
        texts |= zip(begun, self._template.render_all(chats), strict=True)
        lengths = pictured | dict(zip(texts, self._control.counts(list(texts.values())), strict=True))
        return [lengths[i] for i in range(len(prompts))]

    def encode_pictures(self, prompt: Prompt) -> EncodedPictures:
        known = self._pictured.get(prompt.uid)
        if known is not None and known[0] == prompt:
            return known[1]
        if self._processor is None:
            self._processor = load_processor(self.directory)
        encoded = dataclasses.replace(self._processor.encode(prompt, self._chat_template_kwargs), arrays={})
        self._pictured[prompt.uid] = prompt, encoded
        while len(self._pictured) > KEPT_PROMPTS:
            self._pictured.pop(next(iter(self._pictured), ""), None)
        return encoded

    def encode_labeled(self, prompt: Prompt, reply: Sequence[Message], *, turns: str = "all") -> tuple[np.ndarray, np.ndarray]:
        if has_pictures([*prompt.messages, *reply]):
            raise UserError(f"prompt {prompt.uid}: has pictures, and supervised training takes text (docs/vision.md)")
        messages, first = [*prompt.messages, *reply], len(prompt.messages)
        if _is_open(prompt) and reply:
            messages[first - 1 : first + 1] = [_joined(prompt.messages[-1], reply[0])]
            first -= 1
        chat, opened = Chat(messages, prompt.tools, prompt.chat_template_kwargs), self._opened(prompt)
        text, found = learned_turns(self._template, chat, opened, first, self.eos_token_ids, turns=turns)
        ids: list[int] = []
        learned: list[bool] = []
        position = 0
        for turn in found:
            given = self._control.encode(text[position : turn.start], continues=position > 0)
            target = self._control.encode(text[turn.start : turn.end], continues=turn.start > 0)
            target += [] if turn.ended else [self.eos_token_id]
            ids += given + target
            learned += [False] * len(given) + [True] * len(target)
            position = turn.end
        return np.array(ids, np.int32), np.array(learned, bool)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Renders the chat template to text, to be compared with other such texts.

        It has marks in what only looks like control tokens; ids come from `apply_chat_template`.
        """
        return self._template.render(Chat(messages, tools, chat_template_kwargs or {}), generation=add_generation_prompt)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        chat = Chat(messages, tools, chat_template_kwargs or {})
        return self._control.encode(self._template.render(chat, generation=add_generation_prompt))

    def next_turn(
        self,
        messages: Sequence[Message],
        last_token_id: int,
        *,
        tools: Sequence[Tool] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        text = self._template.render_after_reply(Chat(messages, tools, chat_template_kwargs or {}), self.eos_token_ids)
        ids = self._control.encode(text, continues=True)
        return ids[self._ended(text, last_token_id) :]

    def _ended(self, text: str, last_token_id: int) -> int:
        """Returns how many ids at the start are the end of turn that was sampled, and space."""
        last = int(last_token_id)
        end = self._inner.convert_ids_to_tokens(last) if last in self.eos_token_ids else ""
        if not end or not text.lstrip().startswith(end):
            return 0
        return 1 + self._control.encode(text, continues=True).index(last)

    def _opened(self, prompt: Prompt) -> str:
        """Renders a prompt up to where the assistant goes on."""
        chat = Chat(prompt.messages, prompt.tools, prompt.chat_template_kwargs)
        return self._template.render_open(chat) if _is_open(prompt) else self._template.render(chat, generation=True)


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
        inner = transformers_class(directory).from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # tokenizers raises bare Exception on a broken file
        reason = " ".join(str(error).split())
        raise UserError(f"tokenizer: cannot load {directory}: {reason}") from error
    return HFTokenizer(inner, directory, eos_ids(directory, inner), rollout)


def prompt_ids_of(tokenizer: Tokenizer, prompt: Prompt) -> np.ndarray:
    """Returns the ids of a prompt, [P] int32, with or without pictures."""
    if has_pictures(prompt.messages):
        return tokenizer.encode_pictures(prompt).token_ids
    return tokenizer.encode_prompt(prompt)


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


def vocabulary_of(tokenizer: str) -> int:
    """Returns the number of tokens of `actor.init.tokenizer`, "char" or a directory.

    Raises UserError.
    """
    return len(CHAR_SPECIAL) + len(CHAR_ALPHABET) if tokenizer == "char" else load_tokenizer(tokenizer).vocab_size


def _is_open(prompt: Prompt) -> bool:
    """Returns whether a prompt ends within an assistant's turn."""
    return bool(prompt.messages) and prompt.messages[-1]["role"] == "assistant"


def _joined(begun: Message, rest: Message) -> Message:
    """Returns the turn that another one goes on with."""
    texts = {key: begun.get(key, "") + rest.get(key, "") for key in ("content", "reasoning_content")}
    return {**begun, **rest, **{key: text for key, text in texts.items() if text or key == "content"}}
