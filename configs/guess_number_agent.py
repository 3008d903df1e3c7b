"""Guess-the-number, played by an agent that talks to the OpenAI endpoint with the official client."""

from ml_collections import ConfigDict

from rljax.configs import guess_number


def get_config() -> ConfigDict:
    config = guess_number.get_config()
    config.rollout.workflow = "agent"
    config.rollout.workflow_args.agent = "rljax.environments.agent:play"
    config.train_dataset.batch_size = 16
    config.total_train_steps = 60
    config.valid_dataset.batch_size = 32
    config.evaluator.max_prompts = 128
    return config
