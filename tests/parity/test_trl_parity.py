"""Our losses against TRL's own GRPOTrainer on the same logits: equal wherever the definitions are
(docs/losses.md).

A real trainer is made around a tiny model and its loss function is called with the log-probs it
would have been given.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch backend needs the extra [torch]")
pytest.importorskip("trl", reason="the comparison with TRL needs the extra [trl]")

import datasets  # noqa: E402
import tokenizers  # noqa: E402
import transformers  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from rljax.backends.torch.logprobs import token_logprobs  # noqa: E402
from rljax.backends.torch.objective import policy_objective  # noqa: E402
from rljax.config.schema import NormConfig  # noqa: E402
from rljax.objective.advantages import normalized  # noqa: E402
from rljax.objective.aggregation import loss_weights  # noqa: E402
from rljax.objective.spec import Objective, TokenArrays  # noqa: E402

ROWS, PROMPT, COMPLETION, VOCABULARY = 4, 3, 8, 40


@pytest.fixture(scope="module")
def make_trainer(tmp_path_factory):
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.5,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w2"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w2")

    def make(**settings):
        torch.manual_seed(0)
        arguments = GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            per_device_train_batch_size=ROWS,
            num_generations=ROWS,
            max_completion_length=COMPLETION,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            beta=0.0,
            **settings,
        )
        return GRPOTrainer(
            model=transformers.LlamaForCausalLM(config).eval(),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=datasets.Dataset.from_dict({"prompt": ["w3 w4 w5"] * ROWS}),
            processing_class=tokenizer,
        )

    return make


def case(trainer):
    """Inputs as GRPOTrainer passes them from generation to loss, and the log-probs of the model as
    it is.
    """
    random = np.random.default_rng(0)
    lengths = [8, 5, 1, 7]
    completion_mask = torch.tensor(np.arange(COMPLETION)[None] < np.array(lengths)[:, None]).long()
    inputs = {
        "prompt_ids": torch.tensor(random.integers(3, VOCABULARY, (ROWS, PROMPT))),
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": torch.tensor(random.integers(3, VOCABULARY, (ROWS, COMPLETION))),
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.2, -0.7, 0.4, -0.9]),
        "num_items_in_batch": completion_mask.sum(),
    }
    logp, _ = scores(trainer.model, inputs)

    def moved(logp, std):
        return (logp + torch.tensor(random.normal(0, std, logp.shape))).float()

    inputs["old_per_token_logps"] = moved(logp.detach(), 0.3)
    inputs["ref_per_token_logps"] = moved(logp.detach(), 0.3)
    return inputs, moved(inputs["old_per_token_logps"], 0.6)


def scores(model, inputs):
    """Our op on the model's hidden states."""
    token_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    hidden = model.model(input_ids=token_ids, attention_mask=attention).last_hidden_state[:, PROMPT - 1 : -1]
    logp, entropy = token_logprobs(hidden.flatten(0, 1), model.lm_head.weight, inputs["completion_ids"].flatten(), chunk=7)
    return logp.view(ROWS, COMPLETION), entropy.view(ROWS, COMPLETION)


def ours(trainer, inputs, behavior_logp, objective, aggregation):
    mask = inputs["completion_mask"].bool()
    weights = loss_weights(list(mask.numpy()), aggregation, COMPLETION)
    tokens = TokenArrays(
        loss_weight=torch.tensor(np.stack(weights)),
        mask=mask,
        advantage=inputs["advantages"][:, None].expand(mask.shape),
        behavior_logp=behavior_logp,
        segment_ids=mask.long(),
        proximal_logp=inputs["old_per_token_logps"],
        reference_logp=inputs["ref_per_token_logps"],
    )
    logp, entropy = scores(trainer.model, inputs)
    return gradient_of(trainer, policy_objective(logp, entropy, tokens, objective)[0])


def theirs(trainer, inputs):
    return gradient_of(trainer, trainer._compute_loss(trainer.model, inputs))


