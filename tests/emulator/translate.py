"""A kernel's PTX as C: a case for each instruction, which works on all lanes in `m` at once.

As much of PTX as the echo kernel needs: no shared memory, no barriers, no tensor cores. Registers
are W->w (32 bits), W->q (64) and W->p (predicates, a bit a lane); see warp.c.
"""

from __future__ import annotations

import re

from tests.emulator.ptx import Instruction, read_kernel

LONG = ("b64", "u64", "s64")
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
INTEGER = {
    "add": "a + b", "sub": "a - b", "mul": "a * b", "mad": "a * b + c", "and": "a & b",
    "or": "a | b", "xor": "a ^ b", "not": "~a", "neg": "-a", "div": "a / b", "rem": "a % b",
    "min": "a < b ? a : b", "max": "a > b ? a : b", "brev": "reversed(a)",
    "clz": "a ? __builtin_clz(a) : 32",
}  # fmt: skip
FLOAT = {
    "add": "a + b", "sub": "a - b", "mul": "a * b", "fma": "fmaf(a, b, c)", "neg": "-a",
    "max": "fmaxf(a, b)", "min": "fminf(a, b)", "ex2": "exp2f(a)", "lg2": "log2f(a)",
}  # fmt: skip
LOGIC = {"and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}"}
SPECIAL = {"%tid.x": "(W->first_thread + l)", "%ctaid.x": "W->cta", "%globaltimer": "clock"}


class Registers:
    """Places for registers in the order in which they turn up."""

    def __init__(self) -> None:
        self.places: dict[str, dict[str, int]] = {"w": {}, "q": {}, "p": {}}

    def file(self, name: str) -> str:
        if name.startswith("%"):
            return "q" if name.startswith("%rd") else "p" if name.startswith("%p") else "w"
        kind = name.rsplit("_", 1)[-1]
        return "p" if kind == "pred" else "q" if kind in LONG else "w"

    def __call__(self, name: str) -> str:
        """Of the lane l; of a predicate the bits of all lanes."""
        file = self.file(name)
        place = self.places[file].setdefault(name, len(self.places[file]))
        return f"W->p[{place}]" if file == "p" else f"W->{file}[{place}][l]"


