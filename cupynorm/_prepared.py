"""A call worked out once: by what it is found again, and the code that makes it again.

That code is straight-line, written here for just the arrays that a call has: of a call of 5 us, a
loop over a table would take one more. How a framework spells it is its `Dialect`.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import symtable
from collections.abc import Callable, Hashable
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
        A statement that brings an array into a layout that kernels take.
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


@dataclass(frozen=True)
class Launches:
    """What the `run` of a call does, by the names of its arrays.

    Attributes
    ----------
    arguments, given : tuple of str
        What `run` takes, and the arrays that are there.
    numbers : tuple of str
        What it takes that are numbers. They become floats.
    copied : tuple of str
        The arrays that the dialect copies.
    apart : tuple of str
        Given arrays. Where two of them begin at one address, `run` returns None and launches
        nothing.
    checked, checked_new : tuple of str
        The given and the new arrays whose addresses have a mask.
    new : tuple of str
        The arrays that are allocated.
    made : tuple of str
        The new arrays that ``{0}_new`` makes.
    has_scratch : bool
    launches : tuple of (str, tuple of str)
        The functions, in turn, and what each is given: an array's name stands for its address, and
        any other expression for itself.
    summed : tuple of str
        The new arrays that ``{0}_sum`` makes smaller.
    result : str
        An expression.
    """

    arguments: tuple[str, ...]
    given: tuple[str, ...]
    new: tuple[str, ...]
    has_scratch: bool
    launches: tuple[tuple[str, tuple[str, ...]], ...]
    result: str
    numbers: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    checked_new: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    made: tuple[str, ...] = ()


@functools.cache
def launches_maker(
    dialect: Dialect, launches: Launches
) -> Callable[[dict[str, Any]], Callable[..., Any]]:
    """Return what makes the `run` of a call from what that knows.

    `run` takes a tuple of arrays, launches, and returns a result; it returns what the dialect says
    instead, before anything is launched. It knows what it launches and, of each array with a mask,
    the bits of an address that are 0 where it is aligned, `{0}_mask`; and whatever else the dialect
    and the launches name.
    """
    given, new = launches.given, launches.new
    body = [f"{', '.join(launches.arguments)} = arrays"]
    body += [dialect.before] if dialect.before else []
    body += [dialect.look.format(name) for name in given if dialect.look]
    elsewhere = [dialect.elsewhere.format(name) for name in given if name != "x"]
    if dialect.elsewhere and elsewhere:
        body.append(f"if {' or '.join(elsewhere)}: return None")
    for name in launches.copied:
        body.append(dialect.copy.format(name))
        body += [dialect.look.format(name)] if dialect.look else []
    body += [f"{name}_address = {dialect.address.format(name)}" for name in given]
    pairs = itertools.combinations(launches.apart, 2)
    same = [f"{a}_address == {b}_address" for a, b in pairs]
    body += [f"if {' or '.join(same)}: return None"] if same else []
    for name in launches.numbers:
        body += ["try:", f"    {name} = float({name})", "except OverflowError:", "    return None"]
    body += _check(dialect, launches.checked)
    for name in new:
        allocate = "{0}_new()" if name in launches.made else dialect.allocate
        body.append(f"{name} = {allocate.format(name)}")
        body += [dialect.look.format(name)] if dialect.look else []
        body.append(f"{name}_address = {dialect.address.format(name)}")
    body += _check(dialect, launches.checked_new)
    body.append(f"stream = {dialect.stream}")
    body += [dialect.scratch] if launches.has_scratch else []
    arrays = {*given, *new}
    for function, operands in launches.launches:
        places = (f"{name}_address" if name in arrays else name for name in operands)
        body.append(f"{function}({dialect.handle}, ({', '.join(places)},))")
    body += [f"{name} = {name}_sum({name})" for name in launches.summed]
    body.append(f"return {launches.result}")
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


def _check(dialect: Dialect, names: tuple[str, ...]) -> list[str]:
    """Return the line that checks addresses by their masks."""
    if not names:
        return []
    bits = " | ".join(f"{name}_address & {name}_mask" for name in names)
    divisors = " | ".join(f"{name}_address // {name}_itemsize" for name in names)
    return [f"if {bits}: {dialect.misaligned.format(divisors=divisors)}"]


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
    made: tuple[str, ...] = (),
    apart: tuple[str, ...] = (),
) -> Callable[[dict[str, Any]], Callable[..., Any]]:
    """Return what makes the `run` of a pass of a table, as `launches_maker` does.

    `run` knows its `launch` and, of rows, their `{0}_stride`.

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
    has_scratch, copied, made, apart
        As `Launches` has them.
    """
    new = tuple(name for name in written if name not in given)
    names = {*given, *new}
    known = names | {f"{name}_stride" for name in names}
    operands = [name if name in known else "0" for name in table.operands]
    if table.takes_scratch or has_scratch:
        operands.append("scratch_address" if has_scratch else "0")
    fields = {name: name if name in written else "None" for name in table.writes}
    launches = Launches(
        arguments=arguments,
        given=given,
        new=new,
        has_scratch=has_scratch,
        launches=(("launch", tuple(operands)),),
        result=result.format(fields=", ".join(fields.values()), **fields),
        copied=copied,
        made=made,
        apart=apart,
        checked=tuple(name for name in given if KINDS.get(name) in dialect.checked),
        checked_new=tuple(name for name in new if KINDS[name] in dialect.checked_new),
    )
    return launches_maker(dialect, launches)


def _defined(name: str, source: str, names: dict[str, Any]) -> Any:
    """Return what code defines by a name, among other names."""
    found: dict[str, Any] = {}
    exec(source, names, found)
    return found[name]
