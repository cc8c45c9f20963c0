"""A call worked out once: by what it is found again, and the code that makes it again.

That code is straight-line, written here for just the arrays that a call has: of a call of 5 us, a
loop over a table would take one more. How a framework spells it is its `Dialect`.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import symtable
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from cupynorm._operation import ALWAYS_READ, KINDS, Kind, Pass

__all__ = ["Dialect", "Launches", "key_function", "launches_maker", "remember", "run_maker"]

# Each number of rows is a call of its own. A key and its call take some 4 kB, of a backward pass up
# to 7.
MOST_CALLS = 4096


def remember(calls: dict[Any, Any], key: Hashable, call: Any) -> Any:
    """Keep a call for the next one that has its key, and return it."""
    if len(calls) >= MOST_CALLS:
        calls.clear()
    calls[key] = call
    return call


@dataclass(frozen=True, eq=False)
class Dialect:
    """How a framework spells what a call does; {0} stands for the name of an array.

    The names that this uses are a module's, looked up at each call, or what the call knows.

    Attributes
    ----------
    names : dict
        The module's.
    accepts : dict
        By kind, the condition on an array without which a call has no key; may lack kinds.
    signature : dict
        By kind, what of an array a call depends on.
    device : str
        What else a call depends on, of x alone; empty where the signature tells.
    before : str
        A statement that begins a call.
    copy : str
        A statement that makes an array contiguous.
    look : str
        A statement that names what the next two are told by.
    elsewhere : str
        The condition that an array is not where x is; empty where the signature tells.
    address : str
        The address of an array.
    checked, checked_new : frozenset
        The kinds of given and of new arrays that may be less aligned than those of the first call.
    misaligned : str
        A statement for arrays that are. {divisors} stands for a number whose lowest set bit is
        the most elements of an access for which they are aligned.
    allocate : str
        A new array.
    stream, handle : str
        What a launch is ordered by, named `stream`, and what it takes for that.
    scratch : str
        A statement that names the address of scratch, `scratch_address`.
    """

    names: dict[str, Any]
    accepts: dict[Kind | None, str]
    signature: dict[Kind | None, str]
    device: str
    before: str
    copy: str
    look: str
    elsewhere: str
    address: str
    checked: frozenset[Kind | None]
    checked_new: frozenset[Kind]
    misaligned: str
    allocate: str
    stream: str
    handle: str
    scratch: str


def key_function(
    dialect: Dialect, options: dict[str, str], arrays: tuple[str, ...]
) -> Callable[..., Hashable]:
    """Return what makes the key, or None, of a call: of its options and its arrays, two tuples.

    `options` has the condition on each without which a call has no key: a value may equal another
    one that is accepted, and yet be refused, as False equals 0.
    """
    conditions = [condition for condition in options.values() if condition]
    lines = ["def key(options, arrays):", f"    {', '.join(arrays)} = arrays"]
    if conditions:
        lines.append(f"    {', '.join(options)} = options")
    signatures = [dialect.device] if dialect.device else []
    for name in arrays:
        kind = KINDS.get(name)
        condition = dialect.accepts.get(kind, "").format(name)
        signature = dialect.signature[kind].format(name)
        if name not in ALWAYS_READ:
            condition = condition and f"({name} is None or {condition})"
            signature = f"None if {name} is None else {signature}"
        conditions += [condition] if condition else []
        signatures.append(signature)
    if conditions:
        lines += [f"    if not ({' and '.join(conditions)}):", "        return None"]
    lines.append(f"    return options, {', '.join(signatures)}")
    return _defined("key", "\n".join(lines), dialect.names)  # type: ignore[no-any-return]


@functools.cache
def run_maker(
    dialect: Dialect,
    table: Pass,
    arguments: tuple[str, ...],
    given: tuple[str, ...],
    written: tuple[str, ...],
    result: str,
    *,
    has_scratch: bool,
    copied: tuple[str, ...] = (),
    apart: tuple[str, ...] = (),
) -> Callable[[dict[str, Any]], Callable[..., Any]]:
    """Return what makes the `run` of a call from what that knows.

    `run` takes a tuple of arrays, launches, and returns a result; it returns what the dialect says
    instead, before anything is launched. It knows its `launch` and, of each array, the bits of an
    address that are 0 where it is aligned, `{0}_mask`; of rows, their `{0}_stride`; and whatever
    else the dialect names.

    Parameters
    ----------
    arguments, given : tuple of str
        The arrays that `run` takes, and those of them that are not None. At one that is not in the
        table it looks, and that is all.
    written : tuple of str
        The arrays that are written; those not given are allocated.
    result : str
        An expression, with {fields} for the arrays that the table writes, None for one that is not,
        and {y}, say, for one by itself.
    copied : tuple of str
        The arrays that are made contiguous.
    apart : tuple of str
        Given arrays. Where two of them begin at one address, `run` returns None and launches
        nothing.
    """
    new = [name for name in written if name not in given]
    body = _beginning(dialect, arguments, given, dict.fromkeys(copied, dialect.copy))
    same = [f"{a}_address == {b}_address" for a, b in itertools.combinations(apart, 2)]
    if same:
        body.append(f"if {' or '.join(same)}: return None")

    def check(names: list[str]) -> None:
        bits = " | ".join(f"{name}_address & {name}_mask" for name in names)
        if bits:
            divisors = " | ".join(f"{name}_address // {name}_itemsize" for name in names)
            body.append(f"if {bits}: {dialect.misaligned.format(divisors=divisors)}")

    check([name for name in given if KINDS.get(name) in dialect.checked])
    body += _allocations(dialect, new)
    check([name for name in new if KINDS[name] in dialect.checked_new])
    body.append(f"stream = {dialect.stream}")
    names = {*given, *new}
    strides = {f"{name}_stride" for name in names}
    operands = [
        f"{operand}_address" if operand in names else operand if operand in strides else "0"
        for operand in table.operands
    ]
    if has_scratch:
        body.append(dialect.scratch)
        operands.append("scratch_address")
    elif table.takes_scratch:
        operands.append("0")
    fields = {name: name if name in written else "None" for name in table.writes}
    body.append(f"launch({dialect.handle}, ({', '.join(operands)}))")
    body.append(f"return {result.format(fields=', '.join(fields.values()), **fields)}")
    return _maker(dialect, body)


@dataclass(frozen=True)
class Launches:
    """What the `run` of a call of a norm of `cupynorm.fuse` does, by the names of its arrays.

    Attributes
    ----------
    arguments, numbers, given : tuple of str
        What `run` takes; those that are numbers; and the arrays that are there.
    copied : tuple of str
        The arrays that ``{0}_copy`` brings into a layout that kernels take.
    checked : tuple of str
        The arrays whose addresses have a mask.
    new : tuple of str
        The arrays that are allocated.
    operands : tuple of str
        Those of the first launch: an array's name stands for its address, and a number's for
        itself. Others are known.
    sums : int
        How many launches sum partials, which are scratch.
    targets : tuple of str
        The arrays that these write, two each.
    summed : tuple of str
        The new arrays that ``{0}_sum`` makes smaller.
    result : str
        An expression.
    """

    arguments: tuple[str, ...]
    numbers: tuple[str, ...]
    given: tuple[str, ...]
    copied: tuple[str, ...]
    checked: tuple[str, ...]
    new: tuple[str, ...]
    operands: tuple[str, ...]
    sums: int
    targets: tuple[str, ...]
    summed: tuple[str, ...]
    result: str


@functools.cache
def launches_maker(
    dialect: Dialect, launches: Launches
) -> Callable[[dict[str, Any]], Callable[..., Any]]:
    """Return what makes the `run` of a call of a norm of `cupynorm.fuse`, as `run_maker` does."""
    copies = dict.fromkeys(launches.copied, "{0} = {0}_copy({0})")
    body = _beginning(dialect, launches.arguments, launches.given, copies)
    for name in launches.numbers:
        body += ["try:", f"    {name} = float({name})", "except OverflowError:", "    return None"]
    if launches.checked:
        bits = " | ".join(f"{name}_address & {name}_mask" for name in launches.checked)
        body.append(f"if {bits}: return None")
    body += _allocations(dialect, launches.new)
    body.append(f"stream = {dialect.stream}")
    body += [dialect.scratch] if launches.sums else []
    arrays = {*launches.given, *launches.new}

    def launch(function: str, operands: tuple[str, ...]) -> str:
        places = (f"{name}_address" if name in arrays else name for name in operands)
        return f"{function}({dialect.handle}, ({', '.join(places)},))"

    body.append(launch("launch", launches.operands))
    for i in range(launches.sums):
        targets = (*launches.targets, "0")[2 * i : 2 * i + 2]
        body.append(launch(f"launch_{i}", (f"scratch_address + before_{i}", *targets)))
    body += [f"{name} = {name}_sum({name})" for name in launches.summed]
    body.append(f"return {launches.result}")
    return _maker(dialect, body)


def _beginning(
    dialect: Dialect, arguments: tuple[str, ...], given: tuple[str, ...], copies: dict[str, str]
) -> list[str]:
    """Return the lines that find the addresses of what a call is given.

    `copies`: statements that bring arrays into a layout that kernels take.
    """
    body = [f"{', '.join(arguments)} = arrays"]
    body += [dialect.before] if dialect.before else []
    body += [dialect.look.format(name) for name in given if dialect.look]
    elsewhere = [dialect.elsewhere.format(name) for name in given if name != "x"]
    if dialect.elsewhere and elsewhere:
        body.append(f"if {' or '.join(elsewhere)}: return None")
    for name, copy in copies.items():
        body.append(copy.format(name))
        body += [dialect.look.format(name)] if dialect.look else []
    return body + [f"{name}_address = {dialect.address.format(name)}" for name in given]


def _allocations(dialect: Dialect, new: Iterable[str]) -> list[str]:
    """Return the lines that allocate arrays, and find their addresses."""
    body = []
    for name in new:
        body.append(f"{name} = {dialect.allocate.format(name)}")
        body += [dialect.look.format(name)] if dialect.look else []
        body.append(f"{name}_address = {dialect.address.format(name)}")
    return body


def _maker(dialect: Dialect, body: list[str]) -> Callable[[dict[str, Any]], Callable[..., Any]]:
    """Return what defines `run` with this body from what that knows."""
    run = "\n    ".join(("def run(arrays):", *body))
    code: Any = symtable.symtable(run, "run", "exec").get_children()[0]
    elsewhere_known = dialect.names | vars(builtins)
    known = sorted(set(code.get_globals()) - elsewhere_known.keys())
    lines = [
        "def make(known):",
        *(f"    {name} = known[{name!r}]" for name in known),
        *(f"    {line}" for line in run.split("\n")),
        "    return run",
    ]
    return _defined("make", "\n".join(lines), dialect.names)  # type: ignore[no-any-return]


def _defined(name: str, source: str, names: dict[str, Any]) -> Any:
    """Return what code defines by a name, among other names."""
    found: dict[str, Any] = {}
    exec(source, names, found)
    return found[name]
