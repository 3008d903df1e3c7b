"""Files of a tokenizer: what loads them, and the EOS ids that they and the model's files name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rljax import json_fields
from rljax.errors import UserError


def transformers_class(directory: Path) -> Any:
    """Returns the class of transformers that loads a directory's tokenizer.

    Raises UserError for a tokenizer that is code of the directory, and where there is none.
    """
    if (directory / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast  # reads tokenizer.json as it is

        return PreTrainedTokenizerFast
    if (directory / "tokenizer_config.json").is_file():
        for name in ("tokenizer_config.json", "config.json"):
            if _names_code(directory / name):
                raise UserError(
                    f"tokenizer: {directory} has no tokenizer.json, and auto_map in {name} names Python code, which is not"
                    " run (save the tokenizer with a tokenizer.json)"
                )
        from transformers import AutoTokenizer  # makes one from sentencepiece or vocabulary files

        return AutoTokenizer
    raise UserError(f"tokenizer: {directory} has no tokenizer.json")


def _names_code(path: Path) -> bool:
    """Returns whether a file of a model directory says that its tokenizer is code of the directory."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    names = config.get("auto_map") if isinstance(config, dict) else None
    return bool(names) and (not isinstance(names, dict) or "AutoTokenizer" in names)


def eos_ids(directory: Path, inner: Any) -> list[int]:
    """Returns the EOS ids of generation_config.json, config.json and the tokenizer, in that order.

    Those of config.json's text_config are included.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        content = json_fields.read_object(path, {"eos_token_id": json_fields.TOKEN_IDS, "text_config": json_fields.OBJECT})
        for section in (content, content.get("text_config")):
            if section is not None:
                json_fields.check(section, {"eos_token_id": json_fields.TOKEN_IDS}, f"{path}: text_config")
            found = section.get("eos_token_id") if isinstance(section, dict) else None
            ids += found if isinstance(found, list) else [] if found is None else [found]
    if inner.eos_token_id is not None:
        ids.append(inner.eos_token_id)
    return list(dict.fromkeys(int(i) for i in ids))
