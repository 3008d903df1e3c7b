"""Pictures in messages: found, read, and refused where text alone is taken."""

import base64
import dataclasses

import pytest

pytest.importorskip("PIL", reason="needs the extra [vision]")

from PIL import Image

from rljax.chat.pictures import has_pictures, picture_url, picture_urls, read_picture
from rljax.errors import UserError
from rljax.hf.spec import ModelSpec
from rljax.hf.tokenizer import load_tokenizer, prompt_ids_of
from rljax.testing.models import make_model
from rljax.types import Prompt
from tests.image_text import make_image_text_model


def message(*parts):
    return ({"role": "user", "content": list(parts)},)


def test_a_picture_comes_back_bit_for_bit_from_any_form_of_part(tmp_path):
    picture = Image.effect_noise((20, 12), 80).convert("RGB")
    url, path = picture_url(picture), tmp_path / "picture.png"
    picture.save(path)
    forms = [
        {"type": "image", "image": url},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "image", "image": str(path)},
    ]
    urls = picture_urls(message({"type": "text", "text": "?"}, *forms), "here")
    assert len(urls) == 4
    assert all(read_picture(found, "here").tobytes() == picture.tobytes() for found in urls)


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ({"type": "image", "image": "https://example.com/a.png"}, "nothing is fetched"),
        ({"type": "image", "image": "missing.png"}, "no such picture"),
        ({"type": "image"}, "a file or a data URL"),
        ({"type": "image", "image": "data:image/png;base64,!!"}, "not a picture"),
        ({"type": "image", "image": "data:image/png;base64," + base64.b64encode(b"text").decode()}, "not a picture"),
    ],
)
def test_what_is_no_picture_is_refused(part, error):
    with pytest.raises(UserError, match=error):
        for url in picture_urls(message(part), "here"):
            read_picture(url, "here")


def test_a_prompt_with_a_picture_is_refused_where_text_is_taken(tmp_path):
    url = picture_url(Image.new("RGB", (4, 4)))
    with_one = message({"type": "image", "image": url}, {"type": "text", "text": "?"})
    assert has_pictures(with_one) and not has_pictures(({"role": "user", "content": "?"},))
    with pytest.raises(UserError, match="prompt 0/1: has pictures"):
        load_tokenizer(make_model(tmp_path)).encode_prompt(Prompt("0/1", with_one, {}))


def test_a_prompt_with_pictures_has_the_ids_of_the_processor_and_no_mark_of_a_user(tmp_path):
    tokenizer = load_tokenizer(make_image_text_model(tmp_path))
    picture, asked = (
        {"type": "image", "image": picture_url(Image.new("RGB", (32, 32), "red"))},
        {"type": "text", "text": "how many?"},
    )
    prompt = Prompt("0/1", message(picture, asked, picture), {})
    encoded = tokenizer.encode_pictures(prompt)
    mark, text = tokenizer.encode("<image>"), tokenizer.encode("how many?")
    assert encoded.token_ids.tolist() == mark * 16 + text + mark * 16 == prompt_ids_of(tokenizer, prompt).tolist()
    assert encoded.text_ids.tolist() == mark + text + mark and encoded.text == "<image>how many?<image>"
    assert tokenizer.encode_pictures(dataclasses.replace(prompt)) is encoded, "kept for the other samples"
    trouble = {
        "control token '<image>'": Prompt("0/2", message(picture, {"type": "text", "text": "an <image>?"}), {}),
        "tools or a turn to be continued": Prompt("0/3", (*prompt.messages, {"role": "assistant", "content": "I see"}), {}),
    }
    for error, bad in trouble.items():
        with pytest.raises(UserError, match=f"prompt {bad.uid}: .*{error}"):
            tokenizer.encode_pictures(bad)
    with pytest.raises(UserError, match="supervised training takes text"):
        tokenizer.encode_labeled(prompt, [{"role": "assistant", "content": "2"}])


def test_an_image_text_model_is_refused_by_name():
    config = {"model_type": "qwen2_5_vl", "vision_config": {}, "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    with pytest.raises(UserError, match="'qwen2_5_vl' is an image-text model: the JAX path"):
        ModelSpec.from_config(config)
