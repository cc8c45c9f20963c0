"""Changes to the kernels that the cases on the host must notice.

Operators make most of them from the kernels' text. `python tests/mutations.py` runs all of them,
this a sample. Changes that no operator makes are in data/mutations.txt, each with the report that
must notice it:

FILE: WHAT IS WRONG
    TEXT OF THE FILE, WITH ANY SPACES AND NEW LINES
=> WHAT IS THERE INSTEAD
    KINDS OF REPORT: CHECK
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from host.build import Build, compiler_problem
from mutations import all_checks
from thorough import examples, one_in

from cupynorm._compile import kernels_directory

pytestmark = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))

HERE = Path(__file__).parent
# How many mutants by operators, and which share must be noticed. Those that survive the few checks
# of a sample are mostly equivalent.
SAMPLE, LEAST = examples(5, of=100), 0.85

KINDS = {
    # Memory after an array belongs to nobody, or nothing wrote it.
    "out of bounds": "out of bounds|uninitialized: (reads|fetches)",
    "race": "race: ",
    "unwritten": "uninitialized|was never written",
    "stuck": "no thread can go on|lanes of a warp disagree|mailbox|has ended|already expects|twice"
    "|did not wait",
    "misaligned": "misaligned",
    "overflow": "mul_overflow",
    "value": r"times the bound|residual_out.* is .*, x \+ residual",
    "bits": "wrong bits in all|bits of",
}


@dataclasses.dataclass(frozen=True)
class Mutation:
    file: str
    name: str
    old: str
    new: str
    kinds: list[str]
    check: str

    def __str__(self) -> str:
        return self.name

    def places(self) -> list[str]:
        """Return the texts of the file that match the old one, up to spaces and new lines."""
        text = (kernels_directory() / self.file).read_text(encoding="utf-8")
        return re.findall(r"\s+".join(map(re.escape, self.old.split())), text)


def _mutations() -> list[Mutation]:
    mutations = []
    for block in (HERE / "data" / "mutations.txt").read_text(encoding="utf-8").split("\n\n"):
        title, old, new, noticed = block.strip("\n").split("\n")
        file, name = title.split(": ", 1)
        kinds, check = noticed.split(": ", 1)
        new = new.removeprefix("=>").strip()
        mutations.append(Mutation(file, name, old, new, kinds.split(", "), check))
    return mutations


MUTATIONS = _mutations()
CHECKS = {check.name: check for check in reversed(list(all_checks()))}


def test_each_mutation_has_one_place() -> None:
    lost = [f"{m.file}: {m}, {len(m.places())} places" for m in MUTATIONS if len(m.places()) != 1]
    assert not lost, "\n".join(lost)


@pytest.mark.parametrize("mutation", MUTATIONS[:: one_in(6)], ids=str)
def test_a_mutation_is_noticed(mutation: Mutation) -> None:
    (old,) = mutation.places()
    checks_all = {"arithmetic_of": 1} if "overflow" in mutation.kinds else {}
    build = Build({mutation.file: ((old, mutation.new),)}, **checks_all)
    check = CHECKS[mutation.check]
    build.compile(check.kernels())  # together, which is faster
    with pytest.raises(AssertionError) as caught:
        check.run(build)
    message = str(caught.value)
    print(f"{mutation}: {message}")
    assert "g++" not in message
    assert re.search("|".join(KINDS[kind] for kind in mutation.kinds), message)


def test_mutants_are_noticed() -> None:
    script = Path(__file__).with_name("mutations.py")
    command = [sys.executable, script, *f"--sample {SAMPLE} --quick --least {LEAST}".split()]
    variables = {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    assert not process.returncode, process.stdout + process.stderr
    print(process.stdout)
