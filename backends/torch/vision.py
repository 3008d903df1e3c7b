"""The frozen vision tower of an image-text model: pictures to features for the text model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rljax.chat.pictures import load_processor

KEPT = 32  # pictures whose features are kept; the samples of a prompt have the same ones


class VisionTower:
    """Tower and projector of a model directory, whole on every rank. No gradient reaches them.

    Example: VisionTower(directory, torch.bfloat16, device).features(["data:image/png;base64,..."])
    """

    def __init__(self, directory: Path | str, dtype: torch.dtype, device: torch.device) -> None:
        """Loads the model on the host and keeps what is beside the text model.

        Raises UserError if its processor can't be loaded.
        """
        from transformers import AutoModelForImageTextToText

        self._processor = load_processor(directory)
        whole: Any = AutoModelForImageTextToText.from_pretrained(str(directory), dtype=dtype, local_files_only=True)
        self.token_id = int(whole.config.image_token_id)  # stands where the features go
        self._model: Any = whole.model
        self._model.language_model = None
        self._model.requires_grad_(False).eval().to(device)
        self._dtype, self._device = dtype, device
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    def features(self, urls: Sequence[str]) -> Tensor:
        """Returns the features of pictures one after the other, [n, H], in the compute dtype.

        Raises UserError for a picture that can't be read.
        """
        return torch.cat([self._features(url) for url in urls])

    @torch.no_grad()
    def _features(self, url: str) -> Tensor:
        if url not in self._kept:
            arrays = self._processor.arrays_of(url)
            inputs = {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
            inputs = {name: x.to(self._dtype) if x.is_floating_point() else x for name, x in inputs.items()}
            self._kept[url] = torch.cat(list(self._model.get_image_features(**inputs).pooler_output))
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return self._kept[url]
