"""A process that was killed is told from one that lives, by the kernel or by the file it touches."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from rljax.process import liveness
from rljax.process.liveness import Identity

NAMES_ITSELF = (
    "import dataclasses, json, time\n"
    "from rljax.process.liveness import Identity\n"
    "print(json.dumps(dataclasses.asdict(Identity.of_this_process())), flush=True)\n"
    "time.sleep(60)"
)


@pytest.fixture
def child():
    """A process that says who it is and waits."""
    process = subprocess.Popen([sys.executable, "-c", NAMES_ITSELF], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def identity_of(child) -> Identity:
    found = Identity.read(json.loads(child.stdout.readline()))
    assert found is not None
    return found


def test_a_process_is_running_until_it_is_killed_even_while_nobody_waits_for_it(child, tmp_path):
    identity = identity_of(child)
    assert identity.is_running() is True and liveness.lost(identity, tmp_path) == ""
    child.send_signal(signal.SIGSTOP)  # it may go on
    assert identity.is_running() is True
    child.kill()
    while identity.is_running():
        time.sleep(0.01)
    assert child.returncode is None  # a zombie
    assert f"({child.pid} on " in liveness.lost(identity, tmp_path)
    child.wait()
    assert identity.is_running() is False


def test_another_process_of_the_same_id_is_another(child):
    identity = identity_of(child)
    assert dataclasses.replace(identity, started=identity.started - 1).is_running() is False


def test_elsewhere_the_age_of_the_file_tells(child, tmp_path):
    elsewhere = dataclasses.replace(identity_of(child), system="other", host="box")
    assert elsewhere.is_running() is None
    sign = tmp_path / "status.json"
    assert liveness.lost(elsewhere, sign) == ""  # there is no sign to go by
    sign.touch()
    assert liveness.lost(elsewhere, sign) == ""
    long_ago = time.time() - liveness.SILENCE - 60
    os.utime(sign, (long_ago, long_ago))
    assert "on box) has given no sign of life for 11 minutes" in liveness.lost(elsewhere, sign)


def test_a_process_touches_its_file_while_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(liveness, "BEAT", 0.01)
    sign = tmp_path / "status.json"
    with liveness.beating(sign):
        time.sleep(0.05)
        assert not sign.exists()  # it makes none
        sign.touch()
        os.utime(sign, (0, 0))
        while sign.stat().st_mtime == 0:
            time.sleep(0.01)
    os.utime(sign, (0, 0))
    time.sleep(0.05)
    assert sign.stat().st_mtime == 0


@pytest.mark.parametrize("record", [{}, {"pid": 3}, {"pid": "3", "host": "a", "system": "b", "started": 4}])
def test_a_record_of_an_older_version_names_no_process(record):
    assert Identity.read(record) is None
