"""The pictures of a problem as a data file has them: paths, encoded files, or dicts as in Hugging Face's."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError

Image = bytes | str
"""A picture: the bytes of an encoded file (PNG, JPEG), or the path of one."""

THUMBNAIL = 128
"""Longest side of a thumbnail, in pixels."""


def read_images(value: Any, folder: Path | None, where: str) -> list[Image]:
    """Return the pictures in a column's value: none, one, or a list of them.

    Args:
        value: None, or pictures as :func:`image_of` takes them.
        folder: paths are relative to it.
        where: describes the row and the column for error messages.

    Raises:
        UserError: a value is no picture, or its file does not exist.
    """
    if value is None:
        return []
    return [image_of(one, folder, where) for one in (value if isinstance(value, list | tuple) else [value])]


def image_of(value: Any, folder: Path | None, where: str) -> Image:
    """Return one picture: a path, bytes, a dict with ``bytes`` or ``path``, or an object with ``save`` as PIL's.

    Raises:
        UserError: it is something else, or its file does not exist.
    """
    if isinstance(value, Mapping) and {"bytes", "path"} & value.keys():
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes) and value:
        return value
    if isinstance(value, str) and value:
        path = Path(value) if folder is None else folder / value
        if not path.is_file():
            raise UserError(f"{where} names the picture '{path}', which does not exist; give the path of a file.")
        return str(path)
    if callable(getattr(value, "save", None)):
        file = io.BytesIO()
        value.save(file, format="PNG")
        return file.getvalue()
    raise UserError(
        f"{where} holds a {type(value).__name__} for a picture; give a path, the bytes of an encoded file, or a dict "
        "with 'bytes' or 'path'."
    )


def content_of(image: Image) -> bytes:
    """Return the encoded bytes of a picture."""
    return image if isinstance(image, bytes) else Path(image).read_bytes()


def thumbnail(image: Image) -> bytes:
    """Return a picture as a JPEG file of at most `THUMBNAIL` pixels a side; empty if it cannot be read any more."""
    from PIL import Image as Pillow  # here, as only pictures need Pillow
    from PIL import UnidentifiedImageError

    file = io.BytesIO()
    try:
        with Pillow.open(io.BytesIO(content_of(image))) as opened:
            small = opened.convert("RGB")
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        small.save(file, format="JPEG", quality=90, subsampling=0)
    except (UnidentifiedImageError, OSError, ValueError, Pillow.DecompressionBombError):
        return b""
    return file.getvalue()


def digest_of(images: Sequence[Image]) -> str:
    """Return a hash of the pictures' encoded content; empty for none."""
    if not images:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for image in images:
        digest.update(hashlib.blake2b(content_of(image), digest_size=16).digest())
    return digest.hexdigest()
