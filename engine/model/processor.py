"""Makes pictures as a model takes them, with Transformers' own image processor of the model's directory."""

from __future__ import annotations

import functools
import importlib.util
import io
import shutil
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from transformers import AutoConfig, PreTrainedTokenizerBase

from ..data.media import Picture
from ..errors import UserError
from .pictures import FAMILIES

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a model's directory that say how its pictures are processed."""


class PictureProcessor:
    """The image processor of a model's directory.

    Args:
        path: the directory, or a hub name.

    Raises:
        UserError: Pillow is missing, the model takes no pictures or not in a way that is supported, or the directory
            has no image processor.
    """

    def __init__(self, path: str) -> None:
        if importlib.util.find_spec("PIL") is None:
            raise UserError("Pictures are read by Pillow, which is not installed; install rolltree[pictures].")
        try:
            config = AutoConfig.from_pretrained(path)
        except Exception as error:  # a damaged directory can make transformers raise anything
            raise UserError(f"The config of '{path}' cannot be read: {' '.join(str(error).split())[:200]}") from error
        family = FAMILIES.get(config.model_type)
        if family is None:
            raise UserError(
                f"Problems with pictures need a model of the types {', '.join(FAMILIES)}, and '{path}' is of the type "
                f"{config.model_type}; take another model."
            )
        from transformers import AutoImageProcessor  # here, as only pictures need Pillow

        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(path)
        except Exception as error:
            raise UserError(
                f"'{path}' has no image processor that can be loaded ({' '.join(str(error).split())[:200]}); save the "
                "model's own there."
            ) from error
        self.placeholder = int(config.image_token_id)
        """The token id that stands for a picture in a prompt."""
        self._family, self._config = family, config
        for option in ("do_pan_and_scan", "do_image_splitting"):
            if getattr(self._processor, option, False):
                raise UserError(
                    f"The image processor of '{path}' cuts pictures into parts ({option}), which is not supported; set "
                    f"{option} to false in its preprocessor_config.json."
                )
        self._in_use: WeakValueDictionary[str, Picture] = (
            WeakValueDictionary()
        )  # those in use, by the digest of content

    def picture(self, content: bytes) -> Picture:
        """Return the picture of an encoded file; the same object as long as one with its content is in use.

        Raises:
            ValueError: the file holds no picture that Pillow can read.
        """
        from PIL import Image, UnidentifiedImageError

        try:
            image = Image.open(io.BytesIO(content)).convert("RGB")
        except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(f"Pillow cannot read a picture ({' '.join(str(error).split())[:100]})") from error
        processed = self._processor(images=[image], return_tensors="pt")
        names = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_position_ids")
        inputs = {name: np.asarray(processed[name]) for name in names if name in processed}
        if self._family.grid:
            merged = int(self._config.vision_config.spatial_merge_size)
            frames, high, wide = (int(n) for n in inputs["image_grid_thw"][0])
            grid = frames, high // merged, wide // merged
            picture = Picture.of(inputs, grid[0] * grid[1] * grid[2], grid)
        elif self._family.tiles:
            inputs = {name: values[0] for name, values in inputs.items()}  # the tiles of the only sample
            side = int(self._config.vision_config.patch_size) * int(self._config.scale_factor)
            high, wide = inputs["pixel_values"].shape[-2:]
            picture = Picture.of(inputs, len(inputs["pixel_values"]) * (high // side) * (wide // side))
        elif "num_soft_tokens_per_image" in processed:
            picture = Picture.of(inputs, int(processed["num_soft_tokens_per_image"][0]))
        else:
            picture = Picture.of(inputs, int(self._config.mm_tokens_per_image))
        return self._in_use.setdefault(picture.digest, picture)

    def framed(self, text: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the text of a prompt with one placeholder a picture, and the tokens around it that the model expects.

        The chat template of such a model writes one token a picture, which Transformers' processor replaces by these.
        """
        if self._family.framed is None:
            return text
        ids = {name: getattr(self._config, f"{name}_token_id", None) for name in ("boi", "image", "eoi")}
        begin, picture, end = (None if id_ is None else tokenizer.convert_ids_to_tokens(id_) for id_ in ids.values())
        tokens = {"begin": begin, "picture": picture, "end": end}
        return text.replace(self._family.mark.format(**tokens), self._family.framed.format(**tokens))


@functools.lru_cache(maxsize=4)
def _load(path: str) -> PictureProcessor:
    return PictureProcessor(path)


def processor_beside(tokenizer: PreTrainedTokenizerBase) -> PictureProcessor:
    """Return the image processor of the directory that ``tokenizer`` was loaded from.

    Raises:
        UserError: as `PictureProcessor`.
    """
    return _load(str(tokenizer.name_or_path))


def copy_processor(source: str | Path, target: Path) -> None:
    """Copy the files of a model's processor, if it has any and is a directory."""
    for name in FILES:
        if (file := Path(source) / name).is_file():
            shutil.copyfile(file, target / name)
