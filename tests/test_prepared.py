"""A prepared call does what it did the first time, wrong arguments included.

CuPy's own arrays lie over the host's memory. Nothing is launched, and launches are recorded.
"""

from __future__ import annotations

import contextlib
import decimal
import fractions
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cupynorm
from cupynorm import _prepared
from cupynorm._operation import BACKWARD as BACKWARD_PASS
from cupynorm._operation import FORWARD as FORWARD_PASS

cupy = pytest.importorskip("cupy")

from cupynorm import _calls  # noqa: E402 - it needs CuPy

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (6, 4, 64)
STREAM = 4321


class Subclass(cupy.ndarray):
    pass


class Machine:
    """Two devices that launch nothing. It stands for the runtime below `_calls`."""

    def __init__(self) -> None:
        self.current = 0
        self.alignment = 512
        self.counted = 0  # bytes of the count that forward kernels take
        self.stands_in = False  # whether plans do
        self.launches: list[Any] = []
        self._kept: list[Any] = []

    def allocate(self, nbytes: int, device: int | None = None, offset: int = 0) -> Any:
        memory = np.zeros(nbytes + 1024 + offset, np.uint8)
        start = memory.ctypes.data
        start += -start % 512 + offset
        if self.alignment < 512 and device is None:
            start += self.alignment
        self._kept.append(memory)
        device = self.current if device is None else device
        unowned = cupy.cuda.UnownedMemory(start, nbytes, memory, device)
        return cupy.cuda.MemoryPointer(unowned, 0)

    def array(
        self, shape: Any, dtype: Any = "float32", strides: Any = None, device: int = 0,
        offset: int = 0, cls: type = cupy.ndarray,
    ) -> Any:  # fmt: skip
        """Return an array. Its strides, in elements, span memory from their lowest address."""
        itemsize = np.dtype(dtype).itemsize
        pointer = self.allocate(1 << 16, device, 1 << 14)
        strides = None if strides is None else tuple(itemsize * s for s in strides)
        return cls(shape, dtype, pointer + offset, strides)

    def forward_plan(self, *key: Any, soon: bool) -> Any:
        assert soon
        _, m, n, _, device = key

        def prepared(rows: int, *given: Any) -> Any:
            *numbers, groups = given
            assert (rows, groups) == (m, None)

            def launch(stream: int, operands: tuple[int, ...]) -> None:
                assert (device, stream) == (self.current, STREAM)
                count = len(FORWARD_PASS.operands)
                noted = stream, m, *operands[:count], *numbers, *operands[count:]
                self.launches.append((key, noted))

            return launch

        return SimpleNamespace(
            prepared=prepared,
            n=n,
            scratch_bytes=lambda m: self.counted,
            stands_in=self.stands_in,
        )

    def backward_plan(self, *key: Any, dx_given: bool, soon: bool) -> Any:
        assert soon

        def prepared(m: int, groups: None) -> Any:
            def launch(stream: int, operands: tuple[int, ...]) -> None:
                assert (key[-1], stream) == (self.current, STREAM)
                self.launches.append((key, (stream, m, *operands)))

            return launch

        return SimpleNamespace(
            prepared=prepared, n=key[2], scratch_bytes=lambda m, groups: 128 * m, stands_in=False
        )

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    def contiguous(self, array: Any) -> Any:
        return cupy.ndarray(array.shape, array.dtype)

    def on_repeated(self, *arguments: Any) -> Any:
        """Refuse what CuPy's kernels would compute: a GPU cannot read this memory."""
        raise NotImplementedError("this machine repeats no vectors")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine()
    stream = SimpleNamespace(ptr=STREAM, is_capturing=lambda: False)
    monkeypatch.setattr(_calls, "_get_device", lambda: machine.current)
    monkeypatch.setattr(_calls, "_get_current_stream", lambda: stream)
    monkeypatch.setattr(_calls, "on", machine.on)
    monkeypatch.setattr(_calls, "contiguous", machine.contiguous)
    monkeypatch.setattr(_calls, "_on_repeated", machine.on_repeated)
    monkeypatch.setattr(_calls, "forward_plan", machine.forward_plan)
    monkeypatch.setattr(_calls, "backward_plan", machine.backward_plan)
    monkeypatch.setattr(_calls, "calls", {})
    cupy.cuda.set_allocator(machine.allocate)
    yield machine
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)


