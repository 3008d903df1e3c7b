"""Models of families that rljax knows nothing of: trained as transformers computes, or refused."""

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from rljax.backends.torch import model
from rljax.backends.torch.export import Gathering, to_numpy
from rljax.backends.torch.forward import target_objective
from rljax.config.allocation import Pool
from rljax.engine import ExportToDirectory, allocate, find_plugin
from rljax.engines.cuda.learning import distributed
from rljax.engines.cuda.learning.learner import TorchLearner
from rljax.engines.cuda.learning.policy import Policy
from rljax.engines.cuda.learning.rows import micro_batches
from rljax.errors import UserError
from rljax.hf import ModelSpec, parameter_count, read_model
from rljax.hf.flops import update_flops
from rljax.hf.other_model import parse
from rljax.hf.spec import read_config
from rljax.hf.weights import WeightReader
from rljax.objective.spec import Objective
from rljax.testing.learner_batches import config_of, episodes, first_fit, pack
from tests.other_families import GATED, SMALL, made

LORA = {"actor.lora.rank": 2, "actor.lora.target_modules": ("o_proj", "down_proj")}
TAKEN = {  # of each: fused projections; norms after the blocks; capped logits and windows; learned positions
    "Phi3": GATED | dict(resid_pdrop=0.3),
    "Olmo2": GATED,
    "Gemma2": GATED | dict(head_dim=8, final_logit_softcapping=2.0, sliding_window=5),
    "OPT": SMALL | dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.3),
}
PER_LAYER = dict(  # Gemma 3n: sizes that differ by layer, and layers with the keys and values of others
    intermediate_size=[48] * 4,
    num_hidden_layers=4,
    layer_types=["sliding_attention", "full_attention"] * 2,
    num_kv_shared_layers=2,
    activation_sparsity_pattern=[0.0] * 4,
    vocab_size_per_layer_input=GATED["vocab_size"],
    hidden_size_per_layer_input=8,
    laurel_rank=4,
    head_dim=8,
)
REFUSED = {
    "Gemma3n": (GATED | PER_LAYER, "transformers fails to fill the buffers of Gemma3nForCausalLM"),
    "Mixtral": (GATED, "'mixtral' is a mixture of experts .num_local_experts."),
    "Cohere": (GATED | dict(logit_scale=0.5), "'cohere' scales its logits .logit_scale=0.5."),
    "Phi": (GATED, "'phi' has a bias at its logits"),
    "Mamba": (SMALL | dict(state_size=4), "MambaForCausalLM has other log-probs in packed rows than in each row alone"),
    "Bloom": (SMALL, "BloomForCausalLM has other log-probs in packed rows"),
    "StableLm": (GATED, "StableLmForCausalLM takes no packed rows"),
    "Falcon": (SMALL, "transformers makes no model of 'falcon' for fsdp"),
    "GPTNeoX": (GATED, "tensor '(lm_head|embed_out).weight' is "),
}


def logprobs(theirs, token_ids, dtype=None):
    """Log-probs of all tokens but the first, as transformers has them for the row alone."""
    tokens = torch.from_numpy(token_ids).long()[None]
    return theirs(tokens).logits[0, :-1].log_softmax(-1, dtype=dtype).gather(1, tokens[0, 1:, None])[:, 0]


@pytest.fixture(scope="module")
def batch():
    items = episodes(6)
    return pack(items, first_fit(items, 64), 64)


def segments_of(batch):
    for row, ids in enumerate(batch.segment_ids):
        for segment in range(1, ids.max() + 1):
            yield row, np.flatnonzero(ids == segment)


@pytest.mark.parametrize("family", TAKEN)
def test_a_packed_step_is_what_transformers_computes_of_each_row_alone(family, batch, tmp_path):
    theirs = made(family, TAKEN[family], tmp_path)
    config = config_of(**{"gconfig.temperature": 1.0, "actor.gradient_checkpointing": "full"})
    learner = TorchLearner(config, Pool("fsdp"), tmp_path)
    got, loss = learner.score(batch), torch.tensor(0.0)
    for row, where in segments_of(batch):
        logp = logprobs(theirs, batch.token_ids[row, where])
        want = np.where(batch.loss_mask[row, where[1:]], logp.detach().numpy(), 0)
        np.testing.assert_allclose(got[row, where[1:]], want, atol=2e-4)
        loss = loss - (torch.from_numpy(batch.loss_weight[row, where[1:]] * batch.loss_mask[row, where[1:]]) * logp).sum()
    loss.backward()
    network, spec = learner._policy.network, read_model(tmp_path)
    (rows,) = micro_batches(batch, batch.loss_mask, distributed.join(Pool("fsdp")), spec, len(batch.token_ids))
    target_objective(network, rows, Objective(loss="sft"), temperature=1.0, chunk=64)[0].backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in model.parameters(network):
        torch.testing.assert_close(parameter.grad.full_tensor().cpu(), gradients[name], atol=1e-5, rtol=2e-3)
    learner.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", TAKEN)
