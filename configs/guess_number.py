"""Asynchronous GRPO of a character-level model on guess-the-number, an environment of several turns."""

from ml_collections import ConfigDict

from rljax.configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.total_train_steps = 200
    config.rollout.workflow = "environment"

    # Games: "1-15?" 9, "<" 3, ">" 5, ... ; a guess ends with a newline, which is what the model sees of its turn's end
    for dataset in (config.train_dataset, config.valid_dataset):
        dataset.path = "task:guess_number"
        del dataset.task.digits
        dataset.task.size = 15
        dataset.task.guesses = 4
        dataset.task.question = "1-{size}?"
        dataset.task.higher = ">"
        dataset.task.lower = "<"
        dataset.task.illegal = "!"
        dataset.task.ending = "\n"
        dataset.task.n = 2000
    config.valid_dataset.task.n = 256
    del config.train_dataset.task.misled
    config.train_dataset.task.earlier = True
    config.train_dataset.task.sensible = 0.3
    config.gconfig.stop_token_ids = (4,)  # the newline
    config.gconfig.max_new_tokens = 4
    config.warmup.steps = 600

    config.actor.init.hidden_size = 96
    config.actor.init.intermediate_size = 256
    config.actor.init.num_heads = 3
    config.actor.init.num_kv_heads = 3
    config.actor.optimizer.lr = 1e-3
    config.jax.context_length = 32
    return config
