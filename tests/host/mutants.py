"""Mutants of `kernels/`: small changes in one place each, made from the text by operators.

Many of them are compiled into the same kernels, each behind a question to host/runtime.cpp. So a
case is compiled once, and run with one mutant after another. The question is asked only where the
mutant would act differently. One run of a case thus tells which mutants it may catch. Whatever the
compiler evaluates (constants, template arguments, `if constexpr`) stays as it is.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from cupynorm._compile import kernels_directory

__all__ = ["NO_EFFECT", "Mutant", "all_mutants", "instrumented"]

HERE = Path(__file__).resolve().parent

# A change to a line that has one of these has no effect that the host could see.
NO_EFFECT = (
    ("make_opaque", "hides a value from the compiler, and leaves it as it is"),
    ("forget_", "has the compiler forget what it knows"),
    ("prefetch", "a hint; that it stays in bounds is for mutations made by hand"),
    ("BlocksAhead", "chooses a hint"),
    ("olicy", "says how long a cache is to keep a line"),
    ("is_large", "chooses a policy or a hint"),
    ("let_next_kernel_start", "kernels run one after another here"),
    ("wait_for_previous_kernel", "kernels run one after another here"),
    ("show_mailboxes", "orders kinds of accesses that are one kind here"),
    ("always", "a branch that is always taken"),
)


@dataclasses.dataclass(frozen=True)
class Mutant:
    file: str
    operator: str
    function: str
    line: str
    occurrence: int  # the place among mutants that are otherwise the same

    def __str__(self) -> str:
        nth = f" #{self.occurrence}" if self.occurrence else ""
        return f"{self.file}, {self.function}: {self.operator}{nth} in `{self.line}`"


@dataclasses.dataclass(frozen=True)
class Change:
    """A mutant's change: text around a stretch of the source, whose first characters may go."""

    operator: str
    at: int  # where it is shown
    begin: int
    end: int
    opening: str  # with # for the mutant's number
    closing: str = ""
    removed: int = 0


TOKEN = re.compile(
    r"\w+|::|->|<<=|>>=|<<|>>|[-+*/%&|^=!<>]=|&&|\|\||\+\+|--|\S",
)
ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
# Tokens of lower precedence than a choice's condition, and tokens that begin an expression.
OUTSIDE = {",", ";", "?", ":", "{", "}", "return", *ASSIGNMENTS}

