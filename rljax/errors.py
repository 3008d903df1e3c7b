"""Errors that a user can act on, and the typed failures of an episode."""


class UserError(Exception):
    """Something in the input is wrong: one line that names the culprit and the remedy. Binaries
    print it and exit with 1.

    Example: UserError("train_dataset.path: no such file: data/gsm8k.jsonl (a directory with
    train.jsonl, or a .jsonl file)")
    """


class EpisodeError(Exception):
    """An episode failed.

    `kind` is the name its failures are counted under, in `rollout/failed/<kind>`.
    """

    kind = "workflow_error"


class RewardError(EpisodeError):
    """The reward function raised, or its process died."""

    kind = "reward_error"


class RewardTimeout(EpisodeError):
    """The reward function ran past `reward.timeout`; its process was killed."""

    kind = "reward_timeout"


class SamplerError(EpisodeError):
    """A request was lost with its server; it may be sent again."""

    kind = "server_lost"


class RequestLost(SamplerError):
    """A request that its sampler gave up after trying again by itself, by
    `rollout.request_retries`: nobody sends it again.
    """


class WorkerLost(EpisodeError):
    """The worker process that generated a group is gone, or silent."""

    kind = "worker_lost"


class StaleSampler(EpisodeError):
    """The sampler made tokens with weights older than those that were published to it before it
    began.
    """

    kind = "stale_sampler"


def error_of(kind: str, text: str) -> EpisodeError:
    """The error of an episode in another process, by the name of its kind."""
    for known in EpisodeError.__subclasses__():
        if known.kind == kind:
            return known(text)
    return EpisodeError(text)


class TooManyFailures(Exception):
    """So many groups failed in a row that the run ends (recover.max_consecutive_failures).

    Its cause is the first failure.
    """


class RankFailed(Exception):
    """One process of a learner of several died, hung or failed alone: the run ends, for the others
    wait for it.

    Its message is one line that names the rank; `detail` is what that rank last said, its
    traceback or the end of its log.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class GuardrailError(Exception):
    """A metric was out of its bound for too long (rljax/metrics/guardrails.py): one line with key,
    metric, value and remedy.
    """
