"""Counting drawn objects: the picture has as many as the answer says."""

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the extra [vision]")

from scipy import ndimage

from rljax.chat.messages import parse_messages
from rljax.chat.pictures import picture_urls, read_picture
from rljax.config.schema import DatasetConfig
from rljax.data import open_prompts
from rljax.data.tasks import make_task
from rljax.errors import UserError
from rljax.hf.tokenizer import load_tokenizer, prompt_ids_of
from tests.image_text import make_image_text_model

PATH = "task:count_objects"


def records(split="train", **arguments):
    made = make_task(PATH, split, arguments, "train_dataset")
    return [made[i] for i in range(len(made))]


def objects(record):
    """Counts connected areas of the picture that are not white: objects don't touch."""
    (url,) = picture_urls(parse_messages(record["messages"], "here"), "here")
    drawn = (np.asarray(read_picture(url, "here")) < 255).any(-1)
    return ndimage.label(drawn)[1]


def test_a_picture_has_the_objects_that_the_answer_counts():
    alone = records(n=40, others=0)
    assert [objects(record) for record in alone] == [int(record["answer"]) for record in alone]
    assert {record["answer"] for record in alone} == set("12345") and len({record["shape"] for record in alone}) == 3
    crowded = records(n=40, others=3)
    beside = [objects(record) - int(record["answer"]) for record in crowded]
    assert set(beside) == {0, 1, 2, 3}


def test_a_prompt_that_is_too_long_by_its_picture_is_refused_at_the_start(tmp_path):
    dataset = DatasetConfig(path=PATH, type="task", task={"n": 2, "pixels": 32})
    tokenizer = load_tokenizer(make_image_text_model(tmp_path))
    prompts = open_prompts(dataset, seed=0)
    longest = max(len(prompt_ids_of(tokenizer, prompt)) for prompt in prompts.epoch(0))
    prompts.require_fit(tokenizer, most=longest, why="room")
    with pytest.raises(UserError, match=f"has {longest} tokens.*: room"):
        prompts.require_fit(tokenizer, most=longest - 1, why="room")


def test_pictures_follow_from_seed_and_split():
    assert records(n=3) == records(n=5)[:3]
    assert not {str(r["messages"]) for r in records(n=30)} & {str(r["messages"]) for r in records("test", n=30)}
    assert records(n=3, seed=1) != records(n=3)


@pytest.mark.parametrize("arguments", [{"most": 20}, {"pixels": 8}, {"mots": 3}])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(UserError, match=PATH):
        records(**arguments)
