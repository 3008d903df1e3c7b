"""A GGUF file becomes a HF directory that means the same."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rljax.backends.jax import hf
from rljax.backends.jax.cached import CachedTransformer, empty_cache, in_order, unstack
from rljax.backends.jax.decode_attention import Places
from rljax.errors import UserError
from rljax.hf import ModelSpec, WeightReader
from rljax.hf.gguf import convert, find_gguf
from tests.shared import convert_smollm2

gguf = pytest.importorskip("gguf")

ROOT = Path(__file__).resolve().parents[3]
EMBEDDING, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 8
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def interleaved(matrix, heads):
    """Rows as GGUF has them: the two halves of a head's rotary dimensions side by side, first of each pair, second of it."""
    half = matrix.shape[0] // heads // 2
    rows = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in (0, 1)]
    return matrix[rows]


@pytest.fixture
def source(tmp_path):
    """A one-layer model, written with gguf's own writer; feed-forward quantized to Q8_0."""
    generator = np.random.default_rng(0)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(c) for c in range(33, 127)), "Ġ", "12", "in"]
    shapes = {
        "token_embd.weight": (len(tokens), EMBEDDING),
        "output_norm.weight": (EMBEDDING,),
        "blk.0.attn_norm.weight": (EMBEDDING,),
        "blk.0.ffn_norm.weight": (EMBEDDING,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, EMBEDDING),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, EMBEDDING),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, EMBEDDING),
        "blk.0.attn_output.weight": (EMBEDDING, HEADS * HEAD_DIM),
        "blk.0.ffn_gate.weight": (64, EMBEDDING),
        "blk.0.ffn_up.weight": (64, EMBEDDING),
        "blk.0.ffn_down.weight": (EMBEDDING, 64),
    }
    arrays = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(EMBEDDING)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["1 2", "i n"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, array in arrays.items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        stored = array if heads is None else interleaved(array, heads)
        if "ffn" in name and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, arrays


def test_weights_come_back_in_hf_layout(source, tmp_path):
    """Plain ones bitwise, query and key rows in place; quantized ones within half a step of a block."""
    path, arrays = source
    spec = convert(path, tmp_path / "out")
    assert spec == ModelSpec.from_directory(tmp_path / "out")
    assert (spec.num_heads, spec.num_kv_heads, spec.rms_norm_eps, spec.tie_word_embeddings) == (4, 2, 1e-5, True)
    reader = WeightReader(tmp_path / "out")
    reader.check(spec)
    for theirs, ours in (
        ("token_embd", "model.embed_tokens"),
        ("blk.0.attn_q", "model.layers.0.self_attn.q_proj"),
        ("blk.0.attn_k", "model.layers.0.self_attn.k_proj"),
        ("blk.0.attn_v", "model.layers.0.self_attn.v_proj"),
        ("blk.0.attn_output", "model.layers.0.self_attn.o_proj"),
        ("blk.0.ffn_norm", "model.layers.0.post_attention_layernorm"),
    ):
        np.testing.assert_array_equal(reader.read(f"{ours}.weight"), arrays[f"{theirs}.weight"])
    for name in ("gate", "up", "down"):
        array, read = arrays[f"blk.0.ffn_{name}.weight"], reader.read(f"model.layers.0.mlp.{name}_proj.weight")
        blocks = np.abs(array).reshape(-1, 32).max(axis=1, keepdims=True)
        assert (np.abs(read - array).reshape(-1, 32) <= blocks * (0.5 / 127 + 2**-11)).all()  # scales are float16
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config
    assert config["eos_token_id"] == json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == 2


def test_tokenizer_splits_digits_and_keeps_the_template(source, tmp_path):
    """The merge of 1 and 2 stands in the file, and yet every digit is a token."""
    from transformers import AutoTokenizer

    convert(source[0], tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("in12") == ["in", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("12 + x<|im_end|>")) == "12 + x<|im_end|>"
    assert tokenizer.encode("<|im_end|>") == [2] == [tokenizer.eos_token_id]
    messages = [{"role": "user", "content": "1"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>1<|im_end|>"


def test_damaged_files_are_refused(source, tmp_path):
    path, _ = source
    for content in (b"", b"GGUF", path.read_bytes()[:400], path.read_bytes()[:-4000]):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(UserError, match=r"bad\.gguf: truncated or corrupt"):
            convert(tmp_path / "bad.gguf", tmp_path / "out")


def test_sources(source, tmp_path):
    """A file, a wheel that holds one, and what holds none."""
    path, _ = source
    with find_gguf(str(path)) as found:
        assert found == path
    wheel = tmp_path / "p-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, "p/m.gguf")
    with find_gguf(str(wheel)) as found:
        assert found.read_bytes() == path.read_bytes()
    for name, message in (("no-such-package-here", "neither a file nor an installed package"), ("numpy", r"0 \.gguf files")):
        with pytest.raises(UserError, match=message), find_gguf(name):
            pass
    wheel.write_bytes(wheel.read_bytes()[:100])
    with pytest.raises(UserError, match="truncated or corrupt wheel"), find_gguf(str(wheel)):
        pass


def test_command_ends_with_one_line_and_status_1(tmp_path):
    command = [sys.executable, "-m", "experiments.convert", "--gguf=nothing.gguf", f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "nothing.gguf" in done.stderr


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    return convert_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.mark.slow
def test_smollm2_answers_as_known(smollm2):
    """Greedily, through the chat template, in transformers and here: '12 + 30 = 32.' and the id that ends the turn."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": "What is 12+30?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    reference = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    theirs = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=30)[0, len(prompt) :].tolist()
    ours = greedy(smollm2, prompt, stop=2, limit=30)
    assert tokenizer.decode(theirs) == tokenizer.decode(ours) == "12 + 30 = 32.<|im_end|>"


@pytest.mark.slow
def test_smollm2_logits_agree_with_transformers(smollm2):
    """Float32 within 1e-4; and no further from float64 than transformers' float32 is, by more than its own error again."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    token_ids = np.asarray([tokenizer.encode("What is 12+30?")], np.int32)
    reference = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.no_grad():
        theirs = reference(torch.tensor(token_ids)).logits.numpy()
        exact = reference.double()(torch.tensor(token_ids)).logits.numpy()
    graphdef, params = hf.load(smollm2)
    model = nnx.merge(graphdef, params)
    ours = np.asarray(model.logits(model(token_ids, np.arange(token_ids.shape[1])[None])))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    rms = [np.sqrt(np.mean((logits - exact) ** 2)) for logits in (ours, theirs)]
    assert rms[0] < 2 * rms[1]


def greedy(directory, prompt, stop, limit):
    """Prefill, then one token at a time through the cache."""
    graphdef, params = hf.load(directory)
    spec = ModelSpec.from_directory(directory)

    @jax.jit
    def step(params, token_ids, positions, cache):
        model = CachedTransformer(graphdef, unstack(params))
        hidden, cache = model.extend(token_ids, Places(positions, in_order(1, 1)), cache)
        return model.logits(hidden[:, -1:])[0, 0].argmax(), cache

    cache = empty_cache(spec, 1, len(prompt) + limit, jnp.float32)
    token, cache = step(params, jnp.asarray([prompt]), jnp.arange(len(prompt))[None], cache)
    out = [int(token)]
    while out[-1] != stop and len(out) < limit:
        token, cache = step(params, jnp.asarray([out[-1:]]), jnp.asarray([[len(prompt) + len(out) - 1]]), cache)
        out.append(int(token))
    return out
