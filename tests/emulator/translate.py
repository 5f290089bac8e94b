"""A kernel's PTX as C: a function for each basic block, which works on all lanes in `m` at once.

As much of PTX as this package's kernels need. Registers are W->w (32 bits), W->q (64) and W->p
(predicates, a bit a lane); what the functions call is in warp.c. An instruction that is not known
is a KeyError or a failed assertion.
"""

from __future__ import annotations

import re
from itertools import pairwise

from tests.emulator.ptx import Instruction, read_kernel

LONG = ("b64", "u64", "s64", "f64")
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
SILENT = ("fence", "setmaxnreg", "griddepcontrol", "prefetch", "membar")
TO_ALL = ("shfl", "vote", "mma", "ldmatrix", "redux", "match", "elect")
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
ROUND = {"rzi": "trunc", "rni": "rint", "rmi": "floor", "rpi": "ceil"}
INTEGER = {
    "add": "a + b", "sub": "a - b", "mul": "a * b", "mad": "a * b + c", "and": "a & b",
    "or": "a | b", "xor": "a ^ b", "not": "~a", "neg": "-a", "div": "a / b", "rem": "a % b",
    "min": "a < b ? a : b", "max": "a > b ? a : b", "brev": "reversed(a)",
    "clz": "a ? __builtin_clz(a) : 32", "popc": "__builtin_popcount(a)", "abs": "a < 0 ? -a : a",
}  # fmt: skip
FLOAT = {
    "add": "a + b", "sub": "a - b", "mul": "a * b", "fma": "fma{f}(a, b, c)", "neg": "-a",
    "max": "fmax{f}(a, b)", "min": "fmin{f}(a, b)", "ex2": "exp2{f}(a)", "lg2": "log2{f}(a)",
    "rcp": "1 / a", "rsqrt": "1 / sqrt{f}(a)", "sqrt": "sqrt{f}(a)", "div": "a / b",
    "abs": "fabs{f}(a)",
}  # fmt: skip
ATOMIC = {
    "add": "a + b", "min": "a < b ? a : b", "max": "a > b ? a : b", "or": "a | b", "and": "a & b",
    "exch": "b",
}  # fmt: skip
REDUCED_FROM = {"add": "0", "or": "0", "and": "~0", "min": "o_[0]", "max": "o_[0]"}
LOGIC = {"and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}"}
SPECIAL = {
    "%tid.x": "(W->first_thread + l)", "%ctaid.x": "C->cta", "%ntid.x": "C->threads",
    "%globaltimer": "clock", "%clock64": "clock",
}  # fmt: skip


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.strip("{}").split(",")]


def _c_type(kind: str) -> str:
    return kind.replace("b", "u")


class Registers:
    """Places for registers in the order in which they turn up."""

    def __init__(self) -> None:
        self.places: dict[str, dict[str, int]] = {"w": {}, "q": {}, "p": {}}

    def file(self, name: str) -> str:
        if name.startswith("%"):
            return "q" if name[1:3] in ("rd", "fd") else "p" if name.startswith("%p") else "w"
        kind = name.rsplit("_", 1)[-1]
        return "p" if kind == "pred" else "q" if kind in LONG else "w"

    def __call__(self, name: str) -> str:
        """Of the lane l; of a predicate the bits of all lanes."""
        file = self.file(name)
        place = self.places[file].setdefault(name, len(self.places[file]))
        return f"W->p[{place}]" if file == "p" else f"W->{file}[{place}][l]"


