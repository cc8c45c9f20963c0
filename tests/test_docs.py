"""The pages of docs/: they build without a warning, and their examples run."""

from __future__ import annotations

import doctest
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cupynorm import _layout
from cupynorm._operation import BackwardSpec, ForwardSpec

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
OLDEST = {"torch": "2.11", "jax": "0.10.2"}
LIBRARY = re.compile(r"^(?:>>> )?(?:from|import) (cupy|torch|jax|flax|equinox)\b", re.MULTILINE)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(page: Path) -> list[object]:
    text = page.read_text(encoding="utf-8")
    found = []
    for block in re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        libraries = re.findall(LIBRARY, block[1])
        marks = [pytest.mark.gpu] if "cupy" in libraries else []
        line = text.count("\n", 0, block.start(1))
        name = f"{page.name}:{line}"
        found.append(pytest.param(name, line, block[1], libraries, id=name, marks=marks))
    return found


EXAMPLES = [example for page in PAGES for example in blocks(page)]


def test_there_are_examples_for_each_kind_of_array() -> None:
    libraries = {library for example in EXAMPLES for library in example.values[3]}
    assert libraries == {"cupy", "torch", "jax", "flax", "equinox"}
    assert any(not example.values[3] for example in EXAMPLES)  # the NumPy example


# torch itself still uses what it deprecates.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("name", "line", "source", "libraries"), EXAMPLES)
def test_example_runs(name: str, line: int, source: str, libraries: list[str]) -> None:
    for library in libraries:
        pytest.importorskip(library, minversion=OLDEST.get(library))
    if not source.startswith(">>> "):
        exec(compile("\n" * line + source, name, "exec"), {})  # a traceback names the page's line
        return
    test = doctest.DocTestParser().get_doctest(source, {}, name, name, line)
    assert test.examples
    said: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append)
    assert not said, "".join(said)


def test_pages_build_without_a_warning(tmp_path: Path) -> None:
    for module in ("sphinx", "furo", "myst_nb", "numpydoc"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}: pip install '.[docs]'")
    for library, oldest in OLDEST.items():  # the API lists their functions
        pytest.importorskip(library, minversion=oldest)
    site = tmp_path / "site" / "html"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", tmp_path / "trees", DOCS, site],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    built = {path.stem for path in site.rglob("*.html")}
    notebooks = {path.stem for path in (ROOT / "examples").glob("*.ipynb")}
    assert {page.stem for page in PAGES} | notebooks <= built
    api = (site / "api.html").read_text(encoding="utf-8")
    for name in (
        "rms_norm_backward",
        "torch.replace_norms",
        "jax.rms_norm",
        "testing.check_backward",
    ):
        assert f'id="cupynorm.{name}"' in api


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
            assert anchor in {heading.replace(" ", "-") for heading in kept}, link


def drawn() -> dict[str, tuple[tuple[float, str, str], ...]]:
    spec = importlib.util.spec_from_file_location("drawings", DOCS / "drawings.py")
    drawings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawings)
    for name, drawing in (("call", drawings.call), ("regimes", drawings.regimes)):
        kept = (DOCS / f"{name}.svg").read_text(encoding="utf-8")
        assert all(part in kept for part in drawing()), f"run: python {DOCS / 'drawings.py'}"
    return drawings.REGIMES


def way(direction: str, kib: float, architecture: int) -> str:
    """Return how rows of bfloat16 of this length are worked on, in the drawing's words."""
    n = 64 * round(8 * kib)  # whole packs of 16 bytes
    if direction == "forward":
        spec = ForwardSpec("rms_norm", "bfloat16", "float32", None, "bfloat16", False, False, False)
        layout = _layout.forward_config(spec, n, 8, architecture)
    else:
        spec = BackwardSpec("rms_norm", "bfloat16", "bfloat16", "float32", None, False, False)
        layout = _layout.backward_config(spec, n, 8, architecture)
    if isinstance(layout, _layout.ForwardPipelined | _layout.BackwardPipelined):
        several = layout.cluster_blocks > 1
        return "shared memory of a cluster" if several else "shared memory, one block"
    if isinstance(layout, _layout.BackwardColumnParallel):
        return "strips"
    return "registers" if isinstance(layout, _layout.ForwardInRegisters) else "read twice"


def test_the_drawing_of_how_rows_are_worked_on_is_what_is_chosen() -> None:
    for name, parts in drawn().items():
        direction, _, others = name.partition(", ")
        start = 0.25
        for end, _, words in parts:
            # The middle of a part. Its borders move with the dtypes and the options.
            if words != "some":
                middle = (start * end) ** 0.5
                assert way(direction, middle, 80 if others else 90) == words, (name, middle)
            start = end


def test_each_kernel_is_told_where_it_works() -> None:
    text = (DOCS / "how_it_works.md").read_text(encoding="utf-8")
    kernels = {path.name for path in (ROOT / "kernels").glob("*.cu")}
    assert kernels == set(re.findall(r"`(\w+\.cu)`", text))


def test_recorded_errors_are_those_of_the_file() -> None:
    results = pytest.importorskip("benchmarks.results")
    names = {"quack": "QuACK", "liger": "Liger"}
    worst: dict[str, dict[tuple[str, str], float]] = {}
    source = ROOT / "benchmarks" / "results" / "h200_standard.json"
    for record in results.load(source)["measurements"]:
        own = worst.setdefault(names.get(record["backend"], record["backend"]), {})
        if record["status"] != "ok":
            continue
        for output, (_, ratio) in (record.get("errors") or {}).items():
            kind = output if output in ("y", "dx") else "weights"
            dtype = record["weight_dtype" if kind == "weights" else "dtype"]
            key = (kind, "16 bits" if dtype.endswith("16") else dtype)
            own[key] = max(own.get(key, 0.0), ratio)
    columns = [("y", "16 bits"), ("dx", "16 bits"), ("y", "float32"), ("dx", "float32")]
    columns += [("weights", "16 bits"), ("weights", "float32")]
    text = (DOCS / "numerics.md").read_text(encoding="utf-8").partition("| library |")[2]
    rows = [row[2:-1].split("|") for row in text.partition("\n\n")[0].splitlines()[2:]]
    assert len(rows) == 7
    for library, both, *others in rows:
        shown = [cell.strip() for cell in (*both.split(","), *others)]
        expected = [worst[library.strip()].get(column) for column in columns]
        assert shown == ["" if value is None else f"{value:.2f}" for value in expected], library
