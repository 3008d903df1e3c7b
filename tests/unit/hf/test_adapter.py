"""A run goes on from an adapter that peft wrote: both learners give the logits of peft, and what does not fit is one line."""

import json
import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rljax.config import checks
from rljax.config import io as config_io
from rljax.configs import quickstart
from rljax.errors import UserError
from rljax.hf.adapter import SETTINGS, WEIGHTS, read_adapter
from rljax.hf.spec import ModelSpec
from rljax.testing.models import config_of, make_model

LORA = {"actor.lora.rank": 3, "actor.lora.alpha": 6.0, "actor.lora.target_modules": ("q_proj", "down_proj")}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A model, an adapter that peft wrote for it, and peft's logits of some ids."""
    torch = pytest.importorskip("torch", reason="peft needs the extra [torch]")
    import peft
    import transformers

    root = tmp_path_factory.mktemp("adapter")
    model_dir = make_model(root / "model")
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, settings)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.1
    model.save_pretrained(root / "adapter")
    ids = np.arange(1, 9)[None]
    with torch.no_grad():
        return model_dir, root / "adapter", ids, model(torch.from_numpy(ids)).logits.numpy()


def config_with(adapter, **changes):
    return config_of(**LORA | {"total_train_steps": 4, "actor.lora.path": str(adapter), **changes})


def test_the_learner_begins_with_it(written):
    from rljax.config.allocation import Pool
    from rljax.engines.jax.learning.learner import JaxLearner

    model_dir, adapter, ids, expected = written
    learner = JaxLearner(config_with(adapter), Pool("jax"), model_dir)
    policy = learner._policy
    rows = jnp.asarray(ids, jnp.int32)
    model = policy.model(policy.trained, policy.frozen)
    logits = model.logits(model.hidden_states(rows, jnp.arange(rows.shape[1])[None])[-1])
    np.testing.assert_allclose(np.asarray(logits), expected, atol=2e-5)


def learner_of(engine, config, model_dir):
    from rljax.config.allocation import Pool

    if engine == "fsdp":
        from rljax.engines.cuda.learning.learner import TorchLearner

        return TorchLearner(config, Pool("fsdp"), model_dir)
    from rljax.engines.jax.learning.learner import JaxLearner

    return JaxLearner(config, Pool("jax"), model_dir)


def saved_by(engine, config, model_dir, directory):
    learner = learner_of(engine, config, model_dir)
    learner.save(directory / "learner")
    learner.close()
    return directory


def logits_of(model, ids):
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.float().numpy()


def hashes(directory, prefix=""):
    files = (path for path in directory.rglob("*") if path.is_file())
    return {prefix + str(path.relative_to(directory)): zlib.crc32(path.read_bytes()) for path in files}


ENGINES = pytest.mark.parametrize("engine", ["jax", "fsdp"])


@ENGINES
def test_an_export_of_it_is_loaded_by_peft_with_the_same_logits(written, tmp_path, engine):
    """Adapter in, adapter out, and the merged model by transformers, from either engine's checkpoint."""
    import peft
    import torch
    import transformers

    from rljax.checkpoints import export

    model_dir, adapter, ids, expected = written
    config = config_with(adapter)
    checkpoint = saved_by(engine, config, model_dir, tmp_path / "4")
    export.export_adapter(checkpoint, config, model_dir, tmp_path / "again")
    export.export_model(checkpoint, config, model_dir, tmp_path / "whole", dtype="float32")
    export.export_both(checkpoint, config, model_dir, tmp_path / "both", dtype="float32")
    assert hashes(tmp_path / "both") == hashes(tmp_path / "whole") | hashes(tmp_path / "again", "adapter/")
    ours, theirs = (load_file(directory / WEIGHTS) for directory in (tmp_path / "again", adapter))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    load = transformers.AutoModelForCausalLM.from_pretrained
    base = load(model_dir, dtype=torch.float32)
    for model in (peft.PeftModel.from_pretrained(base, tmp_path / "again"), load(tmp_path / "whole", dtype=torch.float32)):
        np.testing.assert_allclose(logits_of(model, ids), expected, atol=2e-5)