def gradient_of(trainer, loss):
    trainer.model.zero_grad()
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def assert_equal(a, b):
    assert a[0] == pytest.approx(b[0], rel=1e-5, abs=1e-7)
    torch.testing.assert_close(a[1], b[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "loss_type, aggregation",
    [("grpo", "seq-mean-token-mean"), ("bnpo", "token-mean"), ("dapo", "token-mean"), ("dr_grpo", "seq-mean-token-sum")],
)
def test_the_clipped_surrogate_and_its_aggregation(make_trainer, loss_type, aggregation):
    trainer = make_trainer(loss_type=loss_type, epsilon=0.2, epsilon_high=0.28)
    inputs, behavior = case(trainer)
    objective = Objective(decoupled=False, clip_low=0.2, clip_high=0.28)
    assert_equal(ours(trainer, inputs, behavior, objective, aggregation), theirs(trainer, inputs))


def test_dual_clip_is_their_delta(make_trainer):
    trainer = make_trainer(loss_type="dapo", epsilon=0.1, delta=1.2)
    inputs, behavior = case(trainer)
    objective = Objective(decoupled=False, clip_low=0.1, clip_high=0.1, dual_clip=1.2)
    assert_equal(ours(trainer, inputs, behavior, objective, "token-mean"), theirs(trainer, inputs))


def test_the_sequence_ratio_is_gspos(make_trainer):
    trainer = make_trainer(loss_type="grpo", importance_sampling_level="sequence", epsilon=0.05, epsilon_high=0.08)
    inputs, behavior = case(trainer)
    objective = Objective(decoupled=False, ratio_level="sequence", clip_low=0.05, clip_high=0.08)
    assert_equal(ours(trainer, inputs, behavior, objective, "seq-mean-token-mean"), theirs(trainer, inputs))


def test_cispo_with_its_lower_bound_off_and_their_upper_bound_counted_from_zero(make_trainer):
    trainer = make_trainer(loss_type="cispo", epsilon_high=1.28)
    inputs, behavior = case(trainer)
    objective = Objective(loss="cispo", decoupled=False, clip_low=1.0, clip_high=0.28)
    assert_equal(ours(trainer, inputs, behavior, objective, "token-mean"), theirs(trainer, inputs))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["clamp", "mask"])
def test_the_decoupled_weight_is_their_correction_for_the_sampler(make_trainer, mode, level):
    """Their ratio is made at generation, by the trainer's own lines for it: exp(old - sampling),
    truncated or masked.
    """
    cap = 1.3
    trainer = make_trainer(loss_type="dapo", epsilon=0.2)
    inputs, behavior = case(trainer)
    difference = (inputs["old_per_token_logps"] - behavior) * inputs["completion_mask"]
    ratio = torch.exp(difference if level == "token" else difference.sum(-1, keepdim=True))
    assert (ratio > cap).any()
    inputs["importance_sampling_ratio"] = ratio.clamp(max=cap) if mode == "clamp" else ratio.masked_fill(ratio > cap, 0.0)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True  # the branch of the loss; nothing is generated
    objective = Objective(weight_cap=cap, cap_mode=mode, cap_level=level)
    assert_equal(ours(trainer, inputs, behavior, objective, "token-mean"), theirs(trainer, inputs))


def test_kl_in_the_loss_is_theirs_with_their_bias_correction(make_trainer):
    """Their correction differentiates r k3, whose slope in logp is r times the log-ratio: what
    ours puts there outright.
    """
    trainer = make_trainer(loss_type="dapo", use_bias_correction_kl=True)
    trainer.beta = 0.5
    inputs, _ = case(trainer)
    objective = Objective(decoupled=False, kl_coef=0.5, kl_estimator="k3")
    assert_equal(ours(trainer, inputs, inputs["old_per_token_logps"], objective, "token-mean"), theirs(trainer, inputs))


def test_kl_in_the_loss_without_it_has_the_value_and_another_gradient(make_trainer):
    """On policy, where r is 1, k3 itself has the same value; its slope in expectation is that of
    forward KL.
    """
    trainer = make_trainer(loss_type="dapo", use_bias_correction_kl=False)
    trainer.beta = 0.5
    inputs, _ = case(trainer)
    inputs["old_per_token_logps"] = scores(trainer.model, inputs)[0].detach()
    objective = Objective(decoupled=False, kl_coef=0.5, kl_estimator="k3")
    mine, other = ours(trainer, inputs, inputs["old_per_token_logps"], objective, "token-mean"), theirs(trainer, inputs)
    assert mine[0] == pytest.approx(other[0], rel=1e-5)
    assert (mine[1] - other[1]).norm() > 0.01 * other[1].norm()


def test_our_group_advantages_are_theirs_but_for_the_std():
    """theirs: sample std (over n - 1) + 1e-4; ours: population std, with a floor."""
    rewards = torch.tensor([[1.0, 0.0, 0.25, 0.0], [0.5, 0.5, 0.5, 1.0]])
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    norm = NormConfig("group", "group", False, False, eps=1e-4, std_floor=1e-3)
    got = normalized(rewards.numpy().astype(np.float64).ravel(), np.repeat([0, 1], 4), norm).reshape(2, 4)
    np.testing.assert_allclose(got * np.sqrt(3 / 4), expected, rtol=1e-3)
