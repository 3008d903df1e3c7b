"""A tiny LLaVA with random weights: a CLIP tower of two layers, a Llama of three, and their processor."""

from __future__ import annotations

from pathlib import Path

from rljax.hf.tokenizer import build_char_tokenizer

PIXELS, PATCH = 32, 8
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def make_image_text_model(directory: Path, *, seed: int = 0, hidden_size: int = 32) -> Path:
    """Writes the model, in float32, with four heads. A picture becomes (PIXELS / PATCH)^2 tokens."""
    import torch
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    vocabulary = build_char_tokenizer(directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": PIXELS, "width": PIXELS}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(directory)
    layers = {"hidden_size": hidden_size, "intermediate_size": 64, "num_attention_heads": 4, "initializer_range": 0.3}
    vision = CLIPVisionConfig(num_hidden_layers=2, image_size=PIXELS, patch_size=PATCH, projection_dim=hidden_size, **layers)
    text = LlamaConfig(
        num_hidden_layers=3,
        num_key_value_heads=2,
        vocab_size=vocabulary + 1,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
        **layers,
    )
    torch.manual_seed(seed)
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=vocabulary, vision_feature_layer=-1, image_seq_length=16
    )
    config.eos_token_id = 2
    LlavaForConditionalGeneration(config).save_pretrained(directory)
    return directory
