"""Rollout consistency: two right engines agree, a planted fault is found at its layer, a near-tie is
no disagreement.
"""

import dataclasses
import json
import shutil

import numpy as np
import pytest

pytest.importorskip("torch", reason="transformers' models need the extra [torch]")

from rljax.errors import UserError
from rljax.experiments.comparison import subjects
from rljax.experiments.comparison.case import Greedy, make_case
from rljax.experiments.comparison.jax_subject import JaxSubject
from rljax.experiments.comparison.report import BOUNDS, Differences, layers_apart, write_json
from rljax.experiments.comparison.subjects import Results
from rljax.experiments.comparison.transformers_subject import TransformersSubject
from rljax.testing.models import config_of, make_model

GLOBAL = 5  # the first layer of Gemma 3 that sees the whole context, and has a rotary base of its own


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(
        tmp_path_factory.mktemp("compare") / "model", architecture="gemma3", num_layers=GLOBAL + 1, initializer_range=0.3
    )


@pytest.fixture(scope="module")
def case(model, tmp_path_factory):
    return case_of(model, tmp_path_factory.mktemp("data"))


def case_of(model, directory, **overrides):
    texts = ["12+34=", "What is 2 times 21?", "one two three four five six"]
    (directory / "train.jsonl").write_text("".join(json.dumps({"prompt": text, "answer": "46"}) + "\n" for text in texts))
    data = {"train_dataset.path": str(directory), "train_dataset.type": "prompt_answer", "train_dataset.shuffle": False}
    config = config_of(**{"actor.path": str(model), "jax.decode_steps": 1, **data, **overrides})
    return make_case(config, model, prompts=3, tokens=6, dtype="float32")


def wrong_rope(model, directory):
    """A copy of the model whose global layers rotate with another base."""
    shutil.copytree(model, directory)
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"]["full_attention"]["rope_theta"] = 1000.0
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_transformers_and_jax_agree_by_orders_of_magnitude(case):
    """Log-probs of given tokens, and every layer; the decoding of both is in the slow test of the command."""
    first, other = TransformersSubject(case), JaxSubject(case)
    sequences = [np.concatenate([prompt, prompt[:6]]) for prompt in case.prompts]
    apart = Differences.of(first.score(sequences), other.score(sequences))
    assert apart.max < 1e-4 and apart.within(BOUNDS["float32"]) and apart.tokens == sum(map(len, sequences))
    layers = layers_apart(first.hidden_states(sequences[0]), other.hidden_states(sequences[0]))
    assert max(layers.differences) < 1e-5 and len(layers.differences) == GLOBAL + 3
    assert layers.first(BOUNDS["float32"]) is None


def test_a_wrong_rope_base_is_found_at_the_layer_that_has_it(case, model, tmp_path):
    other = dataclasses.replace(case, model_dir=wrong_rope(model, tmp_path / "wrong"))
    prompt = case.prompts[1]
    states = TransformersSubject(case).hidden_states(prompt), JaxSubject(other).hidden_states(prompt)
    layers = layers_apart(*states)
    assert layers.first(BOUNDS["float32"]) == f"layer {GLOBAL}"
    assert max(layers.differences[: GLOBAL + 1]) < 1e-5, "the embedding and the layers before it are right"


def results(lead, ends=False):
    """One prompt of two tokens. The completions part at their second token, which the first engine
    finds likelier than the other's by `lead`; or the other ends before it.
    """
    first, other = np.array([7, 8, 9]), np.array([7, 5, 6])[: 1 if ends else 3]
    scores = np.array([0, -1.0, -0.5, -0.7, -0.1])
    checks = np.array([0, -1.0, -0.5, -0.7 - lead, -3.0])[: 2 + len(other)]
    return Results([Greedy(first, scores[2:])], [scores], [Greedy(other, checks[2:])], [scores], [checks])


@pytest.mark.parametrize(("lead", "near"), [(0.0, True), (0.019, True), (0.021, False), (-0.5, True)])
def test_a_near_tie_is_told_apart_from_a_disagreement(case, lead, near):
    case = dataclasses.replace(case, uids=("0/0",), prompts=(np.array([1, 2]),))
    pair = results(lead).pair("a", "b", case, None)
    (divergence,) = pair.divergences
    assert (divergence.position, divergence.token, divergence.other) == (1, 8, 5)
    assert divergence.lead == pytest.approx(lead) and divergence.is_tie(pair.bounds) is near
    assert pair.agrees is near and ("1 disagree" in "\n".join(pair.lines())) is not near


def test_a_completion_that_ends_before_the_other_disagrees(case, tmp_path):
    case = dataclasses.replace(case, uids=("0/0",), prompts=(np.array([1, 2]),))
    pair = results(0.0, ends=True).pair("a", "b", case, None)
    assert [(d.position, d.token, d.other) for d in pair.divergences] == [(1, 8, None)] and not pair.agrees
    write_json(tmp_path / "report.json", "model", [pair])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["agrees"] is False and report["pairs"][0]["divergences"][0]["lead"] is None


def test_differences_are_of_all_tokens_and_nan_is_beyond_every_bound():
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=1000), generator.normal(size=1000)
    whole, parts = Differences.of([a], [b]), Differences.of(np.split(a, [10, 400]), np.split(b, [10, 400]))
    assert whole == parts and whole.mean <= whole.p99 <= whole.max == np.abs(a - b).max()
    a[7] = np.nan
    assert not Differences.of([a], [a]).within(BOUNDS["bfloat16"])


