"""Files of a model directory that have to agree, code that is never run, and what an export says of
the ends of turns.
"""

import json
import re

import numpy as np
import pytest

from rljax.errors import UserError
from rljax.hf import agreement
from rljax.hf.companion_files import write_companions
from rljax.hf.spec import ModelSpec, is_image_text, read_vocab_size
from rljax.hf.tensors import tensors
from rljax.hf.tokenizer import build_char_tokenizer, load_tokenizer
from rljax.hf.turn_ends import write_turn_ends
from rljax.hf.weights import WeightReader, write_weights
from tests.unit.chat import chat_templates as templates

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 400,
}


def write_json(path, content):
    path.write_text(json.dumps(content))


def read_json(path):
    return json.loads(path.read_text())


def test_a_model_with_fewer_ids_than_its_tokenizer_is_refused_with_the_first_of_them(tmp_path):
    size = build_char_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for vocab_size in (size, size + 28):  # embeddings padded to a round number
        write_json(tmp_path / "config.json", CONFIG | {"vocab_size": vocab_size})
        agreement.check(tmp_path, tokenizer)
    write_json(tmp_path / "config.json", CONFIG | {"vocab_size": 90})
    first = tokenizer.decode([90])
    with pytest.raises(UserError, match=rf"has {first!r} as id 90, and the model of config.json has ids below 90"):
        agreement.check(tmp_path, tokenizer)


def test_added_tokens_that_no_chat_has_may_lie_behind_the_model_and_others_may_not(tmp_path):
    """Ids behind the embedding are allowed, such as Gemma 3's token for images."""
    inner = templates.build_byte_level(tmp_path, templates.TOOLS)
    last = inner.token_to_id("<h1>")
    for token in ("<tool_call>", "<|im_start|>"):
        size = inner.token_to_id(token)
        write_json(tmp_path / "config.json", CONFIG | {"vocab_size": size})
        with pytest.raises(UserError, match=rf"the tokenizer has {re.escape(repr(token))} as id {size}, "):
            agreement.check(tmp_path, load_tokenizer(tmp_path))
    write_json(tmp_path / "config.json", CONFIG | {"vocab_size": last})
    agreement.check(tmp_path, load_tokenizer(tmp_path))


