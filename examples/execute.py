"""Execute notebooks in place, so that their outputs are those of this machine.

``python examples/execute.py examples/rms_norm.ipynb ...``
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def execute(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    # Neither when a cell ran nor which Python it was belongs into the history.
    NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False).execute()
    notebook.metadata = metadata
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        execute(Path(name))
        print(f"executed {name}")