FORWARD = (
    cupynorm.rms_norm,
    cupynorm.layer_norm,
    cupynorm.rms_norm_forward,
    cupynorm.layer_norm_forward,
)
BACKWARD = (cupynorm.rms_norm_backward, cupynorm.layer_norm_backward)
ALL = FORWARD + BACKWARD
# Positions among a launch's arguments. The bounds follow eps.
BITMASK, EPS = 2 + FORWARD_PASS.operands.index("bitmask"), 2 + len(FORWARD_PASS.operands)
BITMASK_OF_BACKWARD = 2 + BACKWARD_PASS.operands.index("bitmask")


def good(function: Callable[..., Any], machine: Machine) -> dict[str, Any]:
    """Return the arguments of a correct call without options."""
    rows, row = machine.array(SHAPE), machine.array(SHAPE[-1:])
    if function in FORWARD:
        return {"x": rows, "weight": row, "bias": None}
    statistics = machine.array(SHAPE[:-1])
    arguments = {"dy": machine.array(SHAPE), "x": rows, "weight": row, "rstd": statistics}
    if function is cupynorm.layer_norm_backward:
        arguments["mean"] = machine.array(SHAPE[:-1])
    return arguments


def variants(machine: Machine) -> dict[str, list[Any]]:
    """Return, for each argument, values that are right, wrong, and in between."""
    array, n = machine.array, SHAPE[-1]
    padded = ((4 * (n + 8)), n + 8, 1)
    rows = [
        array(SHAPE),
        array(SHAPE, BFLOAT16),
        array(SHAPE, "float64"),
        array(SHAPE, "int32"),
        array(SHAPE, ">f4"),
        array((5, 4, n)),
        array((1, 4, n)),
        array((0, 4, n)),
        array((6, 4, 0)),
        array((n,)),
        array((4, n)),
        array(SHAPE, strides=padded),
        array(SHAPE, strides=(4 * (n + 3), n + 3, 1)),
        array((1, 4, n), strides=(0, n, 1)),
        array((6, 1, n), strides=(n, 7, 1)),
        array(SHAPE, strides=(n, 6 * n, 1)),
        array(SHAPE, strides=(0, 0, 1)),
        array(SHAPE, strides=(4, 1, 1)),
        array(SHAPE, strides=(-4 * n, -n, 1)),
        array(SHAPE, strides=(1, 6, 24)),
        array(SHAPE, strides=(0, 0, 0)),
        array(SHAPE, offset=4),
        array(SHAPE, offset=16),
        array(SHAPE, offset=2),
        array(SHAPE, BFLOAT16, offset=2),
        array(SHAPE, device=1),
        array(SHAPE, cls=Subclass),
        array((6, 2, 2, n)),
        np.zeros(SHAPE, np.float32),
        [1.0, 2.0],
        None,
    ]
    row = [
        array((n,)),
        array((n,), BFLOAT16),
        array((n,), "float64"),
        array((n,), "int8"),
        array((n // 2,)),
        array((1, n)),
        array((4, n)),
        array((*SHAPE[:-1], 1)),
        array((n,), strides=(2,)),
        array((n,), strides=(0,)),
        array((n,), strides=(-1,)),
        array((n,), offset=4),
        array((n,), offset=1),
        array((n,), device=1),
        array((n,), cls=Subclass),
        np.ones(n, np.float32),
        1.0,
        None,
    ]
    statistics = [
        array(SHAPE[:-1]),
        array(SHAPE[:-1], "float64"),
        array(SHAPE[:-1], BFLOAT16),
        array(SHAPE[:-1], "int32"),
        array((5, 4)),
        array((6,)),
        array(SHAPE),
        array(SHAPE[:-1], strides=(8, 2)),
        array(SHAPE[:-1], strides=(1, 6)),
        array(SHAPE[:-1], offset=4),
        array(SHAPE[:-1], offset=3),
        array(SHAPE[:-1], device=1),
        array(SHAPE[:-1], cls=Subclass),
        np.ones(SHAPE[:-1], np.float32),
        None,
    ]
    bits = (*SHAPE[:-1], n // 8)
    bitmask = [
        array(bits, "uint8"),
        array(bits, "int8"),
        array(bits, "bool"),
        array(bits),
        array((5, *bits[1:]), "uint8"),
        array((*bits[:-1], 7), "uint8"),
        array((*bits[:-1], 9), "uint8"),
        array(bits[1:], "uint8"),
        array(SHAPE, "uint8"),
        array(bits, "uint8", strides=(4 * 16, 16, 1)),
        array(bits, "uint8", strides=(8, 48, 1)),
        array(bits, "uint8", strides=(0, 0, 1)),
        array(bits, "uint8", offset=1),
        array(bits, "uint8", device=1),
        array(bits, "uint8", cls=Subclass),
        np.zeros(bits, np.uint8),
        True,
        None,
    ]
    relu = [
        None,
        (0, 6),
        (0.0, 6.0),
        (-0.0, 6.0),
        (-1, 0.0),
        (-1.0, -0.0),
        (0, float("inf")),
        (-float("inf"), 0),
        (0.0, 1e-46),
        (1.0, 1.0 + 1e-12),
        (0, 10**400),
        (-(10**400), 0),
        (2**53, 2**53 + 1),
        (float(2**53), 2**53 + 2),
        (False, 6),
        (0, True),
        (-1, True),
        (-1, 1),
        (np.float32(0), np.float64(6)),
        (np.int64(0), np.bool_(True)),
        (fractions.Fraction(0), fractions.Fraction(6)),
        (decimal.Decimal(0), decimal.Decimal(6)),
        (complex(0), complex(6)),
        (6, 0),
        (0, 0),
        (float("nan"), 6.0),
        (0.0, float("nan")),
        (0,),
        (0, 6, 6),
        (),
        ((0,), 6),
        ([0], 6),
        [0, 6],
        range(0, 12, 6),
        "06",
        True,
        6,
        np.array([0, 6]),
    ]
    real = [1e-6, 1e-5, 0.0, -0.0, 0, 1, 1.0, True, np.float64(1e-5), np.float32(1e-5), -1e-5]
    real += [1e-40, 1e-310, 1e39, float("nan"), float("inf"), None, "1e-5"]
    real += [decimal.Decimal(0), decimal.Decimal(1), fractions.Fraction(1), complex(0), [0.0]]
    flags = [False, True, 0, 1, 0.0, 1.0, None, np.bool_(True), np.bool_(False), "no"]
    dtypes = [None, "float32", "float16", np.float32, np.dtype("float32"), BFLOAT16]
    dtypes += [ml_dtypes.bfloat16, "bfloat16", float, int, "int32", np.dtype(">f4"), [1], 0]
    axes = [None, -1, 2, 1, -2, 3, True, 2.0, -1.0, np.int64(-1), decimal.Decimal(2)]
    axes += [(-1,), (2,), [2], (-2, -1), (0, 1, 2), (True,), (2.0,), ()]
    return {
        "x": rows,
        "dy": rows,
        "out": rows,
        "dx": rows,
        "residual": rows,
        "residual_out": rows,
        "dresidual_out": rows,
        "weight": row,
        "bias": row + flags,
        "mean": statistics,
        "rstd": statistics,
        "bitmask": bitmask,
        "relu": relu,
        "eps": real,
        "zero_centered": flags,
        "out_dtype": dtypes,
        "residual_dtype": dtypes,
        "dx_dtype": dtypes,
        "dresidual_dtype": dtypes,
        "axis": axes,
    }


def outcome(machine: Machine, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Return all that shows of a call: its error, or what it launches and returns."""
    machine.launches.clear()
    names = {}
    for name, value in arguments.items():
        if isinstance(value, cupy.ndarray):
            names.setdefault(value.data.ptr, name)
    try:
        result = function(**arguments)
    except Exception as error:
        assert not machine.launches
        return type(error), str(error)

    def shown(i: int, number: float) -> Any:
        if isinstance(number, float):
            return repr(number) if i > EPS else number  # a bound is never -0.0
        return names.get(number, "new" if number > 1 << 20 else number)

    launches = [
        (key, [shown(i, number) for i, number in enumerate(given)])
        for key, given in machine.launches
    ]
    if not isinstance(result, tuple):
        result = (result,)
    seen = [
        r if r is None else (type(r), r.shape, r.dtype, r.strides, r.data.device_id,
                             names.get(r.data.ptr, "new"))
        for r in result
    ]  # fmt: skip
    return launches, type(result), seen


def assert_as_the_first_time(
    machine: Machine, function: Callable[..., Any], arguments: dict[str, Any]
) -> Any:
    actual = outcome(machine, function, arguments)
    with pytest.MonkeyPatch.context() as patch:
        for key in ("forward_key", "backward_key"):
            patch.setattr(_calls, key, lambda *arguments: None)
        assert actual == outcome(machine, function, arguments)
    return actual


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("function", ALL, ids=lambda f: f.__name__)
def test_one_argument_at_a_time(
    machine: Machine, function: Callable[..., Any], residual: bool
) -> None:
    """After a good call, and after each other: every value of every argument."""
    base = good(function, machine)
    if residual:
        base["residual" if function in FORWARD else "dresidual_out"] = machine.array(SHAPE)
    parameters = function.__kwdefaults__ | dict.fromkeys(base)
    right = 0
    for name, values in variants(machine).items():
        if name not in parameters:
            continue
        for _ in range(2):
            for value in values:
                right += len(assert_as_the_first_time(machine, function, base)) == 3
                right += len(assert_as_the_first_time(machine, function, base | {name: value})) == 3
    assert right > 100
    assert len(_calls.calls) > 10


@settings(max_examples=300, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_any_sequence_of_calls(machine: Machine, data: st.DataObject) -> None:
    _calls.calls.clear()
    values = variants(machine)
    direction = data.draw(st.sampled_from([FORWARD, BACKWARD]))
    for _ in range(data.draw(st.integers(2, 6))):
        function = data.draw(st.sampled_from(direction))
        arguments = good(function, machine)
        names = sorted((function.__kwdefaults__ | dict.fromkeys(arguments)).keys() & values.keys())
        machine.current = data.draw(st.sampled_from([0, 0, 0, 1]))
        machine.alignment = data.draw(st.sampled_from([512, 512, 16]))
        for name in data.draw(st.lists(st.sampled_from(names), max_size=3, unique=True)):
            index = data.draw(st.integers(0, len(values[name]) - 1))
            arguments[name] = values[name][index]
        assert_as_the_first_time(machine, function, arguments)
        assert_as_the_first_time(machine, function, arguments)


@pytest.mark.parametrize("function", FORWARD, ids=lambda f: f.__name__)
def test_y_and_the_sum_are_not_written_to_one_array_later_either(
    machine: Machine, function: Callable[..., Any]
) -> None:
    """After a call with two outputs of the same shapes, and for every kind of rows."""
    base = good(function, machine) | {"residual": machine.array(SHAPE)}
    for one in (base["x"], base["residual"], machine.array(SHAPE), machine.array((0, *SHAPE[1:]))):
        arguments = {name: base[name] if one.size else one for name in ("x", "residual")}
        arguments = base | arguments | {"out": machine.array(one.shape), "residual_out": one}
        assert len(assert_as_the_first_time(machine, function, arguments)) == 3
        seen = assert_as_the_first_time(machine, function, arguments | {"out": one[:]})
        assert (seen[0] is ValueError) == (one.size > 0)


@pytest.mark.parametrize("function", ALL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("options", [{}, {"zero_centered": True}, {"axis": -1}], ids=str)
@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
def test_a_call_like_an_earlier_one_is_not_checked_again(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[..., Any],
    options: dict[str, Any],
    relu: bool,
) -> None:
    def relu_arguments() -> dict[str, Any]:
        if not relu:
            return {}
        if function in FORWARD:
            return {"relu": (0, 6.0)}
        return {"bitmask": machine.array((*SHAPE[:-1], 8), "uint8")}

    cases = [good(function, machine) | options | relu_arguments() for _ in range(2)]
    expected = outcome(machine, function, cases[0])
    for check in ("check_forward", "check_backward"):
        monkeypatch.setattr(cupynorm._checks, check, None)
    assert outcome(machine, function, cases[1]) == expected
    assert len(_calls.calls) == 1


@pytest.mark.parametrize("function", FORWARD, ids=lambda f: f.__name__)
def test_a_call_whose_kernel_stands_in_is_prepared_again(
    machine: Machine, function: Callable[..., Any]
) -> None:
    arguments = good(function, machine)
    machine.stands_in = True
    for count in (1, 2):
        function(**arguments)
        assert len(machine.launches) == count
        assert not _calls.calls
    machine.stands_in = False
    function(**arguments)
    assert len(_calls.calls) == 1


@pytest.mark.parametrize("functions", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_functions_do_not_share_calls(machine: Machine, functions: Any) -> None:
    arrays = {name: value for f in functions for name, value in good(f, machine).items()}
    for function in functions * 2:
        names = function.__kwdefaults__.keys() | set(good(function, machine))
        options = {"eps": 1e-5} if "eps" in names else {"bias": True}
        arguments = {name: arrays[name] for name in arrays.keys() & names} | options
        assert_as_the_first_time(machine, function, arguments)
    assert len(_calls.calls) == len(functions)


BOUNDS = [
    ((0, 6), (0.0, 6.0)),
    ((0.0, 6.0), (0.0, 6.0)),
    (None, (0.0, 0.0)),
    ((0, 7), (0.0, 7.0)),
    ((-0.0, 6.0), (0.0, 6.0)),
    ((-1, 0.1), (-1.0, float(np.float32(0.1)))),
    ((-1.0, 0), (-1.0, 0.0)),
    ((-1.0, -0.0), (-1.0, 0.0)),
    ((-1.0, -1e-60), (-1.0, 0.0)),
    ((0, 10**400), (0.0, float("inf"))),
]


@pytest.mark.parametrize("function", FORWARD, ids=lambda f: f.__name__)
def test_each_relu_has_its_bounds_and_bitmask(
    machine: Machine, function: Callable[..., Any]
) -> None:
    arguments = good(function, machine)
    for relu, bounds in BOUNDS * 3:
        result = function(**arguments, relu=relu)
        (spec, *_), given = machine.launches[-1]
        assert spec.relu == (relu is not None)
        assert repr(given[EPS + 1 :]) == repr(bounds)
        stored = spec.store_statistics and relu is not None
        assert (given[BITMASK] != 0) == stored
        if stored:
            assert result.bitmask.data.ptr == given[BITMASK]
            assert result.bitmask.shape == (*SHAPE[:-1], SHAPE[-1] // 8)
            assert result.bitmask.dtype == np.uint8
        elif spec.store_statistics:
            assert result.bitmask is None
    # (0, 6), (0.0, 6.0) and (-0.0, 6.0) are one call. So are (-1.0, 0) and (-1.0, -0.0).
    assert len(_calls.calls) == len(BOUNDS) - 3


def test_the_bitmask_of_a_row_that_no_byte_ends(machine: Machine) -> None:
    for _ in range(2):
        result = cupynorm.layer_norm_forward(machine.array((3, 5, 13)), axis=(1, 2), relu=(0, 1))
        assert result.bitmask.shape == (3, 9)
        result = cupynorm.layer_norm_forward(machine.array((3, 5, 13)), relu=(0, 1))
        assert result.bitmask.shape == (3, 5, 2)
    assert len(_calls.calls) == 2


@pytest.mark.parametrize("function", BACKWARD, ids=lambda f: f.__name__)
def test_each_backward_has_its_bitmask(machine: Machine, function: Callable[..., Any]) -> None:
    arguments = good(function, machine)
    masks = [machine.array((*SHAPE[:-1], 8), "uint8", offset=i) for i in range(3)]
    for bitmask in [*masks, None] * 2:
        function(**arguments, bitmask=bitmask)
        (spec, *_), given = machine.launches[-1]
        assert spec.bitmask == (bitmask is not None)
        assert given[BITMASK_OF_BACKWARD] == (0 if bitmask is None else bitmask.data.ptr)
    assert len(_calls.calls) == 2
    strided = machine.array((*SHAPE[:-1], 8), "uint8", strides=(64, 16, 1))
    for _ in range(2):
        function(**arguments, bitmask=strided)  # it is copied
        assert machine.launches[-1][1][BITMASK_OF_BACKWARD] not in (0, strided.data.ptr)
    assert len(_calls.calls) == 2
    on_another = machine.array((*SHAPE[:-1], 8), "uint8", device=1)
    with pytest.raises(ValueError, match="bitmask must be on x's device"):
        function(**arguments, bitmask=on_another)


@pytest.mark.parametrize("counted", [0, 16])
def test_rows_that_are_counted_have_scratch_of_their_own_each_time(
    machine: Machine, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(_calls, "keep_if_captured", lambda memory, _: kept.append(memory))
    machine.counted = counted
    for calls in (1, 2, 3):
        cupynorm.rms_norm(machine.array(SHAPE), relu=(0.0, 6.0))
        given = machine.launches[-1][1]
        bounds, more = given[EPS + 1 : EPS + 3], given[EPS + 3 :]
        assert bounds == (0.0, 6.0)
        if not counted:
            assert more == ()
            assert kept == []
            continue
        assert more == (kept[-1].ptr,)
        assert len({memory.ptr for memory in kept}) == calls == len(kept)
    assert len(_calls.calls) == 1


def test_another_device_is_served_by_a_call_of_its_own(machine: Machine) -> None:
    here, there = (
        {"x": machine.array(SHAPE, device=i), "weight": machine.array((64,), device=i)}
        for i in range(2)
    )
    for arguments, current in ((here, 0), (there, 0), (there, 1), (here, 1), (here, 0)) * 2:
        machine.current = current
        launches, _, results = assert_as_the_first_time(machine, cupynorm.rms_norm, arguments)
        device = arguments["x"].data.device_id
        assert launches[0][0][-1] == results[0][4] == device
        assert machine.current == current
    assert len(_calls.calls) == 2


def test_calls_are_bounded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_prepared, "MOST_CALLS", 10)
    for rows in range(1, 100):
        cupynorm.rms_norm(machine.array((rows, 8)))
        assert 1 <= len(_calls.calls) <= 10


def test_threads_share_calls(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_prepared, "MOST_CALLS", 3)  # calls are forgotten and made anew
    arrays = [machine.array((rows, 64)) for rows in range(1, 8)]
    start, wrong = threading.Barrier(4), []

    def call() -> None:
        start.wait()
        for turn in range(500):
            x = arrays[turn % 7]
            y, mean, rstd, *_ = cupynorm.layer_norm_forward(x)
            if not y.shape == x.shape or not mean.shape == rstd.shape == x.shape[:1]:
                wrong.append(turn)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(machine.launches) == 2000
    for (spec, m, n, vector, device), (stream, _, x, *_) in machine.launches:
        assert (spec.norm, n, vector, device, stream) == ("layer_norm", 64, 4, 0, STREAM)
        assert arrays[m - 1].data.ptr == x
