"""Errors that a user can act on, and the typed failures of an episode."""


class UserError(Exception):
    """Bad input. Its message is one line that names the culprit and the remedy.

    Binaries print the message and exit with status 1.

    Example: UserError("train_dataset.path: no such file: data/gsm8k.jsonl (a directory with
    train.jsonl, or a .jsonl file)")
    """


class PromptTooLong(UserError):
    """A request whose prompt leaves no room for a completion in the sampler's context.

    An episode that has completions already ends there (rljax/workflows/turns.py).
    """


class PluginFailed(UserError):
    """A function of the user's that fails whenever it is called.

    Its cause has the traceback, which binaries show before the line.
    """


class IncompleteRun(UserError):
    """The end of a run that trained far less than it was asked to, because its prompts ran out."""


class EpisodeError(Exception):
    """A failed episode. Failures are counted by `kind`, as `rollout/failed/<kind>`."""

    kind = "workflow_error"


class Rejected(EpisodeError):
    """Rejects the sample, as `episode` does that returns None: no reward applies to it, say.

    It is no failure: it counts under `rollout/rejected` if the whole group is rejected.
    """

    kind = "rejected"


class RewardError(EpisodeError):
    """The reward function raised, or its process died."""

    kind = "reward_error"

    def __init__(self, message: str, place: str = "") -> None:
        """
        Args:
          place: file and line of users' code that raised, `my_rewards.py:12`; empty if unknown.
        """
        super().__init__(message)
        self.place = place


class RewardTimeout(EpisodeError):
    """The reward function took longer than `reward.timeout`; its process was killed."""

    kind = "reward_timeout"


class EpisodeTimeout(EpisodeError):
    """The episode took longer than `rollout.episode_timeout`; it was cancelled."""

    kind = "episode_timeout"


class EnvironmentFailed(EpisodeError):
    """The environment raised, or broke its contract (rljax/environments/interface.py)."""

    kind = "environment_error"


class EnvironmentTimeout(EpisodeError):
    """A call of the environment took longer than its time limit."""

    kind = "environment_timeout"


class AgentError(EpisodeError):
    """The agent raised, its process failed, or it asked for no completion."""

    kind = "agent_error"


class AgentTimeout(EpisodeError):
    """The agent took longer than its time limit; it was ended."""

    kind = "agent_timeout"


class SamplerError(EpisodeError):
    """A request got no answer: its server died or did not respond. It may be sent again."""

    kind = "server_lost"


class RequestLost(SamplerError):
    """A request that failed after all of `rollout.request_retries`. It is not sent again."""


class WorkerLost(EpisodeError):
    """The worker that was generating a group died or stopped responding."""

    kind = "worker_lost"


class StaleSampler(EpisodeError):
    """The sampler used older weights than those published to it before the request."""

    kind = "stale_sampler"


def error_of(kind: str, text: str) -> EpisodeError:
    """Returns the error of an episode in another process, given the name of its kind."""
    for error_type in EpisodeError.__subclasses__():
        if error_type.kind == kind:
            return error_type(text)
    return EpisodeError(text)


class TooManyFailures(Exception):
    """The end of a run in which `recover.max_consecutive_failures` groups failed in a row.

    Its cause is the first failure.
    """


class RankFailed(Exception):
    """One rank of a learner died, hung or failed alone, so that the run ends.

    The message is one line that names the rank. `detail` is that rank's traceback, or the end of
    its log.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class GuardrailError(Exception):
    """A metric was out of bounds for too long (rljax/metrics/guardrails.py).

    The message is one line with the config key, the metric, its value and a remedy.
    """
