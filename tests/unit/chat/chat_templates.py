"""Small chat templates, each with a quirk of a model family, and tokenizers for them."""

import json

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Shows tools, calls and reasoning of every turn; what it has once more of a turn is the same when others follow
TOOLS = """\
{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}\
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Keeps the reasoning of the last turn alone, which is empty if there is none; enable_thinking=False opens with an empty one
THINKS = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' and loop.last %}
{{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
OPENS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")  # a thought that no finished turn has
MARKED = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>\n' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Llama 2's way: no token opens a turn, and a space stands before the one that ends it
INSTRUCT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% else %} {{ message['content'] | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
# DeepSeek's way: arguments are text; image-text models' way: content is parts
TEXT_ARGUMENTS = TOOLS.replace("({'name': call.function.name, 'arguments': call.function.arguments} | tojson)", "call.function.name + call.function.arguments")  # fmt: skip  # noqa: E501
PARTS = CHATML.replace("{{ message['content'] }}", "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}")

JOINED = "{% for message in messages %}{{ message['content'] | trim }}{% endfor %}"  # puts nothing between texts
TWICE = "{% if not loop.first and message['role'] == loop.previtem['role'] %}{{ raise_exception('twice') }}{% endif %}"
ALTERNATES = CHATML.replace("<|im_start|>{{", TWICE + "<|im_start|>{{", 1)
NEEDS_CALL = TOOLS.replace(
    "{%- if message.role == 'tool' %}",
    "{%- if message.role == 'tool' %}"
    "{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}",
)

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<h1>")


def build_byte_level(directory, template, **config):
    """Writes a byte-level BPE tokenizer, as of Llama 3, Qwen and SmolLM."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["what is the answer to the question", "the user and the assistant 12 30 42"], trainer)
    return _write(tokenizer, directory, template, config)


def build_pieces(directory, template, **config):
    """Writes a BPE tokenizer of pieces with bytes for the rest, as of Gemma and Llama 2.

    A space goes before a text, and control tokens are in its vocabulary as words are.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    words = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=words, show_progress=False)
    tokenizer.train_from_iterator(["what is the answer to the question", "the user and the assistant 12 30 42"], trainer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    return _write(Tokenizer.from_str(json.dumps(state)), directory, template, {"unk_token": "<unk>", **config})


def _write(tokenizer, directory, template, config):
    from tokenizers import AddedToken

    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(template)
    return tokenizer
