"""Each wait of a run ends before the wait around it does, whatever the config's limits are."""

import pytest

from rljax.checkpoints import background
from rljax.engines.cuda.transports.broadcast import BroadcastGroup
from rljax.engines.http import client, health
from rljax.engines.http.plugin import sampler_of
from rljax.messaging import handshake
from rljax.multiprocess.follower import HANG_SHARE
from rljax.process import watchdog
from rljax.testing.harness import make_config
from rljax.workers import connection as workers_connection


@pytest.mark.parametrize("hang_timeout", [120.0, 1800.0, 20000.0])
def test_every_wait_ends_before_the_one_around_it(hang_timeout):
    """Named as (outer, inner) pairs of seconds; a sum is what may be waited for one after the other."""
    config = make_config({"recover.hang_timeout": hang_timeout})
    hang, episode, request = config.recover.hang_timeout, config.episode_timeout, config.request_timeout
    control, group = sampler_of(config, [], 0).control_timeout, BroadcastGroup("nccl", wait=config.control_timeout)
    publish = 3 * control  # pause, load, resume, one after the other
    waits = {
        "the watchdog, an episode": (hang, episode),
        "an episode, a request": (episode, request),
        "the watchdog, a publish": (hang, publish),
        "a load, the joining of a broadcast": (control, group.join_timeout),
        "a load, a bucket": (control, group.bucket_timeout),
        "torch's end of the process, a bucket": (2 * group.bucket_timeout, group.bucket_timeout),
        "a rank's watchdog, rank 0 in a publish": (HANG_SHARE * hang, control + group.join_timeout + group.bucket_timeout),
        "the leader's watchdog, a rank's": (hang, HANG_SHARE * hang),
        "the watchdog, ranks for each other's part of a checkpoint": (hang, background.WAIT_SHARE * hang),
        "a request, the abort of one": (request, client.ABORT_TIMEOUT),
    }
    assert not {name: pair for name, pair in waits.items() if not pair[1] < pair[0]}


def test_waits_that_no_key_changes_end_before_the_ones_around_them():
    config = make_config({"recover.hang_timeout": 1800.0})  # the default
    lost = health.SILENCE * (health.CHECK_TIMEOUT + health.INTERVAL)
    waits = {
        "a request, the loss of its server": (config.request_timeout, lost),
        "a pause, the loss of a server": (config.control_timeout, lost),
        "an episode, its reward": (config.episode_timeout, (config.reward.retries + 1) * config.reward.timeout),
        "an episode, the loss of its worker": (config.episode_timeout, workers_connection.SILENCE),
        "the loss of a worker, a handshake": (workers_connection.SILENCE, handshake.TIME_LIMIT),
        "the watchdog, the end of a run": (config.recover.hang_timeout, watchdog.CLOSE_TIMEOUT),
        "the end of a run, the end of a sampler": (watchdog.CLOSE_TIMEOUT, client.ABORT_TIMEOUT + client.ABORT_GRACE),
    }
    assert not {name: pair for name, pair in waits.items() if not pair[1] < pair[0]}
