"""Names of TRL's, verl's and OpenRLHF's: the code's table is that of docs/coming-from.md, and errors tell of it."""

import collections

import pytest

from rljax.config import defaults
from rljax.config import io as config_io
from rljax.config.foreign import key_names
from rljax.errors import UserError
from tests.unit.config.test_coming_from_names import rows

TREE = defaults.get_config().to_dict()


def last_word(key):
    return key.rpartition(".")[2]


def refusal(override):
    with pytest.raises(UserError) as refused:
        config_io.apply_override(TREE, override, "1")
    return str(refused.value)


SYSTEMS = ("TRL", "verl", "OpenRLHF")


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_name_of_the_page_that_is_no_key_here_is_in_the_table_with_a_key_of_its_row(system):
    table, ours = getattr(key_names, system.upper()), {last_word(key) for key in config_io.leaves()}
    page = collections.defaultdict(set)  # theirs -> last words of ours, of all rows that name it
    for theirs, here in rows(system):
        for name in theirs:
            page[name] |= {last_word(key.partition("=")[0]) for key in here}
    missing = {name for name, here in page.items() if here and last_word(name) not in ours} - set(table)
    assert (missing, set(table) - set(page)) == (set(), set())
    assert [name for name, key in table.items() if last_word(key) not in page[name]] == []


def test_what_the_table_names_are_keys():
    named = {ours for system in SYSTEMS for ours in getattr(key_names, system.upper()).values()}
    named -= {"critic.optimizer"}  # a section
    assert named - set(config_io.leaves()) == set()


def test_a_name_of_trl_or_verl_is_refused_with_the_name_here():
    trl = {f"{section}{name}": ours for name, ours in key_names.TRL.items() for section in ("", "actor.", "gconfig.")}
    verl = {f"{prefix}{name}": ours for name, ours in key_names.VERL.items() for prefix in ("", "actor_rollout_ref.")}
    both = trl | verl | key_names.OPENRLHF
    told = {key: refusal(key) for key in both}
    assert {key: told[key] for key, ours in both.items() if ours not in told[key]} == {}
    assert refusal("algo.kl.init") == "algo: no such key (a section of OpenRLHF's: docs/coming-from.md has its keys)"
    assert refusal("trainer.n_gpus") == "trainer: no such key (a section of verl's: docs/coming-from.md has its keys)"


def test_a_name_without_a_counterpart_is_on_the_page_and_told_with_what_there_is_instead():
    page = {name for system in SYSTEMS for theirs, here in rows(system) for name in theirs if not here}
    assert set(key_names.NO_COUNTERPART) - page == set()
    for name, reason in key_names.NO_COUNTERPART.items():
        assert reason in refusal(name) and "docs/coming-from.md" in refusal(name), name
    assert "gspo actor.importance_sampling_level=sequence" in refusal("actor_rollout_ref.actor.policy_loss.loss_mode")


def test_a_nearer_key_of_ours_comes_first():
    assert "did you mean actor.path or" in refusal("rollout.path")
    assert "did you mean beta" in refusal("actor.optimizer.beta")