def test_an_eos_id_that_is_no_token_is_refused_and_a_second_template_is_told(tmp_path, caplog):
    templates.build_byte_level(tmp_path, templates.CHATML, chat_template="other")
    write_json(tmp_path / "config.json", CONFIG)
    agreement.check(tmp_path, load_tokenizer(tmp_path))
    assert "another chat_template than in tokenizer_config.json; this one is used" in caplog.text
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [5, 999]})
    with pytest.raises(UserError, match=r"EOS id 999 of generation_config.json or config.json is no token"):
        agreement.check(tmp_path, load_tokenizer(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_a_tokenizer_that_is_code_is_refused_and_never_run(tmp_path, name):
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    for file in ("tokenizer_config.json", "config.json"):
        content = {"auto_map": {"AutoTokenizer": ["code.Mine", None], "AutoConfig": "code.Mine"}} if file == name else {}
        write_json(tmp_path / file, {"model_type": "own"} | content)
    with pytest.raises(UserError, match=rf"auto_map in {name} names Python code, which is not run") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value) and not (tmp_path / "ran").exists()


def base_model(directory, template=templates.CHATML):
    """A base model: its files end a text with <|endoftext|>, its chat template a turn with <|im_end|>."""
    inner = templates.build_byte_level(directory, template)
    end_of_text, end_of_turn = inner.token_to_id("<|endoftext|>"), inner.token_to_id("<|im_end|>")
    write_json(directory / "config.json", CONFIG | {"eos_token_id": end_of_text})
    write_json(directory / "generation_config.json", {"eos_token_id": end_of_text, "top_p": 0.9})
    return end_of_text, end_of_turn


def test_an_export_names_the_ids_that_ended_turns_in_training(tmp_path):
    from transformers import AutoTokenizer

    source, export = tmp_path / "base", tmp_path / "export"
    end_of_text, end_of_turn = base_model(source)
    write_companions(export, ModelSpec.from_directory(source), "float32", source)
    trained = load_tokenizer(source).eos_token_ids
    generation = read_json(export / "generation_config.json")
    assert set(generation["eos_token_id"]) == set(trained) == {end_of_text, end_of_turn} and generation["top_p"] == 0.9
    assert set(read_json(export / "config.json")["eos_token_id"]) == set(trained)
    assert AutoTokenizer.from_pretrained(export).eos_token_id == end_of_turn
    ours = load_tokenizer(export)
    assert set(ours.eos_token_ids) == set(trained) and ours.pad_token_id == load_tokenizer(source).pad_token_id
    before = {path.name: path.read_bytes() for path in export.iterdir()}
    write_turn_ends(export)
    assert {path.name: path.read_bytes() for path in export.iterdir()} == before
    write_turn_ends(export, [7])  # gconfig.stop_token_ids
    assert set(load_tokenizer(export).eos_token_ids) == {7, *trained}


def test_a_template_that_writes_the_eos_token_itself_keeps_it(tmp_path):
    """An EOS behind the whole conversation, as Phi 3's, ends no turn."""
    template = templates.CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    ids = base_model(tmp_path / "base", template)
    write_companions(tmp_path / "export", ModelSpec.from_directory(tmp_path / "base"), "float32", tmp_path / "base")
    assert read_json(tmp_path / "export" / "tokenizer_config.json")["eos_token"] == "<|endoftext|>"
    assert read_json(tmp_path / "export" / "generation_config.json")["eos_token_id"] == list(ids)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_an_image_text_model_is_a_model(tmp_path, prefix):
    """Reads a directory like gemma-3-4b-it's, whose fields at their defaults are left out."""
    text = {"model_type": "gemma3_text", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 4}
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    write_json(tmp_path / "config.json", whole | {"eos_token_id": [1, 106], "vision_config": {"hidden_size": 8}})
    spec = ModelSpec.from_directory(tmp_path)
    assert (spec.architecture, spec.num_heads, spec.num_kv_heads, spec.head_dim) == ("gemma3", 8, 4, 256)
    assert spec.vocab_size == 262208 and spec.ropes[0].factor == 8.0 and is_image_text(tmp_path)

    write_json(tmp_path / "config.json", whole | {"text_config": text | {"vocab_size": 16, "head_dim": 4}})
    spec = ModelSpec.from_directory(tmp_path)
    values = {name: np.full(shape, i, np.float32) for i, (name, shape) in enumerate(tensors(spec).items())}
    stored = {prefix + name.removeprefix("model."): value for name, value in values.items()}
    stored |= {"vision_tower.x": np.zeros(1), "model.multi_modal_projector.x": np.zeros(1)}
    write_weights(tmp_path, {name: value.shape for name, value in stored.items()}, stored.__getitem__, "float32")
    reader = WeightReader(tmp_path)
    reader.check(spec)
    for name, value in values.items():
        np.testing.assert_array_equal(reader.read(name), value)
    write_companions(tmp_path / "export", spec, "float32", tmp_path)
    assert ModelSpec.from_directory(tmp_path / "export") == spec and not is_image_text(tmp_path / "export")


READ = {"Gemma3Config": "gemma3", "LlavaConfig": "llama"}
REFUSED = (
    *("Qwen2VLConfig", "Qwen2_5_VLConfig", "Qwen3VLConfig", "LlavaNextConfig", "LlavaOnevisionConfig", "Mistral3Config"),
    *("InternVLConfig", "PaliGemmaConfig", "Gemma3nConfig", "MllamaConfig", "Llama4Config", "SmolVLMConfig"),
)


def test_fields_of_a_family_that_is_not_implemented_here_may_be_anything(tmp_path):
    theirs = CONFIG | {"model_type": "own", "intermediate_size": [48, 64], "num_key_value_heads": {"0": 2}}
    write_json(tmp_path / "config.json", theirs)
    with pytest.raises(UserError, match=r"config.json: model_type 'own' is not supported"):
        ModelSpec.from_directory(tmp_path)
    assert read_vocab_size(tmp_path) == theirs["vocab_size"]
    write_json(tmp_path / "config.json", theirs | {"model_type": "llama"})
    with pytest.raises(UserError, match=r"config.json: intermediate_size must be an integer"):
        ModelSpec.from_directory(tmp_path)


@pytest.mark.slow  # for what transformers imports
@pytest.mark.parametrize("name", [*READ, *REFUSED])
def test_a_config_as_transformers_writes_it_is_read_or_refused_by_its_name(tmp_path, name):
    """The text model's fields are under names of its own, beside those of images, sound and their ropes."""
    transformers = pytest.importorskip("transformers")
    made = getattr(transformers, name)()
    made.save_pretrained(tmp_path)
    text = made.get_text_config()
    assert read_vocab_size(tmp_path) == text.vocab_size
    if name in REFUSED:
        with pytest.raises(UserError) as refused:
            ModelSpec.from_directory(tmp_path)
        line = str(refused.value)
        assert line.startswith(f"{tmp_path}/config.json: {made.model_type!r} is an image-text model: ") and "\n" not in line
        return
    spec = ModelSpec.from_directory(tmp_path)
    sizes = (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.intermediate_size)
    assert spec.architecture == READ[name] and sizes == (
        *(text.hidden_size, text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads),
        text.intermediate_size,
    )