class Translator:
    """`header` and `functions` after `translate()`."""

    def __init__(self, ptx: str) -> None:
        self.instructions, self.labels = read_kernel(ptx)
        self.registers = Registers()
        self.block_of: dict[int, int] = {}

    def translate(self) -> tuple[str, list[str], list[bool]]:
        """(kernel.h, a function for each block, which of them speak to all lanes)."""
        first = self._first_of_blocks()
        self.block_of = {at: block for block, at in enumerate(first)}
        functions, to_all = [], []
        for block, (at, end) in enumerate(pairwise(first)):
            lines = [self._line(n, self.instructions[n], block) for n in range(at, end)]
            body = "\n".join((*lines, f"go(W, m, {block + 1}); return WENT_ON;"))
            functions.append(f"int block{block}(Warp *W, Cta *C, u32 m) {{\n{body}\n}}")
            some = self.instructions[at:end]
            to_all.append(any(i.op[0] in TO_ALL or i.op[:2] == ("bar", "warp") for i in some))
        sizes = zip(("WORDS", "QUADS", "PREDICATES"), self.registers.places.values(), strict=True)
        counts = [f"#define {name} {len(places) + 1}" for name, places in sizes]
        return "\n".join((*counts, f"#define END {len(functions)}", "")), functions, to_all

    def _first_of_blocks(self) -> list[int]:
        found = {0, len(self.instructions), *self.labels.values()}
        for n, i in enumerate(self.instructions):
            if i.op[0] in ("bra", "ret", "exit", "trap", "nanosleep"):
                found.add(n + 1)
            if i.op[0] in ("bar", "barrier"):
                found |= {n, n + 1}
        return sorted(found)

    # -- operands
    def value(self, text: str, kind: str = "") -> str:
        """A source, as the C type of a PTX type."""
        if text in SPECIAL:
            found = SPECIAL[text]
        elif text.startswith("__dynamic_shmem"):
            found = "0u"
        elif text.startswith(("0f", "0d")):
            found = f"0x{text[2:]}{'u' if text[1] == 'f' else 'ull'}"
        elif re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", text):
            found = f"bits_of({text}f)"
        elif re.fullmatch(r"-?(0x)?[0-9a-fA-F]+U?", text):
            found = f"((u64){text.rstrip('U')}LL)"
        else:
            found = self.registers(text)
        if kind in ("f32", "f64"):
            return f"number{'' if kind == 'f32' else '64'}({found})"
        return f"({_c_type(kind)})({found})" if kind else found

    def address(self, operand: str) -> str:
        match = re.fullmatch(r"\[\s*([^+\]\s]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        assert match is not None, operand
        return f"((u64)({self.value(match[1])}) + ({match[2] or 0}LL))"

    def shared(self, operand: str) -> str:
        return f"(C->shared + (u32){self.address(operand)})"

    def lanes(self, i: Instruction) -> str:
        """Of those in `m` the ones for which the guard holds."""
        if not i.guard:
            return "m"
        return f"(m & {'~' if i.unless else ''}{self.registers(i.guard)})"

    def each(self, i: Instruction, statement: str) -> str:
        return f"EACH({self.lanes(i)}) {{ {statement} }}"

    def set_predicate(self, i: Instruction, to: str, value: str) -> str:
        to = self.registers(to)
        return f"u32 e = {self.lanes(i)}; {to} = ({to} & ~e) | (({value}) & e);"

    # -- instructions
    def _line(self, n: int, i: Instruction, block: int) -> str:
        base = i.op[0]
        if base == "bra":
            to, lanes = self.block_of[self.labels[i.operands[-1]]], self.lanes(i)
            return f"{{ u32 t = {lanes}; go(W, m, {block + 1}); go(W, t, {to}); return WENT_ON; }}"
        if base in ("ret", "exit"):
            lanes = self.lanes(i)
            return f"{{ u32 t = {lanes}; go(W, m, {block + 1}); go(W, t, END); return WENT_ON; }}"
        if base == "trap":
            return f'if ({self.lanes(i)}) FAIL(TRAPPED, "trap at {n}, CTA %u\\n", C->cta);'
        if base == "nanosleep":
            return f"if ({self.lanes(i)}) {{ go(W, m, {block + 1}); return NAPPED; }}"
        if base in SILENT:
            return ";"
        special = getattr(self, f"_{base}", None)
        return "{ " + (special(n, i) if special else self._arithmetic(i)) + " }"

    def _bar(self, n: int, i: Instruction) -> str:
        if i.op[1] == "warp":
            return ";"
        identity, *count = (self.value(text, "u32") for text in i.operands)
        threads, waits = count[0] if count else "C->threads", int(i.op[1] != "arrive")
        return (
            f"if (m != ALL) return APART; int l = 0;"
            f" int s = named_barrier(W, C, {identity}, {threads}, {waits}); if (s) return s;"
        )

    _barrier = _bar

    def _elect(self, n: int, i: Instruction) -> str:
        return self.set_predicate(i, i.operands[0].split("|")[1], "m & -m")

    def _memory(self, n: int, i: Instruction, names: list[str], place: str) -> tuple[str, str, int]:
        """(code that checks an address, what an element is read and written through, its size)."""
        size = SIZES[i.kind[1:]]
        is_shared = any(part.startswith("shared") for part in i.op)
        least, end = ("0", "SHARED") if is_shared else ("65536", "1ull << 48")
        code = f"u64 a = {self.address(place)}; CHECK(a, {size * len(names)}, {least}, {end}, {n});"
        start = "C->shared + a" if is_shared else "a"
        return code, f"(volatile u{8 * size} *)({start} + {{}})", size

    def _ld(self, n: int, i: Instruction) -> str:
        if i.op[1] == "param":
            return self.each(i, f"{self.registers(i.operands[0])} = C->argument;")
        names = _list(i.operands[0])
        code, at, size = self._memory(n, i, names, i.operands[1])
        read = [f"u64 v{j} = *{at.format(j * size)};" for j in range(len(names))]
        read += [f"{self.registers(name)} = v{j};" for j, name in enumerate(names)]
        return self.each(i, " ".join((code, *read)))

    def _st(self, n: int, i: Instruction) -> str:
        names = _list(i.operands[1])
        code, at, size = self._memory(n, i, names, i.operands[0])
        written = [f"*{at.format(j * size)} = {self.value(v)};" for j, v in enumerate(names)]
        return self.each(i, " ".join((code, *written)))

    def _red(self, n: int, i: Instruction) -> str:
        return self._atom(n, i._replace(operands=["", *i.operands]))

    def _atom(self, n: int, i: Instruction) -> str:
        to, place, value = i.operands
        code, at, _ = self._memory(n, i, [""], place)
        what = next(ATOMIC[part] for part in i.op if part in ATOMIC)
        kind = _c_type(i.kind)
        return self.each(
            i,
            f"{code} volatile {kind} *to = (volatile {kind} *){at.format(0)}; {kind} old = *to;"
            f" {{ {kind} a = old, b = {self.value(value)}; *to = {what}; }}"
            + (f" {self.registers(to)} = old;" if to else ""),
        )

    def _mbarrier(self, n: int, i: Instruction) -> str:
        what, operands = i.op[1], i.operands
        if what == "init":
            count = self.value(operands[1], "u32")
            code = f"u64 c = {count}; *(u64 *){self.shared(operands[0])} = c << 1 | c << 16;"
            return self.each(i, code)
        if what == "arrive":
            more = self.value(operands[2], "s32") if "expect_tx" in i.op else "0"
            code = f"mbarrier_update((u64 *){self.shared(operands[1])}, 1, {more})"
            return self.each(i, f"int s = {code}; if (s) return s;")
        assert what in ("try_wait", "test_wait")
        done = f"(*(u64 *){self.shared(operands[1])} & 1) != ({self.value(operands[2], 'u32')} & 1)"
        test = f"u32 t = 0; EACH(m) t |= (u32)({done}) << l;"
        return f"{test} {self.set_predicate(i, operands[0], 't')}"

    def _cp(self, n: int, i: Instruction) -> str:
        assert i.op[:3] == ("cp", "async", "bulk")
        to, source, size, barrier = i.operands[:4]
        return self.each(
            i,
            f"u64 a = {self.address(source)}; u32 bytes = {self.value(size, 'u32')};"
            f" CHECK(a, 16, 65536, 1ull << 48, {n});"
            f" memcpy({self.shared(to)}, (void *)a, bytes);"
            f" mbarrier_update((u64 *){self.shared(barrier)}, 0, -(s32)bytes);",
        )

    def _redux(self, n: int, i: Instruction) -> str:
        kind, to = _c_type(i.kind), self.registers(i.operands[0])
        return (
            f"{kind} o_[32]; EACH(ALL) o_[l] = {self.value(i.operands[1])};"
            f" {kind} t = {REDUCED_FROM[i.op[2]]};"
            f" EACH(ALL) {{ {kind} a = t, b = o_[l]; t = {ATOMIC[i.op[2]]}; }} EACH(m) {to} = t;"
        )

    def _match(self, n: int, i: Instruction) -> str:
        to, value = self.registers(i.operands[0]), self.value(i.operands[1], "u32")
        return (
            f"u32 o_[32]; EACH(ALL) o_[l] = {value}; EACH(m) {{ u32 t = 0;"
            f" for (int j = 0; j < 32; j++) t |= (u32)(o_[j] == o_[l]) << j; {to} = t; }}"
        )

    def _vote(self, n: int, i: Instruction) -> str:
        name, to = i.operands[1], i.operands[0]
        votes = f"u32 t = {'~' if name[0] == '!' else ''}{self.registers(name.lstrip('!'))} & m;"
        if i.op[2] == "ballot":
            return f"{votes} EACH(m) {self.registers(to)} = t;"
        value = {"any": "t ? m : 0", "all": "t == m ? m : 0"}[i.op[2]]
        return f"{votes} {self.set_predicate(i, to, value)}"

    def _shfl(self, n: int, i: Instruction) -> str:
        to, *ok = i.operands[0].split("|")
        value, by = (self.value(text, "u32") for text in i.operands[1:3])
        source, there = {
            "idx": ("b & 31", "1"), "bfly": ("l ^ b", "1"),
            "up": ("l >= b ? l - b : l", "l >= b"),
            "down": ("l + b < 32 ? l + b : l", "l + b < 32"),
        }[i.op[2]]  # fmt: skip
        code = (
            f"u32 o_[32], t = 0; EACH(ALL) o_[l] = {value};"
            f" EACH(m) {{ u32 b = {by}; t |= (u32)({there}) << l;"
            f" {self.registers(to)} = o_[({source}) & 31]; }}"
        )
        return code + (f" {self.set_predicate(i, ok[0], 't')}" if ok else "")

    def _mma(self, n: int, i: Instruction) -> str:
        d, a, b, c = (_list(operand) for operand in i.operands)
        assert i.op[3] == "m16n8k16" and len(a) == len(c) == 4 and len(b) == 2
        code = ["u32 a[32][4], b[32][2]; f32 c[32][4]; EACH(ALL) {"]
        code += [f"a[l][{j}] = {self.value(name)};" for j, name in enumerate(a)]
        code += [f"b[l][{j}] = {self.value(name)};" for j, name in enumerate(b)]
        code += [f"c[l][{j}] = {self.value(name, 'f32')};" for j, name in enumerate(c)]
        code += ["} mma(a, b, c); EACH(ALL) {"]
        code += [f"{self.registers(name)} = bits_of(c[l][{j}]);" for j, name in enumerate(d)]
        return " ".join((*code, "}"))

    def _ldmatrix(self, n: int, i: Instruction) -> str:
        names = _list(i.operands[0])
        read = " ".join(f"{self.registers(name)} = r[l][{j}];" for j, name in enumerate(names))
        return (
            f"u32 at[32], r[32][4]; EACH(ALL) {{ u64 a = {self.address(i.operands[1])};"
            f" CHECK(a, 16, 0, SHARED, {n}); at[l] = a; }}"
            f" ldmatrix(C->shared, at, r, {int('trans' in i.op)}); EACH(m) {{ {read} }}"
        )

    def _mov(self, n: int, i: Instruction) -> str:
        to, source = i.operands
        if to.startswith("{"):
            low, high = (self.registers(name) for name in _list(to))
            value = self.value(source, "u64")
            return self.each(i, f"u64 v = {value}; {low} = (u32)v; {high} = (u32)(v >> 32);")
        if source.startswith("{"):
            low, high = (self.value(name, "u32") for name in _list(source))
            return self.each(i, f"{self.registers(to)} = (u64){low} | (u64){high} << 32;")
        if i.kind == "pred":
            value = {"0": "0u", "1": "~0u", "-1": "~0u"}.get(source) or self.registers(source)
            return self.set_predicate(i, to, value)
        clock = "u64 clock = now(); " if self.value(source) == "clock" else ""
        return clock + self.each(i, f"{self.registers(to)} = {self.value(source)};")

    def _setp(self, n: int, i: Instruction) -> str:
        to, *operands = i.operands
        a, b = (self.value(text, i.kind) for text in operands)
        kind, compare, is_float = _c_type(i.kind), i.op[1], i.kind[0] == "f"
        unordered = "isnan(a) || isnan(b)"
        if compare in ("nan", "num"):
            test = f"{'!' if compare == 'num' else ''}({unordered})"
        elif is_float and compare[:-1] in COMPARE:
            test = f"{unordered} || a {COMPARE[compare[:-1]]} b"
        elif is_float and compare == "ne":
            test = f"!({unordered}) && a != b"
        else:
            test = f"a {COMPARE[compare]} b"
        each = f"EACH(m) {{ {kind} a = {a}, b = {b}; t |= (u32)({test}) << l; }}"
        return f"u32 t = 0; {each} {self.set_predicate(i, to, 't')}"

    def _selp(self, n: int, i: Instruction) -> str:
        to, a, b, which = i.operands
        chosen = f"{self.registers(which)} >> l & 1 ? {self.value(a)} : {self.value(b)}"
        return self.each(i, f"{self.registers(to)} = {chosen};")

    def _cvt(self, n: int, i: Instruction) -> str:
        to, (kind, source) = self.registers(i.operands[0]), i.op[-2:]
        if kind == "bf16x2":
            high, low = (f"to_bf16({self.value(text, 'f32')})" for text in i.operands[1:])
            return self.each(i, f"{to} = {high} << 16 | {low};")
        value = self.value(i.operands[1], source)
        if kind[0] == "f":
            what = f"bits_of{'64' if kind == 'f64' else ''}(({kind}){value})"
        else:
            if source[0] == "f":
                value = f"{ROUND[i.op[1]]}({value})"
            what = f"({'u64' if kind in LONG else 'u32'})({kind}){value}"
        return self.each(i, f"{to} = {what};")

    def _shf(self, n: int, i: Instruction) -> str:
        low, high, by = (self.value(text, "u32") for text in i.operands[1:])
        both = f"((u64){high} << 32 | {low})"
        what = f"{both} << ({by} & 31) >> 32" if i.op[1] == "l" else f"{both} >> ({by} & 31)"
        return self.each(i, f"{self.registers(i.operands[0])} = (u32)({what});")

    def _arithmetic(self, i: Instruction) -> str:
        base, kind, to = i.op[0], i.kind, self.registers(i.operands[0])
        if kind == "pred":
            sources = [self.registers(text) for text in i.operands[1:]]
            return self.set_predicate(i, i.operands[0], LOGIC[base].format(*sources))
        if kind == "bf16x2":
            assert base == "mul"
            a, b = (self.value(text, "u32") for text in i.operands[1:])
            halves = (
                "number(a << 16) * number(b << 16)",
                "number(a >> 16 << 16) * number(b >> 16 << 16)",
            )
            low, high = (f"to_bf16({half})" for half in halves)
            return self.each(i, f"u32 a = {a}, b = {b}; {to} = {low} | {high} << 16;")
        wide = "u64" if kind in LONG else "u32"
        values = [self.value(text, kind) for text in i.operands[1:]]
        if base in ("mul", "mad") and i.op[1] == "wide":
            double = f"{kind[0]}64"
            added = f" + {self.value(i.operands[3], 'u64')}" if base == "mad" else ""
            found = f"(u64)(({double}){values[0]} * ({double}){values[1]}){added}"
        elif base == "mul" and i.op[1] == "hi":
            double = "unsigned __int128" if wide == "u64" else f"{kind[0]}64"
            bits = 64 if wide == "u64" else 32
            found = f"({wide})(({double}){values[0]} * ({double}){values[1]} >> {bits})"
        elif base in ("shl", "shr"):
            bits, by = 64 if wide == "u64" else 32, self.value(i.operands[2], "u32")
            sign = "<<" if base == "shl" else ">>"
            beyond = f"{values[0]} >> {bits - 1}" if kind[0] == "s" else "0"
            found = f"({wide})({by} >= {bits} ? {beyond} : {values[0]} {sign} {by})"
        else:
            names = "".join(
                f"{_c_type(kind)} {name} = {v}; " for name, v in zip("abc", values, strict=False)
            )
            if kind[0] == "f":
                what = FLOAT[base].format(f="f" if kind == "f32" else "")
                what = f"flushed({what})" if "ftz" in i.op else what
                what = f"bits_of{'' if kind == 'f32' else '64'}({what})"
            else:
                what = f"({wide})({INTEGER[base]})"
            found = f"({{ {names}{what}; }})"
        return self.each(i, f"{to} = {found};")