def test_a_packed_row_in_bfloat16_is_as_near_to_float32_as_transformers_is(family, batch, tmp_path):
    exact = made(family, TAKEN[family], tmp_path)
    rounded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    learner = TorchLearner(config_of(**{"gconfig.temperature": 1.0, "actor.dtype": "bfloat16"}), Pool("fsdp"), tmp_path)
    got = learner.score(batch)
    learner.close()
    ours, theirs = [], []
    for row, where in segments_of(batch):
        trained, ids = batch.loss_mask[row, where[1:]], batch.token_ids[row, where]
        want = logprobs(exact, ids).detach().numpy()[trained]
        ours.append(got[row, where[1:]][trained] - want)
        theirs.append(logprobs(rounded, ids, torch.float32).detach().numpy()[trained] - want)
    of_ours, of_theirs = (np.sqrt(np.mean(np.square(np.concatenate(found)))) for found in (ours, theirs))
    assert 0 < of_ours < 1.5 * of_theirs


@pytest.mark.parametrize("family", TAKEN)
def test_what_is_published_and_exported_is_what_transformers_reads_back(family, batch, tmp_path):
    theirs = made(family, TAKEN[family], tmp_path / "model")
    learner = TorchLearner(config_of(), Pool("fsdp"), tmp_path / "model")
    learner.update(batch.replace(proximal_logp=learner.score(batch)))
    sent = {name: to_numpy(tensor) for name, tensor in Gathering(learner._model, learner._whole)}
    learner.export(ExportToDirectory(tmp_path / "export"))
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values()), report
    assert sent.keys() == load_file(tmp_path / "model" / "model.safetensors").keys()
    for name, array in sent.items():
        np.testing.assert_array_equal(again.state_dict()[name].numpy(), array)
    after = learner.score(batch)
    for row, where in segments_of(batch):
        want = logprobs(again.float(), batch.token_ids[row, where]).detach().numpy()
        trained = batch.loss_mask[row, where[1:]]
        np.testing.assert_allclose(after[row, where[1:]][trained], want[trained], atol=2e-4)
    assert parameter_count(read_model(tmp_path / "export")) == sum(p.numel() for p in theirs.parameters())
    learner.close()


def test_a_critic_a_reference_and_a_checkpoint_are_those_of_any_model(batch, tmp_path):
    made("Phi3", TAKEN["Phi3"], tmp_path / "model")
    config = config_of(**{"actor.adv_estimator": "gae", "actor.kl_ctl": 0.1} | LORA)
    one = TorchLearner(config, Pool("fsdp"), tmp_path / "model")

    def step(learner):
        given = batch.replace(reference_logp=learner.score_reference(batch), proximal_logp=learner.score(batch))
        learner.update(given)
        learner.update_critic(batch.replace(values=learner.values(batch)))
        return learner.score(batch)

    step(one)
    one.save(tmp_path / "saved")
    other = TorchLearner(config, Pool("fsdp"), tmp_path / "model")
    other.restore(tmp_path / "saved")
    np.testing.assert_array_equal(step(one), step(other))
    one.close()
    other.close()


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_would_be_trained_wrongly_is_refused_in_one_line(family, tmp_path):
    settings, line = REFUSED[family]
    made(family, settings, tmp_path)
    with pytest.raises(UserError, match=line) as caught:
        Policy(config_of(), distributed.join(Pool("fsdp")), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "allocation", "settings", "line"),
    [
        ("jax", "sglang:d1+jax:d1", {}, r"model_type 'phi3' is not supported .*sglang and fsdp take other causal models too"),
        ("jax", "jax:d1+fsdp:d1", {}, r"model_type 'phi3' is not supported"),
        ("fsdp", "fsdp:t2", {}, "actor.path is of the family 'phi3', which fsdp splits over d and f only, not t"),
        ("fsdp", "fsdp:c2", {}, "'phi3', which fsdp splits over d and f only, not c"),
        ("fsdp", "fsdp:d1", {"actor.lora.rank": 2}, "no projection 'q_proj' .it has down_proj, gate_up"),
    ],
)
def test_what_other_families_are_not_taken_for_is_said_before_anything_is_loaded(engine, allocation, settings, line, tmp_path):
    made("Phi3", TAKEN["Phi3"], tmp_path)
    given = {"allocation_mode": allocation, "actor.path": str(tmp_path), "actor.init_from_scratch": False}
    config = config_of(**given, **settings)
    with pytest.raises(UserError, match=line):
        find_plugin(engine).check(config, allocate(config))


def test_flops_of_a_model_do_not_depend_on_who_reads_it(batch, tmp_path):
    made("Llama", GATED | dict(head_dim=8), tmp_path)
    known = ModelSpec.from_directory(tmp_path)
    other = parse(read_config(tmp_path), WeightReader(tmp_path).shapes, "config.json")
    assert parameter_count(other) == parameter_count(known)
    assert update_flops(other, batch.segment_ids, 7) == update_flops(known, batch.segment_ids, 7)
