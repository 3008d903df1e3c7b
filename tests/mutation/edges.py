"""Faults at the edges of the runtime, which once were there: hanging servers, strangers, files and
pools of others. Each comes with the test that was written for it.
"""

from __future__ import annotations

from tests.mutation.fault import Fault

CLIENT = "tests/unit/engines/http/test_http_client.py::"
HEALTH = "tests/unit/engines/http/test_http_health.py::"
SERVER = "tests/unit/engines/http/test_http_server.py::"
TEXT = "tests/unit/engines/http/test_server_text.py::"
ENGINE = "tests/unit/engine/test_engine.py::"
POOL = "tests/unit/rewards/test_reward_pool.py::"
TIMEOUT = "tests/unit/rollout/test_episode_timeout.py::"
FALSE_LISTENER = "tests/unit/messaging/test_handshake.py::test_no_way_to_connect_follows_a_false_listener"
FSDP = "tests/unit/engines/cuda/test_fsdp_plugin.py::"
CERTIFICATE = "tests/unit/experiments/test_parity_certificate.py::test_both_learners_and_the_sampler_agree_with_the_oracle"


def _at(test: str, file: str, old: str, new: str, equivalent: str = "") -> Fault:
    return Fault(file, old, new, (test,), equivalent)


EDGES = (
    _at("tests/unit/test_hanging_run.py", "rljax/process/watchdog.py", "        if failed:", "        if False:"),
    _at(
        HEALTH + "test_what_a_silent_server_had_goes_elsewhere_when_it_is_lost",
        *("engines/http/calls.py", "if remote.member is not member:", "if False:"),
    ),
    _at(
        HEALTH + "test_a_fault_of_ours_in_a_check_costs_its_server_alone",
        *("engines/http/health.py", "except Exception as error:  # a fault", "except OSError as error:  # a fault"),
    ),
    _at(
        CLIENT + "test_nested_retries_are_not_multiplied_at_a_server",
        *("engines/http/client.py", "if failures > self._retries:", "if failures > self._retries + 1:"),
    ),
    _at(
        HEALTH + "test_a_publish_waits_for_no_server_that_is_lost",
        *("engines/http/calls.py", "self.unless_lost(remote, asyncio.ensure_future(act(remote)))", "act(remote)"),
    ),
    _at(
        POOL + "test_a_process_that_dies_is_waited_for_not_its_pipe",
        *("rljax/rewards/process.py", "asyncio.wait({reading, exit_}, return_when", "asyncio.wait({reading}, return_when"),
        equivalent="the guardian ends what a reward has started, and that closes the pipe too",
    ),
    _at(
        POOL + "test_an_answer_of_megabytes_is_an_error_of_that_call",
        *("rljax/rewards/process_main.py", "if len(line) > MAX_ANSWER and", "if False and"),
    ),
    _at(
        ENGINE + "test_a_directory_that_others_made_first_takes_no_weights",
        *("rljax/engine/storage.py", " or stat.S_IMODE(found.st_mode) & 0o022:", ":"),
    ),
    _at(
        ENGINE + "test_a_place_that_is_too_small_is_named_before_anything_is_made",
        *("rljax/engine/storage.py", "if _free(directory) < _room(needed):", "if False:"),
    ),
    _at(
        ENGINE + "test_servers_elsewhere_get_weights_below_the_workdir",
        *("rljax/engine/storage.py", "return _with_room(workdir, needed)", "pass"),
    ),
    _at(
        "tests/unit/backends/torch/test_torch_checkpoint.py",
        *("backends/torch/checkpoint_reader.py", "if (module, name) not in _KNOWN:", "if False:"),
    ),
    _at(
        SERVER + "test_pickles_and_code_of_the_models_own_are_never_loaded",
        *("engines/http/access.py", 'if "auto_map" in config:', "if False:"),
    ),
    _at(
        SERVER + "test_a_server_has_one_owner_at_a_time_named_in_the_refusal",
        *("engines/http/access.py", "if self._owner and sender != self._owner and", "if False and"),
    ),
    _at(
        SERVER + "test_a_connection_is_a_strangers_until_a_request_has_the_token",
        *("engines/http/access.py", "            proved(request)", "            pass"),
    ),
    _at(
        TEXT + "test_web_pages_of_other_sites_are_refused",
        *("engines/http/access.py", "if origin is not None and", "if False and"),
    ),
    _at(
        TEXT + "test_keys_are_read_or_refused",
        *("engines/http/protocol.py", '    "logprob_start_len": (-1,),', '    "logprob_start_len": (-1, 0),'),
    ),
    _at(
        TEXT + "test_what_ended_a_completion_is_named_and_not_in_its_text",
        *("engines/http/protocol.py", "(at := text.find(stop)) >= 0]", "(at := text.find(stop)) > len(text)]"),
    ),
    _at(
        "tests/unit/backends/jax/test_coordinator.py",
        *("backends/jax/multihost.py", 'local = coordinator.startswith("127.")', "local = False"),
    ),
    _at(
        "tests/unit/rollout/test_buffer.py",
        "rljax/rollout/buffer.py",
        "self._check_published(entry.group, self.version)",
        "pass",
    ),
    _at(
        "tests/unit/hf/test_agreement.py::test_an_export_names_the_ids_that_ended_turns_in_training",
        *("rljax/hf/turn_ends.py", "if not set(ids) <= set(_listed", "if False and not set(ids) <= set(_listed"),
    ),
    _at(
        TIMEOUT + "test_a_tool_that_never_returns_costs_its_prompt_alone",
        *("rljax/run/sampling.py", "            config.episode_timeout,", "            None,"),
    ),
    _at(
        "tests/unit/process/test_watchdog.py::test_the_innermost_frame_of_a_suspended_task_is_named",
        *(
            "rljax/process/watchdog.py",
            'waiting = getattr(waiting, "gi_yieldfrom" if',
            'waiting = None and getattr(waiting, "" if',
        ),
    ),
    _at(
        FALSE_LISTENER,
        *("rljax/messaging/handshake.py", "            handshake.verify(await read())", "            await read()"),
    ),
    _at(
        FALSE_LISTENER,
        "rljax/messaging/handshake.py",
        "    handshake.verify(receive(connection, UNPROVED, deadline=deadline))\n    connection.settimeout(None)",
        "    receive(connection, UNPROVED, deadline=deadline)\n    connection.settimeout(None)",
    ),
    _at(
        "tests/unit/engines/cuda/transports/test_broadcast.py::test_stores_listen_on_loopback_alone",
        *(
            "engines/cuda/learning/distributed.py",
            "socket.create_server((LOOPBACK, port), backlog",
            'socket.create_server(("", port), backlog',
        ),
    ),
    _at(
        "tests/unit/engines/cuda/transports/test_broadcast.py::test_stores_listen_on_loopback_alone",
        *("engines/cuda/transports/broadcast.py", "master_listen_fd=store.detach()", ""),
    ),
    _at(
        TEXT + "test_a_long_text_keeps_nobody_waiting",
        *("engines/http/server.py", "await asyncio.get_running_loop().run_in_executor(self._parsers, parse)", "parse()"),
    ),
    _at(
        TEXT + "test_a_long_text_keeps_nobody_waiting",
        *("rljax/agents/exchange.py", "if length > LONG else", "if False else"),
    ),
    *(
        _at(CERTIFICATE, f"engines/{file}", f"{before}config.gconfig.temperature", f"{before}config.gconfig.top_p")
        for file, before in (
            ("jax/learning/functions.py", "self._temperature = logit_rows_of(config, policy.spec, policy.mesh), "),
            ("cuda/learning/learner.py", "temperature = self._"),
            ("cuda/learning/learner.py", "1.0 if self._sft else self._"),
        )
    ),
    *(
        _at(
            CERTIFICATE,
            f"backends/{backend}/losses.py",
            "_total(-used * advantage, mask, weight)",
            "_total(used * advantage, mask, weight)",
        )
        for backend in ("jax", "torch")
    ),
    _at(
        FSDP + "test_pools_that_do_not_fit_the_machine_are_refused",
        *("engines/cuda/devices.py", "    if max(ends, default=0) > here:", "    if False:"),
    ),
    *(
        _at(FSDP + "test_a_run_whose_pools_do_not_fit_is_refused_before_it_starts", "engines/cuda/plugin.py", old, "pass")
        for old in (
            "check_fit(dataclasses.replace(allocation, learner=None), visible_gpus(), on_host=self.on_host(config))",
            "check_fit(allocation, visible_gpus(), on_host=True)",
        )
    ),
    _at(
        FSDP + "test_ranks_wait_for_rank_0_as_long_as_it_waits_for_servers",
        *("engines/cuda/learning/learner.py", "join(pool, config.recover.hang_timeout)", "join(pool, config.control_timeout)"),
    ),
)