# Code that is evaluated when a kernel is compiled, or that declares.
CONSTANT = re.compile(r"\bif constexpr \(|\bstatic_assert\(|\b__launch_bounds__\(|\balignas\(")
CONSTANT_STATEMENT = re.compile(r"\bconstexpr [^;(){}]*?=|\busing \w+ =")
DECLARATION = re.compile(
    r"(?:const|static|static_assert|constexpr|struct|using|template|typename|public|private|extern|enum|class"
    r"|namespace|__\w+|unsigned|long|friend|case|default|do|switch|return \S.*)\b"
    r"|[\w:]+(?:<[^;=]*>)?(?:::\w+)*[\s*&]+(?:const\s+)?\w+\s*[=;(\[{,]"
)


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def _closing(text: str, opening: int) -> int:
    """Return where the bracket that opens there is closed."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if not depth:
            return i
    raise ValueError("a bracket stays open")


def _masked(text: str) -> str:
    """Blank out comments, and code that is evaluated when a kernel is compiled."""
    text = re.sub(r'//[^\n]*|"[^"\n]*"|^#[^\n]*', lambda m: _blank(m[0]), text, flags=re.MULTILINE)
    stretches = [(m.end(), _closing(text, m.end() - 1)) for m in CONSTANT.finditer(text)]
    stretches += [(m.end(), text.index(";", m.end())) for m in CONSTANT_STATEMENT.finditer(text)]
    for found in re.finditer(r"\btemplate <", text):
        depth, end = 1, found.end()
        while depth:
            depth += (text[end] == "<") - (text[end] == ">" and text[end - 1] != "-")
            end += 1
        stretches.append((found.start(), end))
    for begin, end in stretches:
        text = text[:begin] + _blank(text[begin:end]) + text[end:]
    return text


class Source:
    """A file's tokens, and the brackets around them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.plain = _masked(text)
        self.tokens: list[str] = []
        self.begins: list[int] = []
        for found in TOKEN.finditer(self.plain):
            # A template's bracket has no space before it. An operator has one.
            token, spaced = found[0], self.plain[found.start() - 1] in " \n"
            if token in ("<", ">", ">>") and not spaced:
                for i, c in enumerate(token):
                    self.tokens.append(f"template{c}")
                    self.begins.append(found.start() + i)
            else:
                self.tokens.append(token)
                self.begins.append(found.start())
        opening = {")": "(", "]": "[", "}": "{", "template>": "template<"}
        self.inside: list[int] = []  # for each token, the bracket around it, or -1
        self.partner: dict[int, int] = {}
        stack = [-1]
        for i, token in enumerate(self.tokens):
            if token in opening:
                assert self.tokens[stack[-1]] == opening[token], text[self.begins[i] - 99 :][:99]
                self.partner[i] = stack[-1]
                self.partner[stack.pop()] = i
            self.inside.append(stack[-1])
            if token in opening.values():
                stack.append(i)

    def end(self, token: int) -> int:
        """Return where a token ends."""
        return self.begins[token] + len(self.tokens[token].removeprefix("template"))

    def operand(self, operator: int, step: int, ends: set[str]) -> int:
        """Return the first or the last token of one operand of an operator."""
        i = operator + step
        while self.inside[i] == self.inside[operator] and self.tokens[i] not in ends:
            following = self.partner.get(i, i) + step
            if self.inside[following] != self.inside[operator]:
                return following - step
            i = following
        return i - step

    @cached_property
    def functions(self) -> list[str]:
        """Return the names of the functions around each token."""
        names: dict[int, str] = {-1: ""}
        found = []
        for i, token in enumerate(self.tokens):
            if token == "{":
                outer = names[self._brace(i)]
                own = self._name(i)
                names[i] = f"{outer}::{own}" if outer and own else outer or own
            found.append(names[self._brace(i)])
        return found

    def _brace(self, token: int) -> int:
        i = self.inside[token]
        while i >= 0 and self.tokens[i] != "{":
            i = self.inside[i]
        return i

    def _before(self, brace: int) -> list[str]:
        """Return the tokens before a brace, from the end of the previous statement."""
        first = brace
        while first and self.tokens[first - 1] not in (";", "{", "}", "(", "[", "template<"):
            first -= 1
            if self.tokens[first] in (")", "]", "template>"):
                first = self.partner[first]
        while first < brace and self.tokens[first] in ("public", "private", ":"):
            first += 1
        return self.tokens[first:brace]

    def is_struct(self, brace: int) -> bool:
        return brace < 0 or self._before(brace)[:1] in (["struct"], ["namespace"])

    def _name(self, brace: int) -> str:
        """Return the name of the struct, function or lambda that a brace opens, or nothing."""
        before = self._before(brace)
        if before and before[0] in ("struct", "namespace"):
            return next(token for token in before[1:] if token not in ("alignas", "(", ")"))
        text = " ".join(before)
        if match := re.search(r"(?:(\w+) = )?\[ &? \]", text):
            return match[1] or ""
        if match := re.search(r"(\w+) \( const __grid", text):
            return match[1]
        if not before or before[0] in ("if", "for", "while", "else", "return") or "=" in before:
            return ""
        match = re.search(r"(\w+) \(", text)
        return match[1] if match else ""


# The mutants of each operator (see mutants.hpp).
INFIX = {
    **dict.fromkeys(("<", "<=", ">", ">="), ("the bound itself",)),
    **dict.fromkeys(("==", "!="), ("comparison turned",)),
    "+": ("term dropped", "- for +"),
    "-": ("term dropped", "+ for -"),
    **dict.fromkeys(("*", "/", "%", "<<", ">>"), ("factor dropped",)),
    **dict.fromkeys(("&", "|", "^"), ("bits dropped",)),
}


SIGNS = {*INFIX, "&&", "||"}


def _infixes(source: Source) -> Iterator[Change]:
    for i, token in enumerate(source.tokens):
        begin, end = source.begins[i], source.end(i)
        # An operator of two operands has a space on either side.
        if token in INFIX and source.plain[begin - 1].isspace() and source.plain[end].isspace():
            first, last = (source.operand(i, step, OUTSIDE | SIGNS) for step in (-1, 1))
            if _is_constant(source.tokens[first : last + 1]):
                continue
            for k, operator in enumerate(INFIX[token]):
                which = ("#, -1", "-1, #")[k]
                yield Change(operator, begin, begin, begin, f"{token} mutants::Infix<{which}>() ")


