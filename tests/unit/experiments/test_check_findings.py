"""What `experiments.check` says of data and of a model that it made for itself."""

import json
import types

from rljax.config import io as config_io
from rljax.experiments import check


def findings(tmp_path, monkeypatch, records, *overrides):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(check, "ROLLOUTS", types.SimpleNamespace(value=0))  # no command line was parsed
    data = [("train_dataset.path", str(tmp_path / "train.jsonl")), ("train_dataset.type", "prompt_answer")]
    config = config_io.load(
        "quickstart", [*data, *overrides, ("valid_dataset.path", ""), ("actor.loss", "sft"), ("warmup.field", "answer")]
    )
    (tmp_path / "scratch").mkdir()
    return [str(finding) for finding in check.Checks(config, tmp_path / "scratch").run()]


def test_empty_prompts_and_answers_are_told_with_their_place(tmp_path, monkeypatch):
    records = [{"prompt": "1+1=", "answer": "2"}, {"prompt": " ", "answer": "2"}, {"prompt": "1+2=", "answer": ""}]
    said = "\n".join(findings(tmp_path, monkeypatch, records))
    assert "1 of 3 records have a prompt without text, the first " in said and "train.jsonl:2 (" in said
    assert "1 of 3 records have an empty 'answer', the first " in said and "train.jsonl:3 (" in said


def test_an_error_about_a_model_from_scratch_names_no_directory_that_is_gone(tmp_path, monkeypatch):
    said = findings(tmp_path, monkeypatch, [{"prompt": "1+1=", "answer": "2"}], ("rollout.workflow", "tool_use"))
    (error,) = [line for line in said if "no place for tools" in line]
    assert "the model from scratch (actor.init_from_scratch): the chat template has" in error
    assert not any(str(tmp_path / "scratch") in line for line in said)
