"""benchmarks.turns: several checkouts in one process."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import results, turns
from benchmarks.backends.base import Replay
from cupynorm._bench import Problem


@pytest.fixture
def checkouts(tmp_path: Path) -> list[Path]:
    """Two folders with a cupynorm that names its folder, by a module imported at the call."""
    bench = """
def ours(problem, inputs):
    def call():
        from cupynorm import _late
        return (_late.NAME,)
    return call
"""
    roots = [tmp_path / name for name in ("old", "new")]
    for root in roots:
        package = root / "cupynorm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "_bench.py").write_text(bench)
        (package / "_late.py").write_text(f"NAME = {root.name!r}\n")
    return roots


def test_checkouts_lie_beside_each_other_in_one_process(checkouts, tmp_path) -> None:
    before = {name: module for name, module in sys.modules.items() if "cupynorm" in name}
    old, new = map(turns.Checkout, checkouts)
    for checkout in (old, new, old):
        with checkout.current():
            assert checkout.prepare(None, {}).run() == (checkout.root.name,)
        assert {n: m for n, m in sys.modules.items() if "cupynorm" in n} == before
    with pytest.raises(ValueError, match="must have a package cupynorm in it"):
        turns.Checkout(tmp_path)  # this folder only contains the checkouts
    assert sys.modules["cupynorm"] is before["cupynorm"]


def test_launches_take_turns_in_both_directions() -> None:
    seconds, order = {"a": 2.0, "b": 3.0}, []

    def sample(launches, runs) -> list[float]:
        order.append(launches[0])
        late = 100.0 if len(order) <= 2 else 0.0  # the first round
        return [50.0, *(seconds[launches[0]] + late for _ in range(runs - 1))]

    clock = SimpleNamespace(sample=sample)
    assert turns.typical_times(clock, [["a"], ["b"]], 3) == [2.0, 3.0]
    assert "".join(order) == "abbaabba"


def test_each_set_of_arrays_has_its_turn_and_far_off_times_do_not_count() -> None:
    begun = []

    def sample(launches, runs) -> list[float]:
        begun.append(launches[0])
        turn = len(begun)
        return [0.0, 1.0 * turn, 2.0 * turn, 1000.0 * (turn == 3)][:runs]

    clock = SimpleNamespace(sample=sample)
    (found,) = turns.typical_times(clock, [["a", "b", "c", "d"]], 4)
    assert begun == ["a", "d", "c", "b", "a"]
    middle = sorted([2, 4, 0, 3, 6, 1000, 4, 8, 0, 5, 10, 0])[3:-3]
    assert found == sum(middle) / len(middle)


def test_each_graph_is_launched_once_before_any_is_timed(monkeypatch) -> None:
    """The first launch of a graph may take longer."""
    launched, timed = [], []

    class Checkout:
        kind = "ours"

        def capture(self, problem, inputs) -> Replay:
            name = f"{id(self)} {id(inputs)}"
            return Replay(lambda: launched.append(name), [np.zeros(2)])

    def typical_times(clock, launches, rounds) -> list[float]:
        timed.append([len(of_checkout) for of_checkout in launches])
        assert len(launched) == len(set(launched)) == 2 * 50
        return [1.0, 2.0]

    monkeypatch.setattr(turns, "typical_times", typical_times)
    problem = Problem("rms_norm", "forward", 2, 8, "float32", "float32")
    clock = SimpleNamespace(cache_bytes=1 << 20)
    found = turns.time(problem, [Checkout(), Checkout()], clock, 3, np)
    assert found == ([1.0, 2.0], [True])
    assert timed == [[50, 50]]


def test_other_libraries_have_bits_of_their_own(monkeypatch) -> None:
    def backend(kind: str, value: float, **replay) -> SimpleNamespace:
        outputs = [np.full(2, value)]
        return SimpleNamespace(
            name="one", kind=kind, capture=lambda *_: Replay(int, outputs, **replay)
        )

    monkeypatch.setattr(turns, "typical_times", lambda clock, launches, rounds: [1.0] * 3)
    problem = Problem("rms_norm", "forward", 2, 8, "float32", "float32")
    clock = SimpleNamespace(cache_bytes=0)
    them = [backend("ours", 1.0), backend("ours", 2.0), backend("peer", 2.0)]
    assert turns.time(problem, them, clock, 3, np) == ([1.0] * 3, [False, True])
    them[2] = SimpleNamespace(name="one", kind="peer", capture=lambda *_: None)
    with pytest.raises(ValueError, match="one cannot be captured into a CUDA graph"):
        turns.time(problem, them, clock, 3, np)
    them[2] = backend("peer", 2.0, reset=int)
    with pytest.raises(ValueError, match="one writes over its inputs in rms_norm forward"):
        turns.time(problem, them, clock, 3, np)


def test_turns_are_a_table_with_what_differs(checkouts, monkeypatch, capsys) -> None:
    cupy = SimpleNamespace(get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=list))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(turns, "gpu_problem", lambda: None)
    monkeypatch.setattr(turns, "Clock", lambda: "clock")
    timed = []

    def time(problem, them, clock, rounds, xp) -> tuple[list[float], list[bool]]:
        timed.append((problem, [Path(one.name).name for one in them], clock, rounds, xp))
        alike = [problem.direction == "backward", True]
        return [5e-6, 4e-6, 6e-6][: len(them)], alike[: len(them) - 1]

    monkeypatch.setattr(turns, "time", time)
    roots = [str(root) for root in checkouts]
    chosen = ["--shapes", "8x1024", "--operations", "rms_norm forward", "rms_norm backward"]
    assert turns.main([*roots, *chosen, "--rounds", "3"]) == 0
    problems_timed = [
        Problem("rms_norm", d, 8, 1024, "bfloat16", "float32") for d in ("forward", "backward")
    ]
    assert timed == [(p, ["old", "new"], "clock", 3, cupy) for p in problems_timed]
    names, *table = capsys.readouterr().out.splitlines()
    assert names == f"[0] {roots[0]} [1] {roots[1]}"
    assert [line.split() for line in table] == [
        "us; speed over [0] [0] [1] [1]".split(),
        "rms_norm forward 8x1024 bfloat16,float32 5.00 4.00 1.250 bits of [1] differ".split(),
        "rms_norm backward 8x1024 bfloat16,float32 5.00 4.00 1.250".split(),
        "geometric mean of 2 1.250".split(),
    ]
    with pytest.raises(SystemExit):
        turns.main([roots[0], "nowhere"])
    assert "nowhere must have a package cupynorm in it" in capsys.readouterr().err
    liger = SimpleNamespace(name="liger", release=list)
    monkeypatch.setattr(turns, "discover", lambda names: ({"liger": liger}, {"liger": "1"}))
    assert turns.main([*roots, *chosen, "--backends", "liger"]) == 0
    assert [them for _, them, *_ in timed[2:]] == 2 * [["old", "new", "liger"]]
    names, _, first, *_ = capsys.readouterr().out.splitlines()
    assert names == f"[0] {roots[0]} [1] {roots[1]} [2] liger"
    assert first.split()[4:] == "5.00 4.00 6.00 1.250 0.833 bits of [1] differ".split()
    monkeypatch.setattr(turns, "discover", lambda names: ({}, {"liger": "missing: liger"}))
    with pytest.raises(SystemExit):
        turns.main([*roots, "--backends", "liger"])
    assert "liger: missing: liger" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        turns.main([*roots, "--rounds", "0"])
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err


def test_turns_without_a_gpu_say_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(turns, "gpu_problem", lambda: "no GPU")
    assert turns.main([str(results.ROOT)]) == 1
    assert capsys.readouterr().out == "There is nothing to time: no GPU.\n"


@pytest.mark.gpu
def test_a_checkout_beside_itself(capsys) -> None:
    root = str(results.ROOT)
    arguments = [root, root, "--shapes", "8x1024", "--operations", "rms_norm forward"]
    assert turns.main([*arguments, "--rounds", "1"]) == 0
    *_, line, mean = capsys.readouterr().out.splitlines()
    assert line.startswith("rms_norm forward 8x1024 bfloat16,float32 ")
    assert "differ" not in line
    assert mean.startswith("geometric mean of 1 ")
