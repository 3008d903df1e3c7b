"""The file that --config names: the user's own by its path, one that comes with rljax by its name."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from rljax.errors import UserError

_FOLDER = Path(__file__).parents[1] / "configs"  # found, not imported: config files build on this package


def find(name: str) -> Path:
    """Returns the path of a config file.

    Args:
      name: path to an existing file; otherwise the name of a config that comes with rljax, as
        `quickstart`, `algorithms/grpo` or `algorithms.grpo`.

    Raises:
      UserError: it is neither; the message names the nearest configs of rljax.
    """
    if Path(name).is_file():
        return Path(name)
    known = names()
    if (slashed := name.replace(".", "/")) in known:
        return _FOLDER / f"{slashed}.py"
    raise UserError(f"--config: no such file: {name} ({unexpanded(name)}{_remedy(name, known)})")


def unexpanded(path: str | Path) -> str:
    """Returns the beginning of a remedy for a path that is not there: why, if it begins with `~`."""
    return "~ stands for no home directory in a config: write the whole path; " if str(path).startswith("~") else ""


def names() -> list[str]:
    """Returns the names of the configs that come with rljax, those in subfolders last."""
    files = [file.relative_to(_FOLDER) for file in _FOLDER.rglob("*.py") if file.stem != "__init__"]
    return [file.with_suffix("").as_posix() for file in sorted(files, key=lambda file: (len(file.parts), file))]


def _remedy(name: str, known: list[str]) -> str:
    """Suggests configs whose last part is similar: `grpo` is near algorithms/grpo."""
    ending = re.split(r"[/.]", name.removesuffix(".py"))[-1]
    close = difflib.get_close_matches(ending, {_ending(one) for one in known})
    if close:
        return "did you mean " + " or ".join(one for ending in close for one in known if _ending(one) == ending) + "?"
    return f"a Python file with get_config, or one by name: {', '.join(known[:8])}, ..."


def _ending(name: str) -> str:
    return name.rpartition("/")[2]