class Translator:
    """`code()` is the C text of a kernel; an instruction it does not know is a KeyError."""

    def __init__(self, ptx: str) -> None:
        self.instructions, self.labels = read_kernel(ptx)
        self.registers = Registers()

    def code(self) -> str:
        """What warp.c includes."""
        cases = [self._case(n, i) for n, i in enumerate(self.instructions)]
        sizes = zip(("WORDS", "QUADS", "PREDICATES"), self.registers.places.values(), strict=True)
        counts = "\n".join(f"#define {name} {len(places) + 1}" for name, places in sizes)
        end = f"#define END {len(self.instructions)}"
        return f"#ifdef DECLARATIONS\n{counts}\n{end}\n#else\n" + "\n".join(cases) + "\n#endif\n"

    # -- operands
    def value(self, text: str, kind: str = "") -> str:
        """A source, as the C type of a PTX type."""
        if text in SPECIAL:
            found = SPECIAL[text]
        elif text.startswith("0f"):
            found = f"0x{text[2:]}u"
        elif re.fullmatch(r"-?(0x)?[0-9a-fA-F]+U?", text):
            found = f"((u64){text.rstrip('U')}LL)"
        else:
            found = self.registers(text)
        if kind == "f32":
            return f"number({found})"
        return f"({kind.replace('b', 'u')})({found})" if kind else found

    def address(self, operand: str) -> str:
        match = re.fullmatch(r"\[\s*([^+\]\s]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        assert match is not None, operand
        return f"({self.registers(match[1])} + ({match[2] or 0}))"

    def lanes(self, i: Instruction) -> str:
        """Of those in `m` the ones for which the guard holds."""
        if not i.guard:
            return "m"
        return f"(m & {'~' if i.unless else ''}{self.registers(i.guard)})"

    def each(self, i: Instruction, statement: str) -> str:
        return f"EACH({self.lanes(i)}) {{ {statement} }}"

    # -- instructions
    def _case(self, n: int, i: Instruction) -> str:
        base = i.op[0]
        if base == "bra":
            to = self.labels[i.operands[-1]]
            body = f"u32 t_ = {self.lanes(i)}; go(W, m, {n + 1}); go(W, t_, {to}); break;"
        elif base == "ret":
            body = f"go(W, {self.lanes(i)}, END); break;"
        elif base == "trap":
            body = f"if ({self.lanes(i)}) return TRAPPED; go(W, m, {n + 1}); break;"
        elif base == "nanosleep":
            body = f"go(W, m, {n + 1}); if ({self.lanes(i)}) return NAPPED; break;"
        else:
            special = getattr(self, f"_{base}", None)
            body = special(n, i) if special else self._arithmetic(i)
            body += f" go(W, m, {n + 1}); break;"
        return f"case {n}: {{ {body} }}"

    def _fence(self, n: int, i: Instruction) -> str:
        return "__sync_synchronize();"

    def _bar(self, n: int, i: Instruction) -> str:
        assert i.op[1] == "warp"
        return ""

    def _ld(self, n: int, i: Instruction) -> str:
        if i.op[1] == "param":
            return self.each(i, f"{self.registers(i.operands[0])} = W->argument;")
        names = [name.strip() for name in i.operands[0].strip("{}").split(",")]
        size, kind = (8, "u64") if i.kind in LONG else (4, "u32")
        code = [f"u64 a_ = {self.address(i.operands[1])}; CHECK(a_, {size * len(names)}, {n})"]
        for j in range(len(names)):
            at = f"(volatile {kind} *)(a_ + {j * size})"
            code.append(f"u64 v{j}_ = __atomic_load_n({at}, __ATOMIC_ACQUIRE);")
        code += [f"{self.registers(name)} = v{j}_;" for j, name in enumerate(names)]
        return self.each(i, " ".join(code))

    def _st(self, n: int, i: Instruction) -> str:
        names = [name.strip() for name in i.operands[1].strip("{}").split(",")]
        size, kind = (8, "u64") if i.kind in LONG else (4, "u32")
        code = [f"u64 a_ = {self.address(i.operands[0])}; CHECK(a_, {size * len(names)}, {n})"]
        for j, name in enumerate(names):
            at = f"(volatile {kind} *)(a_ + {j * size})"
            code.append(f"__atomic_store_n({at}, ({kind})({self.value(name)}), __ATOMIC_RELEASE);")
        return self.each(i, " ".join(code))

    def _red(self, n: int, i: Instruction) -> str:
        assert i.op[-2:] == ("add", "u32")
        at, value = self.address(i.operands[0]), self.value(i.operands[1], "u32")
        return self.each(i, f"__atomic_fetch_add((u32 *){at}, {value}, __ATOMIC_SEQ_CST);")

    def _redux(self, n: int, i: Instruction) -> str:
        assert i.op[2] == "add"
        to, value = self.registers(i.operands[0]), self.value(i.operands[1], "u32")
        return f"WHOLE({n}) u32 t_ = 0; EACH(m) t_ += {value}; EACH(m) {to} = t_;"

    def _match(self, n: int, i: Instruction) -> str:
        to, value = self.registers(i.operands[0]), self.value(i.operands[1], "u32")
        return (
            f"WHOLE({n}) u32 o_[32]; EACH(m) o_[l] = {value};"
            f" EACH(m) {{ u32 t_ = 0; for (int j = 0; j < 32; j++)"
            f" t_ |= (u32)(o_[j] == o_[l]) << j; {to} = t_; }}"
        )

    def _vote(self, n: int, i: Instruction) -> str:
        name = i.operands[1]
        votes = f"{'~' if name[0] == '!' else ''}{self.registers(name.lstrip('!'))} & m"
        to = self.registers(i.operands[0])
        if i.op[2] == "ballot":
            return f"WHOLE({n}) u32 t_ = {votes}; EACH(m) {to} = t_;"
        assert i.op[2] == "any"
        return f"WHOLE({n}) u32 t_ = {votes}; {to} = ({to} & ~m) | (t_ ? m : 0);"

    def _shfl(self, n: int, i: Instruction) -> str:
        to = self.registers(i.operands[0].split("|")[0])
        value, by = (self.value(text, "u32") for text in i.operands[1:3])
        source = {"idx": by, "bfly": f"(l ^ {by})"}[i.op[2]]
        return (
            f"WHOLE({n}) u32 o_[32]; EACH(m) o_[l] = {value};"
            f" EACH(m) {to} = o_[W->lanes == 32 ? {source} & 31 : l];"
        )

    def _mov(self, n: int, i: Instruction) -> str:
        to, source = i.operands
        if to.startswith("{"):
            low, high = (self.registers(name.strip()) for name in to.strip("{}").split(","))
            value = self.value(source, "u64")
            return self.each(i, f"u64 v_ = {value}; {low} = (u32)v_; {high} = (u32)(v_ >> 32);")
        if source.startswith("{"):
            low, high = (self.value(name.strip(), "u32") for name in source.strip("{}").split(","))
            return self.each(i, f"{self.registers(to)} = (u64){low} | (u64){high} << 32;")
        if i.kind == "pred":
            value = {"0": "0u", "1": "~0u", "-1": "~0u"}.get(source) or self.registers(source)
            return self._set_predicate(i, value)
        return "u64 clock = now();" + self.each(i, f"{self.registers(to)} = {self.value(source)};")

    def _set_predicate(self, i: Instruction, value: str) -> str:
        to = self.registers(i.operands[0])
        return f"u32 e = {self.lanes(i)}; {to} = ({to} & ~e) | (({value}) & e);"

    def _setp(self, n: int, i: Instruction) -> str:
        a, b = (self.value(text, i.kind) for text in i.operands[1:])
        test = f"EACH(m) t_ |= (u32)({a} {COMPARE[i.op[1]]} {b}) << l;"
        return f"u32 t_ = 0; {test} {self._set_predicate(i, 't_')}"

    def _selp(self, n: int, i: Instruction) -> str:
        to, a, b, which = i.operands
        chosen = f"{self.registers(which)} >> l & 1 ? {self.value(a)} : {self.value(b)}"
        return self.each(i, f"{self.registers(to)} = {chosen};")

    def _cvt(self, n: int, i: Instruction) -> str:
        to, source = self.registers(i.operands[0]), self.value(i.operands[1], i.kind)
        if i.op[-2] == "f32":
            return self.each(i, f"{to} = bits_of((float){source});")
        wide = "u64" if i.op[-2] in LONG else "u32"
        return self.each(i, f"{to} = ({wide})({i.op[-2]}){source};")

    def _shf(self, n: int, i: Instruction) -> str:
        assert i.op[1:3] == ("l", "wrap")
        low, high, by = (self.value(text, "u32") for text in i.operands[1:])
        both = f"((u64){high} << 32 | {low})"
        return self.each(
            i, f"{self.registers(i.operands[0])} = (u32)({both} << ({by} & 31) >> 32);"
        )

    def _arithmetic(self, i: Instruction) -> str:
        base, kind = i.op[0], i.kind
        if kind == "pred":
            sources = [self.registers(text) for text in i.operands[1:]]
            return self._set_predicate(i, LOGIC[base].format(*sources))
        values = [self.value(text, kind) for text in i.operands[1:]]
        wide = "u64" if kind in LONG else "u32"
        if base == "mul" and i.op[1] == "wide":
            double = "s64" if kind[0] == "s" else "u64"
            found = f"(u64)(({double}){values[0]} * ({double}){values[1]})"
        elif base == "mul" and i.op[1] == "hi":
            found = f"(u32)((u64){values[0]} * (u64){values[1]} >> 32)"
        elif base in ("shl", "shr"):
            bits, by = 64 if wide == "u64" else 32, self.value(i.operands[2], "u32")
            sign = "<<" if base == "shl" else ">>"
            beyond = f"{values[0]} >> {bits - 1}" if kind[0] == "s" else "0"
            found = f"({wide})({by} >= {bits} ? {beyond} : {values[0]} {sign} {by})"
        else:
            ctype = "float" if kind == "f32" else kind.replace("b", "u")
            names = "".join(
                f"{ctype} {name} = {v}; " for name, v in zip("abc", values, strict=False)
            )
            what = FLOAT[base] if kind == "f32" else INTEGER[base]
            what = f"bits_of({what})" if kind == "f32" else f"({wide})({what})"
            found = f"({{ {names}{what}; }})"
        return self.each(i, f"{self.registers(i.operands[0])} = {found};")