@pytest.mark.parametrize(
    ("engines", "message"),
    [(["jax"], "at least two"), (["jax", "jax"], "each once"), (["jax", "transformer"], "did you mean transformers")],
)
def test_engines_that_cannot_be_compared_are_refused(engines, message):
    with pytest.raises(UserError, match=message):
        subjects.check(engines)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sglang_and_transformers_agree(tmp_path):
    """A real server on the CPU; its layers can't be seen."""
    from tests.shared import sglang_python

    model = make_model(tmp_path / "model", architecture="llama", num_layers=3, initializer_range=0.3)
    settings = {
        "sglang.python": sglang_python(),
        "sglang.device": "cpu",
        "sglang.attention_backend": "torch_native",
        "sglang.context_length": 256,
        "sglang.disable_overlap_schedule": True,
        "sglang.extra_args": ("--max-total-tokens", "4096"),
    }
    case = case_of(model, tmp_path, **settings)
    (pair,) = subjects.compare(case, ["transformers", "sglang"], model, with_layers=True)
    assert pair.agrees and pair.layers is None, pair.lines()
    wrong = make_model(tmp_path / "wrong", architecture="llama", num_layers=3, initializer_range=0.3, seed=1)
    (pair,) = subjects.compare(case, ["transformers", "sglang"], wrong, with_layers=False)
    assert not pair.agrees


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_ends_with_status_2_where_engines_disagree(model, tmp_path):
    import subprocess
    import sys

    (tmp_path / "train.jsonl").write_text('{"prompt": "12+34=", "answer": "46"}\n')
    command = [sys.executable, "-m", "rljax.experiments.compare", "--config=quickstart", "--prompts=1", "--tokens=4"]
    command += ["--config.actor.init_from_scratch=false", f"--config.actor.path={model}", "--layers"]
    command += [f"--config.{name}_dataset.path={tmp_path}" for name in ("train", "valid")]
    command += [
        "--config.train_dataset.type=prompt_answer",
        "--config.valid_dataset.path=",
        f"--json={tmp_path / 'report.json'}",
    ]
    wrong = f"--other={wrong_rope(model, tmp_path / 'wrong')}"
    right, bad = (subprocess.run([*command, *more], capture_output=True, text=True) for more in ([], [wrong]))
    assert (right.returncode, bad.returncode) == (0, 2), (right.stderr, bad.stderr)
    assert bad.stdout.rstrip().endswith(f"verdict: INCONSISTENT; layer {GLOBAL} differs first")
    assert json.loads((tmp_path / "report.json").read_text())["pairs"][0]["layers"]["first"] == f"layer {GLOBAL}"


# Image-text models


def pictures_case(directory, **settings):
    from tests.image_text import make_image_text_model

    data = {"train_dataset.path": "task:count_objects", "train_dataset.task": {"n": 3, "pixels": 64}}
    model = make_image_text_model(directory / "model")
    config = config_of(**{"actor.path": str(model), "train_dataset.type": "task", "valid_dataset.path": "", **data, **settings})
    return make_case(config, model, prompts=3, tokens=5, dtype="float32")


@pytest.mark.parametrize(("marks", "left"), [((), 4), ((9,), 4), ((7,), 1), ((5,), 0), ((8, 6), 2)])
def test_a_completion_counts_up_to_a_picture_that_is_not_there(marks, left):
    done = Greedy(np.array([5, 7, 6, 8], np.int32), -np.arange(4.0))
    before = done.before(marks)
    assert before.token_ids.tolist() == [5, 7, 6, 8][:left] and len(before.logp) == left


@pytest.mark.parametrize("cut", ["first", "other"])
def test_a_picture_that_is_not_there_is_a_token_that_may_be_a_near_tie(case, cut):
    """Completions part where one has the token that stands for a picture, and is cut before it."""
    case = dataclasses.replace(case, uids=("0/0",), prompts=(np.array([1, 2]),))
    whole = results(0.015)
    (first,), (other,) = whole.completions, whole.others
    first, other = (first.before((8,)), other) if cut == "first" else (first, other.before((5,)))
    scores, checks = whole.scores[0][: 2 + len(first.token_ids)], whole.checks[0][: 2 + len(other.token_ids)]
    pair = Results([first], [scores], [other], [scores], [checks]).pair("a", "b", case, None)
    (divergence,) = pair.divergences
    assert (divergence.token, divergence.other) == (8, 5) and divergence.lead == pytest.approx(0.015)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pictures_reach_transformers_and_jax_refuses_them(tmp_path):
    case = pictures_case(tmp_path)
    assert all(len(p.token_ids) == len(p.text_ids) + 15 for p in case.pictures), "16 tokens in the place of one"
    assert all((prompt == case.mark_ids[0]).sum() == 16 for prompt in case.prompts) and len(case.mark_ids) == 1
    with pytest.raises(UserError, match="reads no pictures"):
        JaxSubject(case)
    subject = TransformersSubject(case)
    done = subject.generate(case.prompts)
    sequences = [np.concatenate([p, d.token_ids]) for p, d in zip(case.prompts, done, strict=True)]
    scores = subject.score(sequences)
    for greedy, score, prompt in zip(done, scores, case.prompts, strict=True):
        np.testing.assert_allclose(greedy.logp, score[len(prompt) :], atol=1e-4)
    others = TransformersSubject(dataclasses.replace(case, pictures=case.pictures[1:] + case.pictures[:1]))
    assert not np.allclose(others.score(sequences)[0], scores[0], atol=1e-3), "another picture, other log-probs"
    assert len(subject.hidden_states(case.prompts[0])) == 3 + 2
