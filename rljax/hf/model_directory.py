"""The Hugging Face directory that a run starts from: an existing one, or a new random model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rljax.config.files import unexpanded
from rljax.config.schema import ActorConfig
from rljax.errors import UserError
from rljax.hf.init import init_directory
from rljax.hf.tokenizer import build_char_tokenizer, load_tokenizer

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def prepare_model_directory(actor: ActorConfig, init: Path, *, seed: int) -> Path:
    """Returns the directory of `actor.path`, or makes a random model.

    With `actor.init_from_scratch` the model is made in `init`, unless it is there already.

    Raises:
      UserError: there is no such directory, or its tokenizer is missing.
    """
    if not actor.init_from_scratch:
        directory = Path(actor.path)
        if not (directory / "config.json").is_file():
            remedy = "a Hugging Face model directory; nothing is fetched from a hub: download it and name the directory"
            raise UserError(f"actor.path: no config.json in {directory} ({unexpanded(directory)}{remedy})")
        return directory
    if not init.is_dir():
        aside = init.with_name(f".{init.name}.tmp")  # a killed run leaves this half-made, and never `init`
        shutil.rmtree(aside, ignore_errors=True)
        _make(actor, aside, seed)
        os.replace(aside, init)
    return init


def _make(actor: ActorConfig, directory: Path, seed: int) -> None:
    if actor.init.tokenizer == "char":
        build_char_tokenizer(directory)
    else:
        _copy_tokenizer(Path(actor.init.tokenizer), directory)
    tokenizer = load_tokenizer(directory)
    init_directory(
        actor.init,
        directory,
        seed=seed,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        pad_token_id=tokenizer.pad_token_id,
    )


def _copy_tokenizer(source: Path, directory: Path) -> None:
    if not (source / "tokenizer_config.json").is_file():
        raise UserError(f"actor.init.tokenizer: no tokenizer in {source} ('char', or a directory with tokenizer.json)")
    directory.mkdir(parents=True)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
