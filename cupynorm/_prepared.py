"""A call prepared once: the key that finds it again, and the code that repeats it.

That code is straight-line, and is generated for just the arrays that a call has. A loop over a
table would add 1 us to a call of 5 us. A `Dialect` is how a framework spells it.
"""

from __future__ import annotations

import builtins
import functools
import symtable
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from cupynorm._operation import ALWAYS_READ, KINDS, Kind, Pass

__all__ = ["Dialect", "key_function", "remember", "run_maker"]

# Each number of rows is a call of its own. A key and its call take some 4 kB, up to 7 for a
# backward pass.
MOST_CALLS = 4096


def remember(calls: dict[Any, Any], key: Hashable, call: Any) -> Any:
    """Keep a call for the next one with its key, and return it."""
    if len(calls) >= MOST_CALLS:
        calls.clear()
    calls[key] = call
    return call


@dataclass(frozen=True, eq=False)
class Dialect:
    """How a framework spells the steps of a call. {0} stands for the name of an array.

    The names used here are a module's, looked up at each call, or are known to the call.

    Attributes
    ----------
    names : dict
        The module's names.
    accepts : dict
        By kind, a condition. A call with an array that fails it has no key. Kinds may be missing.
    signature : dict
        By kind, the expression of what a call depends on in an array.
    device : str
        What the call depends on in x alone. Empty if the signature has that.
    before : str
        A statement that begins a call.
    copy : str
        A statement that makes an array contiguous.
    look : str
        A statement that names what `elsewhere` and `address` use.
    elsewhere : str
        The condition that an array is not where x is. Empty if the signature has that.
    address : str
        The address of an array.
    checked, checked_new : frozenset
        The kinds of given and of new arrays that may be less aligned than those of the first call.
    misaligned : str
        A statement for such arrays. {divisors} stands for a number whose lowest set bit is the most
        elements that one access may move there.
    allocate, allocate_like : str
        A new array, and one of the shape and dtype of the array {1}.
    stream, handle : str
        What orders a launch, named `stream`, and its form for the launch.
    scratch : str
        A statement that sets `scratch_address`, the address of scratch.
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
    allocate_like: str
    stream: str
    handle: str
    scratch: str


def key_function(
    dialect: Dialect, options: dict[str, str], arrays: tuple[str, ...]
) -> Callable[..., Hashable]:
    """Return the function from options and arrays, two tuples, to a call's key or None.

    `options` has a condition on each option. If one fails, the call has no key. For False equals 0,
    and one may be accepted and the other refused.
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
    like: tuple[tuple[str, str], ...] = (),
) -> Callable[[dict[str, Any]], Callable[..., Any]]:
    """Return the function that makes the `run` of a call from what the call knows.

    `run` takes a tuple of arrays, launches, and returns a result. Before the launch it may return
    what the dialect says instead. It knows its `launch`. It knows for each array `{0}_mask`, the
    bits of an address that are 0 if it is aligned, and for rows their `{0}_stride`. It also knows
    whatever else the dialect names.

    Parameters
    ----------
    The arrays that `run` takes, and those that are not None. It only looks at one that is not in
    the table.
        table it looks, and that is all.
    The arrays that are written. Those not given are allocated.
        The arrays that are written; those not given are allocated.
    An expression. {fields} stands for the arrays that the table writes, with None for those not
    written; {y}, say, stands for one of them.
    copied : tuple of str
        The arrays that are made contiguous.
    like : tuple of pairs of str
        New arrays, each with the given or earlier new array that it is allocated like.
    """
    new = [name for name in written if name not in given]
    body = [f"{', '.join(arguments)} = arrays"]
    body += [dialect.before] if dialect.before else []
    body += [dialect.copy.format(name) for name in copied]
    body += [dialect.look.format(name) for name in given if dialect.look]
    elsewhere = [dialect.elsewhere.format(name) for name in given if name != "x"]
    if dialect.elsewhere and elsewhere:
        body.append(f"if {' or '.join(elsewhere)}: return None")
    body += [f"{name}_address = {dialect.address.format(name)}" for name in given]

    def check(names: list[str]) -> None:
        bits = " | ".join(f"{name}_address & {name}_mask" for name in names)
        if bits:
            divisors = " | ".join(f"{name}_address // {name}_itemsize" for name in names)
            body.append(f"if {bits}: {dialect.misaligned.format(divisors=divisors)}")

    check([name for name in given if KINDS.get(name) in dialect.checked])
    others = dict(like)
    for name in new:
        if name in others:
            body.append(f"{name} = {dialect.allocate_like.format(name, others[name])}")
        else:
            body.append(f"{name} = {dialect.allocate.format(name)}")
        body += [dialect.look.format(name)] if dialect.look else []
        body.append(f"{name}_address = {dialect.address.format(name)}")
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
    """Return the name that code defines, given other names."""
    found: dict[str, Any] = {}
    exec(source, names, found)
    return found[name]
