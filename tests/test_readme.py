"""Every Python block of the README runs by itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
README = (HERE.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = list(re.finditer(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL))


def case(block: re.Match[str]) -> object:
    (library,) = re.findall(r"^import (numpy|cupy|torch|jax)\b", block[1], flags=re.MULTILINE)
    marks = [pytest.mark.gpu] if library == "cupy" else []
    # Empty lines before the block give a traceback the README's own line numbers.
    source = "\n" * README.count("\n", 0, block.start(1)) + block[1]
    return pytest.param(library, source, id=library, marks=marks)


CASES = [case(block) for block in BLOCKS]


def test_readme_is_short_and_has_what_a_newcomer_starts_with() -> None:
    lines = README.splitlines()
    assert len(lines) <= 200
    assert not [line for line in lines if len(line) > 120]
    assert {case.values[0] for case in CASES} == {"numpy", "torch"}
    commands = "".join(re.findall(r"^```console\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))
    for command in (
        "git clone ",
        'pip install ".[cuda12]" && python -m cupynorm\n',
        'pip install ".[cuda12,test]" && python -m pytest -n auto --dist loadfile\n',
    ):
        assert command in commands


def test_ci_runs_the_readmes_test_command() -> None:
    (command,) = re.findall(r"^(pip install .* && python -m pytest .*)$", README, re.MULTILINE)
    script = HERE.parent / ".ci" / "run"
    if not script.is_file():
        pytest.skip("a source distribution has no .ci")
    install, run = command.split(" && ")
    text = script.read_text(encoding="utf-8")
    assert f"{install.replace('pip install', 'pip install --quiet')}\n{run}\n" in text


# torch itself still uses what it deprecates.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("library", "source"), CASES)
def test_block_runs(library: str, source: str) -> None:
    oldest = {"torch": "2.11", "jax": "0.10.2"}
    pytest.importorskip(library, minversion=oldest.get(library))
    exec(compile(source, "README.md", "exec"), {})


def test_what_is_said_to_be_tested_somewhere_exists() -> None:
    table = (HERE / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+(?:\.py)?)`", table))
    assert len(named) > 10
    paths = sorted(HERE.glob("test_*.py"))
    defined = {path.name for path in paths}
    for path in paths:
        defined |= set(
            re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        )
    assert not named - defined
