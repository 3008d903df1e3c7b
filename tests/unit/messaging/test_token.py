"""The user's token: made once, readable by its user alone, and never sent to another machine."""

import os
import stat
import threading

import pytest

from rljax.engines.http.plugin import token_for
from rljax.errors import UserError
from rljax.messaging.token import UnsafeToken, own_token, token_file


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("RLJAX_TOKEN", raising=False)


def test_it_is_made_once_also_by_several_at_once():
    found = []
    threads = [threading.Thread(target=lambda: found.append(own_token())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found[0]) > 32 and len(found) == 8
    assert stat.S_IMODE(token_file().stat().st_mode) == 0o600
    assert [path.name for path in token_file().parent.iterdir()] == ["token"]


def test_the_variable_comes_first(monkeypatch):
    monkeypatch.setenv("RLJAX_TOKEN", "sesame")
    assert own_token() == token_for("http://10.0.0.4:30000") == "sesame"
    assert not token_file().exists()


@pytest.mark.parametrize(
    ("base", "sent"), [("http://127.0.0.1:30000", True), ("http://localhost:1", True), ("http://10.0.0.4:30000", False)]
)
def test_the_token_of_the_file_stays_on_this_machine(base, sent):
    assert token_for(base) is None  # none is made for a client
    token = own_token()
    assert token_for(base) == (token if sent else None)


@pytest.mark.parametrize("harm", ["readable", "link", "empty"])
def test_a_file_that_others_may_know_is_refused_in_one_line(tmp_path, harm):
    own_token()
    if harm == "readable":
        token_file().chmod(0o644)
    elif harm == "empty":
        token_file().write_text("")
    else:
        os.rename(token_file(), tmp_path / "elsewhere")
        token_file().symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeToken, match=r"^\S*/rljax/token: .* \(delete it, or set RLJAX_TOKEN\)$"):
        own_token()
    with pytest.raises(UserError, match="delete it"):
        token_for("http://127.0.0.1:1")