def _connectives(source: Source) -> Iterator[Change]:
    for i, token in enumerate(source.tokens):
        if token in ("&&", "||"):
            ends = OUTSIDE | ({"&&", "||"} if token == "&&" else {"||"})
            left, right = (source.operand(i, step, ends) for step in (-1, 1))
            told = "|| mutants::is(#)" if token == "&&" else "&& !mutants::is(#)"
            at = source.begins[i]
            # (left) || is(#), and is(#) || (right): a side that is always true
            if not _is_constant(source.tokens[left:i]):
                yield Change(
                    f"left of {token} dropped",
                    *(at, source.begins[left], source.end(i - 1)),
                    *("((", f") {told})"),
                )
            asked = "(mutants::is(#) || (" if token == "&&" else "(!mutants::is(#) && ("
            if not _is_constant(source.tokens[i + 1 : right + 1]):
                yield Change(
                    f"right of {token} dropped",
                    *(at, source.begins[i + 1], source.end(right)),
                    *(asked, "))"),
                )


def _conditions(source: Source) -> Iterator[Change]:
    for i, token in enumerate(source.tokens):
        if token == "?":
            first = source.operand(i, -1, OUTSIDE)
            stretch = source.begins[i], source.begins[first], source.end(i - 1)
            if not _is_constant(source.tokens[first:i]):
                yield Change("choice turned", *stretch, "mutants::turned<#>(", ")")
        if token == "if" and source.tokens[i + 1] == "(":
            stretch = source.begins[i], source.end(i + 1), source.begins[source.partner[i + 1]]
            for what in ("always", "never"):
                yield Change(f"{what} so", *stretch, f"mutants::{what}<#>(", ")")


def _statements(source: Source) -> Iterator[Change]:
    for i in range(1, len(source.tokens)):
        if source.tokens[i - 1] not in (";", "{", "}") or source._brace(i) != source.inside[i]:
            continue
        first, optional = i, False
        while source.tokens[first] in ("for", "while", "if", "else"):
            first += 1
            if source.tokens[first] == "constexpr":
                first += 1
            elif source.tokens[first - 1] == "if":
                optional = True  # as if it were never so
            if source.tokens[first] == "(":
                first = source.partner[first] + 1
        last = first
        while last < len(source.tokens) and source.tokens[last] not in (";", "}", ")", "]"):
            last = source.partner.get(last, last) + 1
        if last >= len(source.tokens):
            continue
        statement = source.plain[source.begins[first] : source.end(last)]
        if (
            optional
            or not re.match(r"\w|\*|\+\+|--", source.tokens[first])
            or source.tokens[last] != ";"
            or source.is_struct(source.inside[i])
            or not source.functions[i]
            or DECLARATION.match(statement.replace("template ", ""))
            or "= default" in statement
            or not re.search(r"[=(]|\+\+|--|return|break", statement)
        ):
            continue
        begin = source.begins[first]
        yield Change(
            "statement dropped",
            *(begin, begin, source.end(last)),
            *("{ if (!mutants::is(#)) ", " }"),
        )


CALLS = {
    "larger": ("smaller", "smaller, not larger"),
    "fused_multiply_add": ("product", "term dropped"),
    "absolute": ("itself", "sign kept"),
    "shuffle_xor": ("itself", "lanes do not exchange"),
    "from_first_lane": ("itself", "lanes do not exchange"),
    "from_lane_before": ("itself", "lanes do not exchange"),
    "any_in_warp": ("itself", "lanes do not exchange"),
    "square_root": ("itself", "no root"),
}


def _calls(source: Source) -> Iterator[Change]:
    for i, token in enumerate(source.tokens):
        if token in CALLS and source.tokens[i + 1] == "(" and source.functions[i] != token:
            if re.match(r"\w|>", source.tokens[i - 1]) and source.tokens[i - 1] != "return":
                continue  # its own definition
            instead, operator = CALLS[token]
            begin, end = source.begins[i], source.begins[source.partner[i + 1]]
            call = f"[](auto... all) {{ return {token}(all...); }}"
            opening = f"mutants::{instead}<#>({call}, "
            yield Change(operator, begin, begin, end, opening, removed=len(token) + 1)


