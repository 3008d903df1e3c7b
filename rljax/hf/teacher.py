"""Checks of the teacher of on-policy distillation, which must share the policy's tokens."""

from __future__ import annotations

from pathlib import Path

from rljax.config.files import unexpanded
from rljax.config.schema import ActorConfig
from rljax.errors import UserError
from rljax.hf.read_model import read_model
from rljax.hf.spec import CONFIG
from rljax.hf.tokenizer import load_tokenizer

KEY = "actor.distill.teacher"


def check(actor: ActorConfig, model_dir: Path) -> None:
    """Checks before anything is loaded that the teacher is a whole model with the policy's tokens.

    Args:
      model_dir: directory of the policy.

    Raises:
      UserError: names the key and the first token that differs.
    """
    if not actor.distill.teacher:
        return
    teacher = Path(actor.distill.teacher)
    if not (teacher / CONFIG).is_file():
        if (teacher / "adapter_config.json").is_file():
            raise UserError(f"{KEY}: {teacher} holds LoRA adapters alone (name a directory with the merged model)")
        remedy = "a Hugging Face model directory, such as export/ of a finished run; nothing is fetched from a hub"
        raise UserError(f"{KEY}: no {CONFIG} in {teacher} ({unexpanded(teacher)}{remedy})")
    theirs, ours = read_model(teacher).vocab_size, read_model(model_dir).vocab_size
    if theirs < ours:
        raise UserError(f"{KEY}: {teacher} has logits for {theirs} ids and the policy for {ours} (a teacher needs all of them)")
    _check_tokens(teacher, load_tokenizer(teacher).vocabulary(), load_tokenizer(model_dir).vocabulary())


def _check_tokens(teacher: Path, theirs: dict[str, int], ours: dict[str, int]) -> None:
    """Compares vocabularies: the teacher may have more tokens, but not other ones.

    Text is not tokenized again for it.
    """
    by_id = {index: token for token, index in theirs.items()}
    for token, index in sorted(ours.items(), key=lambda item: item[1]):
        if by_id.get(index) != token:
            there = repr(by_id[index]) if index in by_id else "no token"
            raise UserError(
                f"{KEY}: {teacher} has another tokenizer than the policy: id {index} is {there} there and {token!r} here"
                " (a teacher of the policy's own model family)"
            )