@ENGINES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_all_weights_of_a_checkpoint_are_loaded_by_transformers_rounded_once(written, tmp_path, engine, dtype):
    """The run began with another model, of which the export has the config and the tokenizer alone."""
    import torch
    import transformers

    from rljax.checkpoints import export

    begun_with, _, ids, _ = written
    trained = make_model(tmp_path / "trained", seed=7)
    config = config_of(total_train_steps=4)
    checkpoint = saved_by(engine, config, trained, tmp_path / "4")
    export.export_model(checkpoint, config, begun_with, tmp_path / "whole", dtype=dtype)
    load, stored = transformers.AutoModelForCausalLM.from_pretrained, getattr(torch, dtype)
    model = load(tmp_path / "whole", dtype="auto")
    assert model.dtype == stored
    rounded = load(trained, dtype=stored)
    np.testing.assert_array_equal(logits_of(model, ids), logits_of(rounded, ids))


def test_the_torch_learner_begins_with_it(written, tmp_path):
    import torch
    import transformers

    from rljax.config.allocation import Pool
    from rljax.engine import ExportToDirectory
    from rljax.engines.cuda.learning.learner import TorchLearner

    model_dir, adapter, ids, expected = written
    learner = TorchLearner(config_with(adapter), Pool("fsdp"), model_dir)
    learner.export(ExportToDirectory(tmp_path / "whole"))
    learner.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    with torch.no_grad():
        np.testing.assert_allclose(model(torch.from_numpy(ids)).logits.numpy(), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("settings", "config", "message"),
    [
        ({}, {"actor.lora.rank": 4}, r"actor.lora.rank: 4, and the adapter of .* has 3 \(r\)"),
        ({}, {"actor.lora.alpha": 3.0}, r"actor.lora.alpha: 3, and the adapter of .* has 6"),
        ({}, {"actor.lora.target_modules": ("q_proj",)}, r"has 'model.layers.0.mlp.down_proj.lora_A.weight', which"),
        ({}, {"actor.lora.target_modules": ("q_proj", "down_proj", "v_proj")}, r"v_proj.lora_A.weight' is missing"),
        ({"use_dora": True}, {}, "use_dora=true: only alpha / rank B A is implemented"),
        ({"peft_type": "IA3"}, {}, "no LoRA adapter"),
    ],
)
def test_an_adapter_that_does_not_fit_is_one_line(written, tmp_path, settings, config, message):
    model_dir, adapter, *_ = written
    changed = json.loads((adapter / SETTINGS).read_text()) | settings
    (tmp_path / SETTINGS).write_text(json.dumps(changed))
    save_file(load_file(adapter / WEIGHTS), tmp_path / WEIGHTS)
    with pytest.raises(UserError, match=message):
        read_adapter(tmp_path, ModelSpec.from_directory(model_dir), config_with(tmp_path, **config).actor.lora)


def test_an_adapter_with_a_number_that_is_not_finite_is_one_line(written, tmp_path):
    model_dir, adapter, *_ = written
    arrays = load_file(adapter / WEIGHTS)
    name = max(arrays)
    arrays[name][0, 0] = np.inf
    save_file(arrays, tmp_path / WEIGHTS)
    (tmp_path / SETTINGS).write_text((adapter / SETTINGS).read_text())
    with pytest.raises(UserError, match=rf"^actor\.lora\.path: .*{WEIGHTS}: tensor '{name}' has NaN or infinity"):
        read_adapter(tmp_path, ModelSpec.from_directory(model_dir), config_with(tmp_path).actor.lora)


def test_a_directory_without_an_adapter_is_one_line(written, tmp_path):
    with pytest.raises(UserError, match=r"actor.lora.path: cannot read .*adapter_config.json"):
        read_adapter(tmp_path, ModelSpec.from_directory(written[0]), config_with(tmp_path).actor.lora)


@pytest.mark.parametrize(
    ("changes", "key"), [({"actor.lora.rank": 0}, "actor.lora.rank"), ({"actor.kl_ctl": 0.1}, "actor.kl_ctl")]
)
def test_what_an_adapter_contradicts_is_refused(changes, key):
    config = quickstart.get_config()
    settings = {"actor.lora.rank": 3, "actor.lora.path": "somewhere"} | changes
    with pytest.raises(UserError, match=key):
        checks.check(config_io.changed(config_io.from_dict(config), [(name, str(value)) for name, value in settings.items()]))