def _signs(source: Source) -> Iterator[Change]:
    for i, token in enumerate(source.tokens):
        if token == "-" and source.tokens[i - 1] in OUTSIDE | {"("}:
            at = source.begins[i + 1]
            yield Change("sign dropped", at, at, at, "mutants::Sign<#>() * ")


# Names of constants, and what combines them. The compiler evaluates code without other tokens.
CONSTANT_TOKEN = re.compile(r"k?[A-Z]\w*|\d\w*|sizeof|static_cast|int|template[<>]|\W+")


def _is_constant(tokens: list[str]) -> bool:
    return all(CONSTANT_TOKEN.fullmatch(token) for token in tokens)


OPERATORS = (_infixes, _connectives, _conditions, _statements, _calls, _signs)


def _of_file(file: str) -> list[tuple[Mutant, Change]]:
    text = (kernels_directory() / file).read_text(encoding="utf-8")
    source = Source(text)
    found, seen = [], Counter()
    changes = [change for operator in OPERATORS for change in operator(source)]
    places = {begin: i for i, begin in enumerate(source.begins)}
    for change in sorted(changes, key=lambda change: change.at):
        line = text[text.rfind("\n", 0, change.at) + 1 : text.index("\n", change.at)]
        line = line.partition("  //")[0].strip()
        function = source.functions[places[change.at]]
        if function and not any(name in line + function for name, _ in NO_EFFECT):
            key = change.operator, function, line
            found.append((Mutant(file, *key, seen[key]), change))
            seen[key] += 1
    return found


def _all() -> Iterator[tuple[Mutant, Change]]:
    for path in sorted(kernels_directory().glob("*.cu*")):
        if path.name != "device.cuh":  # device.cuh has a twin here
            yield from _of_file(path.name)


def all_mutants() -> list[Mutant]:
    return [mutant for mutant, _ in _all()]


def instrumented(chosen: Sequence[Mutant]) -> dict[str, str]:
    """Return the texts of files that contain mutants. `chosen` gives the numbers."""
    numbers = {mutant: number for number, mutant in enumerate(chosen)}
    changes: dict[str, list[tuple[int, Change]]] = {}
    for mutant, change in _all():
        if mutant in numbers:
            changes.setdefault(mutant.file, []).append((numbers[mutant], change))
    texts = {
        "device.cuh": "".join(
            (HERE / name).read_text(encoding="utf-8") for name in ("device.cuh", "mutants.hpp")
        )
    }
    for file, of_file in changes.items():
        text = (kernels_directory() / file).read_text(encoding="utf-8")
        insertions = []
        for number, change in of_file:
            length = change.end - change.begin
            opening, closing = (
                part.replace("#", str(number)) for part in (change.opening, change.closing)
            )
            # Insertions that begin in a place: the longest first, and insertions between tokens
            # before all others. Insertions that end there: the shortest first.
            rank = (1, -length or -len(text), number)
            insertions.append((change.begin, rank, opening, change.removed))
            if closing:
                insertions.append((change.end, (0, length, -number), closing, 0))
        parts, last = [], 0
        for position, _, inserted, removed in _merged(sorted(insertions)):
            parts += [text[last:position], inserted]
            last = max(last, position + removed)
        texts[file] = "".join((*parts, text[last:]))
    return texts


def _merged(insertions: list[tuple[int, Any, str, int]]) -> list[tuple[int, Any, str, int]]:
    """Give one insertion to an operator that has two mutants."""
    merged: list[tuple[int, Any, str, int]] = []
    for insertion in insertions:
        if merged and "Infix" in insertion[2] and merged[-1][0] == insertion[0]:
            first, second = merged.pop()[2], insertion[2]
            both = [re.search(r"<(.*)>", text)[1].split(", ") for text in (first, second)]
            numbers = ", ".join(max(pair, key=int) for pair in zip(*both, strict=True))
            insertion = (*insertion[:2], re.sub(r"<.*>", f"<{numbers}>", second), 0)
        merged.append(insertion)
    return merged
