"""Files of a model directory that have to agree: tokenizer, chat template and model."""

from __future__ import annotations

import logging
from pathlib import Path

from rljax import json_fields
from rljax.errors import UserError
from rljax.hf.spec import CONFIG, read_config
from rljax.hf.tokenizer import HFTokenizer

log = logging.getLogger(__name__)


def check(model_dir: Path, tokenizer: HFTokenizer) -> None:
    """Checks before anything starts that a model knows every id that its tokenizer gives.

    Ids without an embedding would be read as others. Warns where two files say different things
    and one of them is not read.

    Raises:
      UserError: names both files and the first token that differs.
    """
    size = read_config(model_dir).get("vocab_size")  # some architectures have a default, which is theirs
    vocabulary = tokenizer.vocabulary()
    # Image-text models add tokens for images behind a vocabulary that their text part has not
    needed = {token: i for token, i in vocabulary.items() if size and i >= size and not tokenizer.is_spare(token)}
    if needed:
        token, index = min(needed.items(), key=lambda item: item[1])
        raise UserError(
            f"{model_dir}: the tokenizer has {token!r} as id {index}, and the model of {CONFIG} has ids below {size}"
            " (vocab_size: the two are of different models, or the embedding was not resized)"
        )
    highest = max(vocabulary.values())
    for index in tokenizer.eos_token_ids:
        if not 0 <= index <= highest:
            raise UserError(
                f"{model_dir}: EOS id {index} of generation_config.json or {CONFIG} is no token (the last is {highest})"
            )
    _warn_of_two_templates(model_dir)


def _warn_of_two_templates(model_dir: Path) -> None:
    template, config = model_dir / "chat_template.jinja", model_dir / "tokenizer_config.json"
    if template.is_file() and config.is_file():
        other = json_fields.read_object(config, {}).get("chat_template")
        if isinstance(other, str) and other.strip() != template.read_text(encoding="utf-8").strip():
            log.warning("%s: another chat_template than in tokenizer_config.json; this one is used", template)
