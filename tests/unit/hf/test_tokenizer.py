"""Tokenizers of HF directories: what transformers says is what we say; turns are joined id by id."""

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from rljax.errors import UserError
from rljax.hf.tokenizer import CHAR_ALPHABET, CHAR_SPECIAL, build_char_tokenizer, load_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (  # refuses a system message, as Gemma 2's template does, and trims what it shows
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IGNORES_SYSTEM = CHATML.replace("{% for message in messages %}", "{% for message in messages if message['role'] != 'system' %}")
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12+30? "}


def build_bpe(directory, template=CHATML, **config):
    """A byte-level BPE tokenizer with merges, ChatML specials, and padding that is an end of text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(
        ["what is the answer to the question", "the user and the assistant", "12 30 42 12 30"], trainer
    )
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return tokenizer


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bpe")
    build_bpe(directory)
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def char(tmp_path_factory):
    directory = tmp_path_factory.mktemp("char")
    assert build_char_tokenizer(directory) == 100
    return load_tokenizer(directory)


def peer(tokenizer):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(tokenizer.directory))


@hypothesis.given(st.text(alphabet=CHAR_ALPHABET, max_size=40))
@hypothesis.settings(deadline=None)
def test_characters_are_tokens_and_come_back(char, text):
    ids = char.encode(text)
    if not any(token in text for token in CHAR_SPECIAL):
        assert ids == [4 + CHAR_ALPHABET.index(c) for c in text]
    assert char.decode(ids, skip_special_tokens=False) == text


def test_a_character_without_a_token_is_found(char, bpe):
    assert char.unknown("12 x 3 =\n") == ""
    assert char.unknown("12 \u00d7 3 \u2248") == "\u00d7"
    assert bpe.unknown("12 \u00d7 3 \u2248") == ""  # it has every byte
    texts = ["12", "\u00d7 \u2248", "", "\u2248"]
    assert char.all_unknown(texts) == [char.unknown(text) for text in texts] == ["", "\u00d7", "", "\u2248"]
    assert bpe.all_unknown(texts) == [""] * 4 and bpe.all_unknown([]) == []


def test_the_character_tokenizer_has_its_special_tokens_and_a_template_that_is_the_content(char):
    assert (char.pad_token_id, char.eos_token_id, char.eos_token_ids, char.vocab_size) == (0, 2, (2,), 100)
    assert char.apply_chat_template([{"role": "user", "content": "12+34="}]) == char.encode("12+34=")
    assert char.encode("é") == [3]
    assert char.decode([*char.encode("46"), 2]) == "46"


@pytest.mark.parametrize("name", ["char", "bpe"])
def test_transformers_gives_the_same_ids_and_text(name, request):
    ours = request.getfixturevalue(name)
    theirs = peer(ours)
    messages = [SYSTEM, USER, {"role": "assistant", "content": "42"}, {"role": "user", "content": "the  answer?\n"}]
    for prompt in (messages[:1], messages[:2], messages[1:2], messages):
        for generation in (True, False):
            expected = theirs.apply_chat_template(prompt, add_generation_prompt=generation, return_dict=False)
            assert ours.apply_chat_template(prompt, add_generation_prompt=generation) == expected
    for text in ("", " what is 12+30 ?", "don 't , n't \n\n the"):  # no space is tidied away
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("name", ["bpe", "char"])
@hypothesis.given(text=st.text(max_size=20), data=st.data())
@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_pieces_are_one_per_token_and_add_up_to_the_text(name, text, data, request):
    """Ids of a text, whose characters may be several tokens, and ids as a policy samples them."""
    tokenizer = request.getfixturevalue(name)
    sampled = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    for ids in (tokenizer.encode(text), sampled):
        pieces = tokenizer.pieces(ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_character_of_several_tokens_is_the_piece_of_the_last_one(bpe):
    ids = bpe.encode("a\N{SNOWMAN}b")
    assert len(ids) > 3 and [piece for piece in bpe.pieces(ids) if piece] == ["a", "\N{SNOWMAN}", "b"]
    assert bpe.pieces(ids)[0] == "a" and bpe.pieces(ids)[-1] == "b"


@pytest.mark.parametrize("template", [NO_SYSTEM, IGNORES_SYSTEM])
def test_a_template_without_a_system_role_gets_the_system_prompt_atop_the_first_user_turn(tmp_path, template):
    build_bpe(tmp_path, template)
    tokenizer = load_tokenizer(tmp_path)
    folded = {"role": "user", "content": "Be brief.\n\nWhat is 12+30? "}
    assert tokenizer.apply_chat_template([SYSTEM, USER]) == tokenizer.apply_chat_template([folded])
    for messages in ([SYSTEM], [SYSTEM, USER, {"role": "assistant", "content": "x"}, USER]):
        assert "Be brief." in tokenizer.decode(tokenizer.apply_chat_template(messages))


def test_eos_ids_are_joined_from_every_file_and_the_template(tmp_path):
    inner = build_bpe(tmp_path)
    end_of_text, start, end = (inner.token_to_id(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == (end_of_text, end)
    assert tokenizer.eos_token_id == end  # what supervised targets end with, though tokenizer_config says otherwise
    assert tokenizer.pad_token_id == end_of_text
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 6, "text_config": {"eos_token_id": start}}))
    assert load_tokenizer(tmp_path).eos_token_ids == (5, 6, start, end_of_text, end)


def test_tokens_in_tokens_out_in_the_next_turn(bpe):
    reply, feedback = {"role": "assistant", "content": "12"}, {"role": "user", "content": "the answer is not right"}
    prompt_ids = bpe.apply_chat_template([USER])
    whole = bpe.apply_chat_template([USER, reply, feedback])
    sampled = [*bpe.encode("12"), bpe.eos_token_id]
    inserted = bpe.next_turn([USER, reply, feedback], sampled[-1])
    assert prompt_ids + sampled + inserted == whole  # an end of turn that was sampled is not put in again
    cut = bpe.encode("12")
    assert prompt_ids + cut + bpe.next_turn([USER, reply, feedback], cut[-1]) == whole  # one that was not is put in
    other = [*cut, bpe.encode("<|endoftext|>")[0]]  # the policy ended its turn in its own way
    inserted = bpe.next_turn([USER, reply, feedback], other[-1])
    assert prompt_ids + cut + inserted == whole
    assert bpe.next_turn([SYSTEM, USER, reply, USER, reply, feedback], sampled[-1]) == whole[len(prompt_ids + sampled) :]


def test_what_is_missing_or_broken_is_one_line(tmp_path):
    cases = {"none": "no such directory", "empty": "has no tokenizer.json", "broken": "cannot load", "no_eos": "no EOS id"}
    (tmp_path / "empty").mkdir()
    build_bpe(tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    build_bpe(tmp_path / "no_eos", template=None, eos_token=None)
    for name, line in cases.items():
        with pytest.raises(UserError, match=line) as caught:
            load_tokenizer(tmp_path / name)
        assert "\n" not in str(caught.value) and name in str(caught.value)
    build_bpe(tmp_path / "plain", template=None)
    with pytest.raises(UserError, match="no chat template"):
        load_tokenizer(tmp_path / "plain").apply_chat_template([USER])
    build_bpe(tmp_path / "strict", template="{{ raise_exception('only ' ~ messages | length) }}")
    with pytest.raises(UserError, match="refuses messages of roles user: only 1"):
        load_tokenizer(tmp_path / "strict").apply_chat_template([USER])
