"""Draw the two figures of "How it works": ``python docs/drawings.py``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
INK, GREY = "#1f2933", "#52606d"
BLUE, GREEN, ORANGE, RED, PLAIN = "#d6e9f8", "#d9f2e3", "#fdebc8", "#f9d9d3", "#f0f2f5"
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}"
 font-family="Helvetica, Arial, sans-serif" font-size="13" fill="{ink}">
<title>{title}</title>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
 orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{grey}"/></marker></defs>
<rect width="{w}" height="{h}" rx="8" fill="#ffffff"/>
"""


def page(title: str, width: int, height: int, parts: Iterator[str]) -> str:
    """Return an SVG, on a white card so that it reads on any background."""
    head = HEAD.format(w=width, h=height, title=title, ink=INK, grey=GREY)
    return head + "\n".join(parts) + "\n</svg>\n"


def text(
    x: float, y: float, words: str, size: int = 13, anchor: str = "middle", **more: str
) -> str:
    style = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{style}>'
        f"{escape(words)}</text>"
    )


def box(x: float, y: float, width: float, fill: str, name: str, *lines: str) -> str:
    height = 26 + 15 * len(lines)
    parts = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" rx="6" fill="{fill}" '
        f'stroke="{GREY}" stroke-width="0.8"/>',
        text(x + width / 2, y + 18, name, font_weight="bold"),
    ]
    parts += [text(x + width / 2, y + 34 + 15 * n, line, 11.5) for n, line in enumerate(lines)]
    return "\n".join(parts)


def arrow(*points: tuple[float, float], label: str = "") -> str:
    path = " L".join(f"{x:g} {y:g}" for x, y in points)
    drawn = (
        f'<path d="M{path}" fill="none" stroke="{GREY}" stroke-width="1.3" marker-end="url(#tip)"/>'
    )
    if not label:
        return drawn
    (x, y), (_, below) = points[:2]
    return drawn + "\n" + text(x + 6, (y + below) / 2 + 4, label, 11.5, "start", fill=GREY)


def call() -> Iterator[str]:
    """Yield a call's way, from an array to the GPU."""
    yield box(20, 16, 150, PLAIN, "NumPy array")
    yield box(200, 16, 200, PLAIN, "CuPy, or any by DLPack")
    yield box(430, 16, 150, PLAIN, "torch tensor")
    yield box(610, 16, 150, PLAIN, "JAX array")
    yield box(
        20, 76, 380, BLUE, "cupynorm.norms", "the public functions; which library's array it is"
    )
    yield box(430, 76, 150, BLUE, "cupynorm.torch", "autograd, compile")
    yield box(610, 76, 150, BLUE, "cupynorm.jax", "XLA's FFI, sharding")
    for x in (95, 300, 505, 685):
        yield arrow((x, 42), (x, 75))
    yield box(20, 160, 150, GREEN, "reference", "float64, by NumPy")
    yield arrow((95, 117), (95, 159))
    yield box(200, 160, 200, BLUE, "_calls", "like an earlier call?")
    yield arrow((300, 117), (300, 159))
    yield box(
        200, 244, 560, ORANGE, "_plans", "what a pass does on a device: kernels, grids, arrays"
    )
    yield arrow((300, 201), (300, 243), label="no: check, then prepare")
    yield arrow((505, 117), (505, 243))
    yield arrow((685, 117), (685, 243))
    yield box(20, 244, 150, ORANGE, "_operation", "what is computed")
    yield arrow((200, 265), (171, 265))
    yield box(200, 328, 160, ORANGE, "_layout", "how: rows to threads")
    yield box(400, 328, 360, ORANGE, "_compile", "NVRTC compiles kernels/, CuPy keeps them on disk")
    yield arrow((280, 285), (280, 327))
    yield arrow((360, 349), (399, 349))
    yield box(200, 412, 560, RED, "_driver", "launches, on the current stream")
    yield arrow((580, 369), (580, 411))
    # Past all that, to the launch.
    yield arrow((200, 181), (185, 181), (185, 433), (199, 433))
    yield text(178, 312, "yes", 11.5, "end", fill=GREY)


# Where each way to lay out rows ends, in KiB of a row of x; test_docs.py holds some lengths to it.
REGIMES = {
    "forward": (
        (32, BLUE, "registers"),
        (512, GREEN, "shared memory of a cluster"),
        (1024, "url(#some)", "some"),
        (8192, RED, "read twice"),
    ),
    "backward": (
        (20, ORANGE, "shared memory, one block"),
        (448, GREEN, "shared memory of a cluster"),
        (1024, "#e6dcf5", "strips"),
        (8192, RED, "read twice"),
    ),
    "forward, no clusters": ((32, BLUE, "registers"), (8192, RED, "read twice")),
    "backward, no clusters": ((24, ORANGE, "shared memory, one block"), (8192, RED, "read twice")),
}
FIRST, LAST = 0.25, 8192  # KiB


def regimes() -> Iterator[str]:
    """Yield which lengths of rows are worked on in which way."""

    def place(kib: float) -> float:
        return 170 + 590 * math.log2(kib / FIRST) / math.log2(LAST / FIRST)

    yield (
        '<defs><pattern id="some" width="8" height="8" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="8" height="8" fill="{RED}"/>'
        f'<rect width="4" height="8" fill="{GREEN}"/></pattern></defs>'
    )
    yield text(20, 28, "A row of x has", 13, "start", font_weight="bold")
    for kib in (0.25, 1, 4, 16, 64, 256, 1024, 8192):
        name = (
            f"{1024 * kib:g} B"
            if kib < 1
            else f"{kib:g} KiB"
            if kib < 1024
            else f"{kib / 1024:g} MiB"
        )
        anchor = {FIRST: "start", LAST: "end"}.get(kib, "middle")
        yield text(place(kib), 28, name, 11.5, anchor, fill=GREY)
        yield (
            f'<line x1="{place(kib):g}" y1="36" x2="{place(kib):g}" y2="226" stroke="{GREY}" '
            'stroke-width="0.5" stroke-dasharray="2 3"/>'
        )
    for index, (name, parts) in enumerate(REGIMES.items()):
        y = 44 + 46 * index
        yield text(20, y + 22, name, 12, "start", font_weight="bold")
        start = place(FIRST)
        for kib, fill, words in parts:
            end = place(kib)
            yield (
                f'<rect x="{start:g}" y="{y}" width="{end - start:g}" height="34" fill="{fill}" '
                f'stroke="{GREY}" stroke-width="0.8"/>'
            )
            yield text((start + end) / 2, y + 21, words, 11.5)
            start = end


if __name__ == "__main__":
    (HERE / "call.svg").write_text(page("A call's way", 780, 470, call()), encoding="utf-8")
    (HERE / "regimes.svg").write_text(
        page("How rows are worked on", 780, 244, regimes()), encoding="utf-8"
    )
