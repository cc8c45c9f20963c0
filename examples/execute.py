"""Execute notebooks in place, so that their outputs are those of this machine.

``python examples/execute.py examples/rms_norm.ipynb ...``
"""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

COLOURS = 32  # of a picture, which then has a quarter of the bytes


def shrink_pictures(notebook: Any) -> None:
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            picture = output.get("data", {}).get("image/png")
            if picture is not None:
                drawn = Image.open(io.BytesIO(base64.b64decode(picture)))
                shrunk = io.BytesIO()
                drawn.convert("RGB").quantize(COLOURS).save(shrunk, "png", optimize=True)
                output.data["image/png"] = base64.b64encode(shrunk.getvalue()).decode()


def execute(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    # Neither when a cell ran nor which Python it was belongs into the history.
    NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False).execute()
    notebook.metadata = metadata
    shrink_pictures(notebook)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        execute(Path(name))
        print(f"executed {name}")
