"""Teachers that fit a policy pass before anything is loaded; others are refused in one line."""

import dataclasses
import json

import pytest

from rljax.errors import UserError
from rljax.hf import teacher
from rljax.testing import models


def actor_with(directory):
    actor = models.config_of().actor
    return dataclasses.replace(actor, distill=dataclasses.replace(actor.distill, teacher=str(directory)))


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return models.make_model(tmp_path_factory.mktemp("student"))


def refused(directory, student):
    with pytest.raises(UserError, match=r"^actor\.distill\.teacher: ") as caught:
        teacher.check(actor_with(directory), student)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_teacher_and_one_of_another_shape_will_do(student, tmp_path):
    teacher.check(models.config_of().actor, student)
    teacher.check(actor_with(models.make_model(tmp_path / "deep", num_layers=5, architecture="llama")), student)


def test_a_directory_without_a_model_is_refused(student, tmp_path):
    assert "no config.json" in refused(tmp_path / "absent", student)
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    assert "LoRA adapters alone" in refused(tmp_path / "adapters", student)


def test_another_tokenizer_is_refused_by_the_first_token_that_differs(student, tmp_path):
    """The student's "a" is a capital letter to this teacher, and the other way round."""
    other = models.make_model(tmp_path / "other")
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["A"] = vocabulary["A"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    assert f"id {vocabulary['a']} is 'a' there and 'A' here" in refused(other, student)


def test_a_teacher_without_logits_for_some_ids_is_refused(student, tmp_path):
    small = models.make_model(tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": models.VOCABULARY - 1}))
    assert f"for {models.VOCABULARY - 1} ids and the policy for {models.VOCABULARY}" in refused(small, student)
    large = json.loads((student / "config.json").read_text()) | {"vocab_size": models.VOCABULARY + 28}
    (small / "config.json").write_text(json.dumps(large))  # padding of the unembedding is nobody's token
    teacher.check(actor_with(small), student)
