"""Pictures in messages, and the processor of an image-text model, as numpy arrays.

{"role": "user", "content": [{"type": "image", "image": "data:image/png;base64,..."},
                             {"type": "text", "text": "How many circles are there?"}]}

processor = load_processor(model_dir)
encoded = processor.encode(prompt)       # token ids with a picture's share of them, pixel values
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.chat.messages import Message
from rljax.errors import UserError
from rljax.types import Prompt

PREFIX = "data:image/"
TEXT_INPUTS = ("input_ids", "attention_mask")  # of a processor; its other outputs are about the pictures
MARKS = ("image_token", "video_token", "boi_token")  # attributes of a processor: texts in whose place features go


@dataclasses.dataclass(frozen=True)
class EncodedPictures:
    """A prompt with pictures, as an image-text model takes it."""

    token_ids: np.ndarray  # [P] int32; a picture has as many tokens as the model makes of it
    text_ids: np.ndarray  # [Q] int32; a picture has one token, in whose place the others go
    text: str  # the rendered chat template, with a mark per picture
    urls: tuple[str, ...]  # data URLs of the pictures
    arrays: Mapping[str, np.ndarray]  # inputs of the model beside token ids: pixel values, sizes


class PictureProcessor:
    """Encodes prompts with a processor of transformers."""

    def __init__(self, inner: Any, directory: Path) -> None:
        self._inner = inner
        self._directory = directory

    @property
    def mark_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that a model reads as the place of a picture, or of a video."""
        marks = {getattr(self._inner, name, None) for name in MARKS} - {None}
        known = self._inner.tokenizer.get_vocab()
        return tuple(sorted(known[mark] for mark in marks if mark in known))

    def encode(self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None) -> EncodedPictures:
        """Renders the chat template, and encodes text and pictures.

        Args:
          chat_template_kwargs: of the config; the prompt's own go over them.

        Raises:
          UserError: a picture can't be read, the template leaves it out, a text has a control
            token, or the prompt has tools or a turn to be continued.
        """
        where = f"prompt {prompt.uid}"
        if prompt.tools or prompt.messages[-1]["role"] == "assistant":
            raise UserError(f"{where}: has pictures, with tools or a turn to be continued (pictures go without them)")
        urls = picture_urls(prompt.messages, where)
        pictures = [read_picture(url, where) for url in urls]
        self._refuse_marks(prompt.messages, where)
        text = self._inner.apply_chat_template(
            [_without_data(m) for m in prompt.messages],
            tokenize=False,
            add_generation_prompt=True,
            **{**(chat_template_kwargs or {}), **prompt.chat_template_kwargs},
        )
        bos = self._inner.tokenizer.bos_token
        begins = bool(bos) and text.startswith(bos)  # as transformers: a BOS is added unless the template wrote one
        try:
            out = dict(self._inner(text=text, images=pictures or None, return_tensors="np", add_special_tokens=not begins))
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise UserError(f"prompt {prompt.uid}: {self._directory}: the processor refuses it: {reason}") from error
        text_ids = self._inner.tokenizer.encode(text, add_special_tokens=not begins)
        arrays = {name: np.asarray(value) for name, value in out.items() if name not in TEXT_INPUTS}
        return EncodedPictures(np.asarray(out["input_ids"][0], np.int32), np.asarray(text_ids, np.int32), text, urls, arrays)

    def arrays_of(self, url: str) -> dict[str, np.ndarray]:
        """Returns what the model takes of one picture, as in `encode`: pixel values, sizes.

        Raises UserError if it can't be read.
        """
        out = self._inner.image_processor(images=[read_picture(url, "picture")], return_tensors="np")
        return {name: np.asarray(value) for name, value in dict(out).items()}

    def _refuse_marks(self, messages: Sequence[Message], where: str) -> None:
        """Raises UserError for text that would be read as a control token, as a picture's mark."""
        tokenizer = self._inner.tokenizer
        marks = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        for text in (text for message in messages for text in _texts(message)):
            found = next((mark for mark in marks if mark in text), None)
            if found is not None:
                raise UserError(f"{where}: its text has the control token {found!r} (take it out of the record)")


def load_processor(directory: Path | str) -> PictureProcessor:
    """Loads the processor of an image-text model's directory. Raises UserError.

    It resizes by Pillow, whether or not torchvision is installed: theirs differ in some pixels.
    """
    from transformers import AutoProcessor

    try:
        inner = AutoProcessor.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False, backend="pil")
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{directory}: no processor for pictures can be loaded: {reason[:300]}") from error
    if getattr(inner, "image_processor", None) is None:
        raise UserError(f"{directory}: the model has no processor for pictures, and the prompts have pictures")
    return PictureProcessor(inner, Path(directory))


def has_pictures(messages: Sequence[Message]) -> bool:
    return any(_is_picture(part) for message in messages for part in _parts(message))


def picture_urls(messages: Sequence[Message], where: str) -> tuple[str, ...]:
    """Returns the pictures of a conversation in order, as data URLs. Raises UserError."""
    return tuple(_url(part, where) for message in messages for part in _parts(message) if _is_picture(part))


def picture_url(picture: Any) -> str:
    """Encodes a picture of Pillow's as a data URL of a PNG."""
    out = io.BytesIO()
    picture.save(out, "PNG")
    return f"{PREFIX}png;base64,{base64.b64encode(out.getvalue()).decode()}"


def read_picture(url: str, where: str) -> Any:
    """Decodes a data URL to a picture of Pillow's, RGB. Raises UserError."""
    from PIL import Image, UnidentifiedImageError

    encoded = url.partition(",")[2]
    try:
        return Image.open(io.BytesIO(base64.b64decode(encoded, validate=True))).convert("RGB")
    except (binascii.Error, UnidentifiedImageError, OSError, ValueError) as error:
        kind = type(error).__name__
        raise UserError(f"{where}: not a picture: {url[:40]}... ({kind}; a data URL of a PNG or JPEG is needed)") from None


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content") or ()
    return () if isinstance(content, str) else content


def _texts(message: Message) -> Iterator[str]:
    content = message.get("content") or ()
    if isinstance(content, str):
        yield content
    else:
        yield from (part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _url(part: Mapping[str, Any], where: str) -> str:
    value = part.get("image", part.get("url", part.get("image_url")))
    url = value.get("url") if isinstance(value, Mapping) else value
    if isinstance(url, str) and url.startswith(PREFIX):
        return url
    if isinstance(url, str) and "://" not in url:
        path = Path(url)
        if not path.is_file():
            raise UserError(f"{where}: no such picture: {url[:80]} (a file, or a data URL)")
        kind = path.suffix.lstrip(".").lower().replace("jpg", "jpeg") or "png"
        return f"{PREFIX}{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    raise UserError(f"{where}: a picture is a file or a data URL, not {str(url)[:40]!r} (nothing is fetched)")


def _without_data(message: Message) -> dict[str, Any]:
    """Returns a message as chat templates expect it: a picture is only a mark."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    return {**message, "content": [{"type": "image"} if _is_picture(part) else part for part in content]}
