"""docs/runtime.md names what there is."""

from pathlib import Path

from rljax.config import io as config_io
from rljax.config import resume
from rljax.configs import base
from rljax.errors import EpisodeError
from rljax.metrics.guardrails import GUARDS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "runtime.md").read_text()


def test_the_page_names_every_key_kind_and_default():
    keys = [key for key in config_io.leaves() if key.startswith(("guard.", "recover.")) and key != "recover.mode"]
    named = [*keys, *(key.rstrip(".") for key in resume.FIXED), *resume.KINDS]
    named += [kind.kind for kind in (EpisodeError, *EpisodeError.__subclasses__())] + [guard.metric for guard in GUARDS]
    assert not [name for name in named if name not in PAGE]
    guard = base.get_config().guard
    for entry in GUARDS:
        (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `guard.{entry.key}`")]
        default = guard[entry.key]
        assert line.endswith(f"| {default if default is None else f'{default:g}'} |"), line
