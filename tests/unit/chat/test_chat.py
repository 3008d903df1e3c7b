"""Chat: what a template is given reaches it, control tokens are the template's alone, and what is
learned of a conversation is what would have been sampled.
"""

import dataclasses
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from rljax.chat.messages import parse_messages, parse_tools
from rljax.config.schema import RolloutConfig
from rljax.errors import UserError
from rljax.hf.tokenizer import load_tokenizer
from rljax.types import Prompt
from tests.shared import convert_smollm2
from tests.unit.chat import chat_templates as templates

USER, AGAIN = {"role": "user", "content": "what is the answer"}, {"role": "user", "content": "the question"}
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALLS = parse_messages(
    [
        USER,
        {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": '{"a": 12}'}}]},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "42"},
        {"role": "assistant", "content": "42"},
    ],
    "x",
)
DEFAULTS = RolloutConfig()
BUILDERS = {"bytes": templates.build_byte_level, "pieces": templates.build_pieces}
SPLIT = hypothesis.settings(
    deadline=None, max_examples=30, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
# Words, and what control tokens can be put together from
TEXTS = st.lists(
    st.sampled_from(
        [
            *templates.SPECIALS,
            *templates.ADDED,
            "<",
            "<|",
            "<|im_",
            "im_end",
            "end|>",
            "|>",
            ">",
            "the",
            "12",
            " ",
            "\n",
            "é",
            "☃",
        ]
    ),
    max_size=8,
).map("".join)


def says(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Loads a tokenizer by kind and template, each once."""
    known = {}

    def load(name, kind="bytes", rollout=DEFAULTS):
        key = name, kind, repr(rollout)
        if key not in known:
            directory = tmp_path_factory.mktemp("chat")
            BUILDERS[kind](directory, getattr(templates, name))
            known[key] = load_tokenizer(directory, rollout)
        return known[key]

    return load


def controls(tokenizer, ids):
    """The ids of control tokens among some, and of none of the other added tokens."""
    names = [*templates.SPECIALS, *templates.ADDED[:-1]]
    return [i for i in ids if tokenizer.decode([i], skip_special_tokens=False) in names]


def shown(tokenizer, prompt, *reply, turns="all"):
    """A labeled conversation as text, what is learned in brackets."""
    ids, learned = tokenizer.encode_labeled(prompt, reply, turns=turns)
    text, on = "", False
    for piece, inside in zip(tokenizer.pieces(ids), learned.tolist(), strict=True):
        text += ("[" if inside else "]") * (inside != on) + piece
        on = inside
    return text + "]" * bool(on)


# ------------------------------------------------------------------------------------------------
# Control tokens
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BUILDERS)
@hypothesis.given(text=TEXTS)
@SPLIT
def test_text_is_text_whatever_it_looks_like(loaded, kind, text):
    tokenizer = loaded("TOOLS", kind)
    ids = tokenizer.encode(text, as_text=True)
    assert controls(tokenizer, ids) == []
    lost = kind == "pieces" and text.startswith(" ")  # of two spaces at the beginning, it keeps one
    assert tokenizer.decode(ids, skip_special_tokens=False) == text[lost:]
    if not controls(tokenizer, tokenizer.encode(text)):
        assert ids == tokenizer.encode(text)


@pytest.mark.parametrize("kind", BUILDERS)
@hypothesis.given(texts=st.tuples(TEXTS, TEXTS, TEXTS, TEXTS))
@SPLIT
def test_a_users_text_adds_no_control_token_to_a_chat_and_changes_no_other_token(loaded, kind, texts):
    tokenizer = loaded("TOOLS", kind)
    first, second, described, answer = texts
    tools = parse_tools([TOOL | {"description": described}], "x")
    given = [{"role": "user", "content": first}, *CALLS[1:2], {**CALLS[2], "content": answer}, {**USER, "content": second}]
    calm = [{**message, "content": "" if message["role"] == "assistant" else "the"} for message in given]
    ids = tokenizer.apply_chat_template(given, tools=tools)
    plain = tokenizer.apply_chat_template(calm, tools=parse_tools([TOOL | {"description": "the"}], "x"))
    assert controls(tokenizer, ids) == controls(tokenizer, plain)
    theirs = tokenizer._inner.apply_chat_template(given, tools=list(tools), tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == theirs
    if len(controls(tokenizer, tokenizer.encode(theirs))) == len(controls(tokenizer, plain)):
        assert ids == tokenizer.encode(theirs)  # no such text: the ids of transformers


@pytest.mark.parametrize("kind", BUILDERS)
@hypothesis.given(text=TEXTS)
@SPLIT
def test_a_text_that_has_to_be_disguised_leaves_the_tokens_of_all_others_alone(loaded, kind, text):
    tokenizer = loaded("TOOLS", kind)
    calm = [USER, says("12"), AGAIN, says("30")]
    before = tokenizer.apply_chat_template(calm, add_generation_prompt=False)
    ids = tokenizer.apply_chat_template([*calm, {"role": "user", "content": text + "<|im_end|>"}])
    assert ids[: len(before)] == before
    assert ids[len(before)] == tokenizer.encode("<|im_start|>")[0]


@pytest.mark.slow
def test_smollm2_reads_no_control_token_in_a_users_text_and_learns_a_turn_to_its_end(tmp_path):
    tokenizer = load_tokenizer(convert_smollm2(tmp_path))
    names = [token for token, i in tokenizer.vocabulary().items() if token.startswith("<") and token.endswith(">")]
    control = {tokenizer.encode(name)[0] for name in names if len(tokenizer.encode(name)) == 1}

    @hypothesis.given(
        text=st.lists(st.one_of(st.sampled_from([*names, "<|im_", "end|>", "<"]), st.text(max_size=9))).map("".join),
    )
    @hypothesis.settings(deadline=None, max_examples=200)
    def check(text):
        plain, given = (tokenizer.apply_chat_template([{"role": "user", "content": t}]) for t in ("x", text))
        assert [i for i in given if i in control] == [i for i in plain if i in control]
        if tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text:  # it lacks a few bytes
            expected = tokenizer.decode(plain, skip_special_tokens=False).replace("user\nx<", f"user\n{text}<")
            assert tokenizer.decode(given, skip_special_tokens=False) == expected
        if not any(i in control for i in tokenizer.encode(text)):
            said = [{"role": "user", "content": text}]
            assert given == tokenizer._inner.apply_chat_template(said, add_generation_prompt=True, return_dict=False)

    assert "<|im_end|>" in names
    check()
    text = shown(tokenizer, Prompt("0/0", (USER, says("12"), AGAIN), {}), says("42"))
    assert text.count("[") == 2 and text.endswith("<|im_start|>assistant\n[42<|im_end|>]")


def test_a_control_token_made_of_two_texts_that_a_template_joins_is_none(loaded):
    tokenizer = loaded("JOINED")
    for roles in (("user", "user"), ("user", "assistant"), ("assistant", "user")):
        texts = zip(roles, ("<|im_ ", " end|>"), strict=True)
        ids = tokenizer.apply_chat_template([{"role": role, "content": text} for role, text in texts])
        assert controls(tokenizer, ids) == []
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_end|>"


def test_control_tokens_of_users_are_read_where_the_config_says_so_and_the_assistants_always(loaded):
    inside = [{"role": "user", "content": "<|im_end|>"}]
    strict, free = loaded("TOOLS"), loaded("TOOLS", rollout=RolloutConfig(allow_control_tokens=True))
    assert (
        len(controls(free, free.apply_chat_template(inside))) == len(controls(strict, strict.apply_chat_template(inside))) + 1
    )
    thought = strict.apply_chat_template([USER, says("<think>12</think>")], add_generation_prompt=False)
    assert set(strict.encode("<think></think>")) <= set(thought)
    assert strict.encode("<h1>", as_text=True) == strict.encode("<h1>")  # added, but no control token


def test_the_environments_text_in_the_next_turn_adds_no_control_token(loaded):
    for kind in BUILDERS:
        tokenizer = loaded("TOOLS", kind)
        calm, wild = ([USER, says("12"), {"role": "user", "content": text}] for text in ("x", "<|im_end|><tool_call>"))
        after = [tokenizer.next_turn(messages, tokenizer.eos_token_id) for messages in (calm, wild)]
        assert controls(tokenizer, after[0]) == controls(tokenizer, after[1])
        assert "<|im_end|><tool_call>" in tokenizer.decode(after[1], skip_special_tokens=False)


def test_a_tokenizer_whose_words_are_control_tokens_refuses_them_as_text(tmp_path):
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<end>": 1, "a": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<end>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>", "unk_token": "<unk>"}')
    ours = load_tokenizer(tmp_path)
    assert ours.encode("a b", as_text=True) == [2, 0]
    assert ours.encode("a b <", as_text=True) == [2, 0, 0]  # the token of unknown words is no control token here
    with pytest.raises(UserError, match=r"makes the control token '<end>' of plain text: .*rollout.allow_control_tokens=True"):
        ours.encode("a <end>", as_text=True)


# ------------------------------------------------------------------------------------------------
# What reaches the template
# ------------------------------------------------------------------------------------------------


def test_tools_calls_and_reasoning_are_what_transformers_shows_of_them(loaded):
    tokenizer, tools = loaded("TOOLS"), parse_tools(json.dumps([TOOL]), "x")
    messages = [*CALLS[:3], {**CALLS[3], "reasoning_content": "the user"}, AGAIN]
    theirs = tokenizer._inner.apply_chat_template(messages, tools=list(tools), add_generation_prompt=True, tokenize=False)
    assert tokenizer.apply_chat_template(messages, tools=tools) == tokenizer.encode(theirs)
    for part in ('"name": "add", "arguments": {"a": 12}', "<think>\nthe user\n</think>", '"parameters": {"type": "object"'):
        assert part in theirs


def test_arguments_are_the_configs_and_a_records_own_before_them(loaded):
    config = RolloutConfig(chat_template_kwargs={"enable_thinking": False})
    silent, plain = loaded("THINKS", rollout=config), loaded("THINKS")
    empty = plain.encode("<think>\n\n</think>\n\n")
    opened = plain.apply_chat_template([USER])
    assert silent.apply_chat_template([USER]) == [*opened, *empty]
    assert plain.apply_chat_template([USER], chat_template_kwargs={"enable_thinking": False}) == [*opened, *empty]
    assert silent.apply_chat_template([USER], chat_template_kwargs={"enable_thinking": True}) == opened
    assert silent.next_turn([USER, says("x"), AGAIN], -1)[-len(empty) :] == empty


@pytest.mark.parametrize(
    ("name", "call", "line"),
    [
        ("CHATML", {"tools": parse_tools([TOOL], "x")}, "has no place for tools"),
        ("CHATML", {"messages": CALLS}, "has no place for tool_calls"),
        ("CHATML", {"messages": [USER, says("x") | {"reasoning_content": "y"}]}, "has no place for reasoning_content"),
        ("CHATML", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "has a part that is no text"),
        (
            "THINKS",
            {"chat_template_kwargs": {"enable_thinkng": 1}},
            "enable_thinkng: the chat template of",
        ),
        ("THINKS", {"chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs.tokenize: not for the template"),
    ],
)
def test_what_a_template_has_no_place_for_is_refused(loaded, name, call, line):
    with pytest.raises(UserError, match=line):
        loaded(name).apply_chat_template(**{"messages": [USER], **call})


def test_an_argument_of_the_config_that_no_template_reads_is_refused_when_it_is_loaded(loaded):
    with pytest.raises(UserError, match=r"^rollout.chat_template_kwargs.thinking: the chat template of .* does not read it"):
        loaded("CHATML", rollout=RolloutConfig(chat_template_kwargs={"thinking": True}))


def test_templates_that_take_arguments_as_text_or_content_in_parts_get_them_so(loaded):
    shown = loaded("TEXT_ARGUMENTS").apply_chat_template(CALLS)
    assert 'add{"a": 12}' in loaded("TEXT_ARGUMENTS").decode(shown)
    conversation = [{"role": "system", "content": "the user"}, USER, says("12"), AGAIN]
    assert loaded("PARTS").apply_chat_template(conversation) == loaded("CHATML").apply_chat_template(conversation)


def test_the_samples_of_a_prompt_share_its_ids(loaded):
    tokenizer = loaded("CHATML")
    prompt, held_out = Prompt("0/0", (USER,), {}), Prompt("0/0", (AGAIN,), {})
    ids = tokenizer.encode_prompt(prompt)
    assert tokenizer.encode_prompt(dataclasses.replace(prompt)) is ids and not ids.flags.writeable
    assert tokenizer.encode_prompt(held_out).tolist() == tokenizer.apply_chat_template([AGAIN])
    assert tokenizer.encode_prompt(prompt).tolist() == ids.tolist()


# ------------------------------------------------------------------------------------------------
# Supervised examples
# ------------------------------------------------------------------------------------------------

QUESTION = "<|im_start|>user\nwhat is the answer<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("name", "arguments", "reply", "expected"),
    [
        ("CHATML", {}, says("42"), QUESTION + "[42<|im_end|>]"),
        ("MARKED", {}, says("42"), QUESTION + "[42<|im_end|>]"),
        ("OPENS", {}, says("42"), QUESTION + "[42<|im_end|>]"),
        ("OPENS", {}, says("<tool_call>"), QUESTION + "[<tool_call><|im_end|>]"),  # begins as what is opened does
        ("THINKS", {}, says("42"), QUESTION + "[<think>\n\n</think>\n\n42<|im_end|>]"),
        ("THINKS", {"enable_thinking": False}, says("42"), QUESTION + "<think>\n\n</think>\n\n[42<|im_end|>]"),
        (
            "THINKS",
            {},
            says("42") | {"reasoning_content": "12 30"},
            QUESTION + "[<think>\n12 30\n</think>\n\n42<|im_end|>]",
        ),
        ("INSTRUCT", {}, says("42"), "<|endoftext|>\\[INST] what is the answer \\[/INST\\][ 42 <|endoftext|>]"),
    ],
)
def test_what_is_learned_is_what_the_conversation_has_behind_the_prompt(loaded, name, arguments, reply, expected):
    tokenizer = loaded(name)
    prompt = Prompt("0/0", (USER,), {}, (), arguments)
    assert shown(tokenizer, prompt, reply) == expected.replace("\\", "")
    ids, learned = tokenizer.encode_labeled(prompt, [reply])
    if name != "OPENS":
        assert ids[~learned].tolist() == tokenizer.encode_prompt(prompt).tolist()


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("name", ["CHATML", "MARKED", "TOOLS", "INSTRUCT"])
def test_every_turn_is_learned_up_to_its_end_in_the_ids_of_the_whole_conversation(loaded, name, kind):
    tokenizer = loaded(name, kind)
    prompt, end = (
        Prompt("0/0", (USER, says("12"), AGAIN), {}),
        tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=False),
    )
    ids, learned = tokenizer.encode_labeled(prompt, [says("42")])
    whole = tokenizer.apply_chat_template([*prompt.messages, says("42")], add_generation_prompt=False)
    text = tokenizer.decode(whole, skip_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text[: text.rindex(end) + len(end)]
    if name != "INSTRUCT":  # there, words of prompt and reply stand side by side, and are apart when sampled
        assert ids.tolist() == whole[: len(ids)]
    for turns, replies in (("all", ["12", "42"]), ("reply", ["42"]), ("last", ["42"])):
        ids, learned = tokenizer.encode_labeled(prompt, [says("42")], turns=turns)
        taught = tokenizer.decode(ids[learned], skip_special_tokens=False).split(end)
        assert [text.strip() for text in taught] == [*replies, ""]


def test_calls_are_learned_and_answers_of_tools_are_not(loaded):
    prompt = Prompt("0/0", CALLS[:1], {}, parse_tools([TOOL], "x"))
    text = shown(loaded("TOOLS"), prompt, *CALLS[1:])
    call = '[<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call><|im_end|>]'
    answer = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert text.endswith(QUESTION + call + answer + "[42<|im_end|>]")
    only_last = shown(loaded("TOOLS"), prompt, *CALLS[1:], turns="last")
    assert only_last.count("[") == text.count("[") - 1 and only_last.endswith("[42<|im_end|>]")


def test_a_turn_that_changes_when_others_follow_is_refused_and_the_last_is_learned(loaded):
    tokenizer, prompt = loaded("THINKS"), Prompt("0/0", (USER, says("12"), AGAIN), {})
    with pytest.raises(UserError, match=r"renders turn 2 in another way when turn 3 follows it.*warmup.turns=last"):
        tokenizer.encode_labeled(prompt, [says("42")])
    assert shown(tokenizer, prompt, says("42"), turns="last").endswith("[<think>\n\n</think>\n\n42<|im_end|>]")


def test_a_turn_is_continued_where_it_was_left(loaded):
    for name, before in (("CHATML", ""), ("THINKS", "<think>\n\n</think>\n\n"), ("MARKED", "")):
        tokenizer, prompt = loaded(name), Prompt("0/0", (USER, says("the ")), {})
        assert tokenizer.decode(tokenizer.encode_prompt(prompt), skip_special_tokens=False) == QUESTION + before + "the "
        assert shown(tokenizer, prompt, says("answer")) == QUESTION + before + "the [answer<|im_end|>]"
    tokenizer = loaded("ALTERNATES")
    begun = tokenizer.next_turn([USER, says("the "), says("answer"), AGAIN], tokenizer.eos_token_id)
    assert begun == tokenizer.next_turn([USER, says("the answer"), AGAIN], tokenizer.eos_token_id)
    thought = Prompt("0/0", (USER, {"role": "assistant", "content": "", "reasoning_content": "12"}), {})
    ids = loaded("THINKS").encode_prompt(thought)
    assert loaded("THINKS").decode(ids, skip_special_tokens=False) == QUESTION + "<think>\n12"


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("name", ["TOOLS", "NEEDS_CALL", "INSTRUCT"])
def test_prompt_reply_and_next_turn_are_the_whole_conversation(loaded, name, kind):
    tokenizer = loaded(name, kind)
    messages = [USER, says("12"), AGAIN] if name == "INSTRUCT" else CALLS[:3]
    ids, learned = tokenizer.encode_labeled(Prompt("0/0", messages[:1], {}), messages[1:2])
    end = tokenizer.encode("<|endoftext|>" if name == "INSTRUCT" else "<|im_end|>")[0]
    for sampled in (ids.tolist(), ids[:-1].tolist()):  # the policy ended its turn, or was cut short
        inserted = tokenizer.next_turn(messages, sampled[-1])
        text = tokenizer.decode([*sampled, *inserted], skip_special_tokens=False)
        whole = tokenizer.decode(tokenizer.apply_chat_template(messages), skip_special_tokens=False)
        assert text.replace(" ", "") == whole.replace(" ", "")
        assert [*sampled, *inserted].count(end) == tokenizer.apply_chat_template(messages).count(end)
    assert learned.any()
