"""Task "task:count_objects": how many circles are in a drawn picture?

Needs Pillow (the extra [vision]).
"""

from __future__ import annotations

import random
from typing import Any

from rljax.chat.pictures import picture_url
from rljax.errors import UserError

SHAPES = ("circle", "square", "triangle")
COLORS = ("red", "green", "blue", "black")
MOST_TRIES = 1000  # places that are tried for an object


def count_objects(
    split: str, *, n: int = 1000, seed: int = 0, most: int = 5, others: int = 3, pixels: int = 112
) -> list[dict[str, Any]]:
    """Draws pictures of circles, squares and triangles, and asks for the number of one kind.

    Objects don't overlap. The answer is drawn evenly from 1 to `most`; test and train have
    different pictures.

    Args:
      n: number of pictures.
      seed: seed of what is drawn.
      most: largest answer.
      others: most objects of other kinds in a picture.
      pixels: width and height of a picture.
    """
    if not 1 <= most + others <= 12:
        raise UserError(f"most + others: {most + others} objects (1 to 12 fit into a picture)")
    if most < 1 or others < 0:
        raise UserError(f"most: {most}, others: {others} (at least 1 and 0)")
    if pixels < 32:
        raise UserError(f"pixels: {pixels} (at least 32)")
    return [_record(random.Random(f"{split}/{seed}/{index}"), most, others, pixels) for index in range(n)]


def _record(draw: random.Random, most: int, others: int, pixels: int) -> dict[str, Any]:
    wanted, count = draw.choice(SHAPES), draw.randint(1, most)
    rest = [shape for shape in SHAPES if shape != wanted]
    shapes = [wanted] * count + [draw.choice(rest) for _ in range(draw.randint(0, others))]
    question = f"How many {wanted}s are in the picture? Answer with a number."
    parts = [{"type": "image", "image": picture_url(_picture(draw, shapes, pixels))}, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": parts}], "answer": str(count), "shape": wanted}


def _picture(draw: random.Random, shapes: list[str], pixels: int) -> Any:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (pixels, pixels), "white")
    canvas, radius = ImageDraw.Draw(picture), pixels // 12
    centers: list[tuple[int, int]] = []
    for shape in shapes:
        x, y = _place(draw, centers, pixels, radius)
        centers.append((x, y))
        color, box = draw.choice(COLORS), (x - radius, y - radius, x + radius, y + radius)
        if shape == "circle":
            canvas.ellipse(box, fill=color)
        elif shape == "square":
            canvas.rectangle(box, fill=color)
        else:
            canvas.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=color)
    return picture


def _place(draw: random.Random, centers: list[tuple[int, int]], pixels: int, radius: int) -> tuple[int, int]:
    """Draws a center whose object overlaps no other."""
    apart = 2 * radius + 2
    for _ in range(MOST_TRIES):
        x, y = (draw.randint(radius + 1, pixels - radius - 2) for _ in range(2))
        if all(max(abs(x - a), abs(y - b)) > apart for a, b in centers):
            return x, y
    raise UserError(f"pixels: {len(centers) + 1} objects found no room in {pixels} x {pixels} pixels")
