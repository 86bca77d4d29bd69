"""Writes functions as LLVM IR: values with operators, and loops and branches whose bodies are Python functions.

This module has arithmetic and control flow, and no kernel. Its output is text, so that it can be read, tested, and
compiled by any LLVM. A Python number stands for a constant of the other operand's type, in every lane of a vector.
Integer types have no sign: comparisons, division and conversions treat integers as signed, right shifts as unsigned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pallas_kernels.cpu.types import BF16, F32, I1, I16, I32, I64, PTR, Number, Type


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """The result of an instruction, or a constant."""

    function: Function
    type: Type
    ref: str

    def __add__(self, other: Value | Number) -> Value:
        return self.function.binary("add", self, other)

    def __radd__(self, other: Number) -> Value:
        return self + other

    def __sub__(self, other: Value | Number) -> Value:
        return self.function.binary("sub", self, other)

    def __rsub__(self, other: Number) -> Value:
        return self.function.constant(self.type, other) - self

    def __mul__(self, other: Value | Number) -> Value:
        return self.function.binary("mul", self, other)

    def __rmul__(self, other: Number) -> Value:
        return self * other

    def __floordiv__(self, other: Value | Number) -> Value:
        return self.function.binary("sdiv", self, other)

    def __mod__(self, other: Value | Number) -> Value:
        return self.function.binary("srem", self, other)

    def __truediv__(self, other: Value | Number) -> Value:
        return self.function.binary("div", self, other)

    def __and__(self, other: Value | Number) -> Value:
        return self.function.binary("and", self, other)

    def __or__(self, other: Value | Number) -> Value:
        return self.function.binary("or", self, other)

    def __lshift__(self, other: Value | Number) -> Value:
        return self.function.binary("shl", self, other)

    def __rshift__(self, other: Value | Number) -> Value:
        return self.function.binary("lshr", self, other)

    def __lt__(self, other: Value | Number) -> Value:
        return self.function.compare("lt", self, other)

    def __le__(self, other: Value | Number) -> Value:
        return self.function.compare("le", self, other)

    def __gt__(self, other: Value | Number) -> Value:
        return self.function.compare("gt", self, other)

    def __ge__(self, other: Value | Number) -> Value:
        return self.function.compare("ge", self, other)

    def equals(self, other: Value | Number) -> Value:
        """Compare for equality: `==` keeps its Python meaning."""
        return self.function.compare("eq", self, other)


class Module:
    """Functions that are compiled together."""

    def __init__(self) -> None:
        self._functions: list[Function] = []
        self._declared: dict[str, str] = {}

    def function(
        self, name: str, arguments: Sequence[Type], result: Type | None = None, *, public: bool = False
    ) -> Function:
        """Return a new function without instructions; `ret` must end it."""
        function = Function(self, name, arguments, result, public)
        self._functions.append(function)
        return function

    def declare(self, name: str, text: str) -> None:
        """Declare a function of LLVM or the C library, unless the module defines one of that name."""
        if not any(function.name == name for function in self._functions):
            self._declared[name] = text

    def __str__(self) -> str:
        return "\n".join([*self._declared.values(), *(str(function) for function in self._functions)]) + "\n"


class Function:
    """One function; each instruction is appended to its current basic block."""

    def __init__(self, module: Module, name: str, arguments: Sequence[Type], result: Type | None, public: bool) -> None:
        self.module = module
        self.name = name
        self.result = result
        self._linkage = "" if public else "internal "
        self._stack: list[str] = []
        self._lines: list[str] = []
        self._count = 0
        self._block = "entry"
        self.arguments = [Value(self, kind, f"%a{i}") for i, kind in enumerate(arguments)]

    def __str__(self) -> str:
        arguments = ", ".join(f"{value.type} {value.ref}" for value in self.arguments)
        body = "\n".join(["entry:", *self._stack, *self._lines])
        return f"define {self._linkage}{self.result or 'void'} @{self.name}({arguments}) nounwind {{\n{body}\n}}"

    def constant(self, kind: Type, number: Number | Sequence[Number]) -> Value:
        """Return a constant: one number for all lanes, or one for each."""
        return Value(self, kind, kind.literal(number))

    def binary(self, operation: str, left: Value, right: Value | Number) -> Value:
        """Apply an operation to two values of one type; `operation` is LLVM's name of it for integers."""
        right = right if isinstance(right, Value) else self.constant(left.type, right)
        if left.type.is_float and operation in ("add", "sub", "mul", "div"):
            operation = f"f{operation}"
        return self._emit(left.type, f"{operation} {left.type} {left.ref}, {right.ref}")

    def compare(self, relation: str, left: Value, right: Value | Number) -> Value:
        """Return the truth value of a relation, or one for each lane."""
        right = right if isinstance(right, Value) else self.constant(left.type, right)
        signed = relation if relation == "eq" else f"s{relation}"
        code = f"fcmp o{relation}" if left.type.is_float else f"icmp {signed}"
        return self._emit(Type("i1", left.type.lanes), f"{code} {left.type} {left.ref}, {right.ref}")

    def select(self, condition: Value, yes: Value, no: Value | Number) -> Value:
        """Return `yes` or `no`, lane by lane if the condition is a vector."""
        no = no if isinstance(no, Value) else self.constant(yes.type, no)
        operands = ", ".join(f"{value.type} {value.ref}" for value in (condition, yes, no))
        return self._emit(yes.type, f"select {operands}")

    def minimum(self, left: Value, right: Value | Number) -> Value:
        """Return the smaller of two numbers."""
        return self.select(left < right, left, right)

    def maximum(self, left: Value, right: Value | Number) -> Value:
        """Return the larger of two numbers."""
        return self.select(left > right, left, right)

    def convert(self, operation: str, value: Value, kind: Type) -> Value:
        """Convert to another type, by LLVM's name of the conversion: zext, trunc, sitofp, fptosi, bitcast …"""
        return self._emit(kind, f"{operation} {value.type} {value.ref} to {kind}")

    def call(self, name: str, result: Type | None, *values: Value) -> Value:
        """Call a function of this module, of LLVM, or of the C library. If `result` is None, the value is unusable."""
        kinds = ", ".join(str(value.type) for value in values)
        self.module.declare(name, f"declare {result or 'void'} @{name}({kinds})")
        return self._call(f"@{name}", result, values)

    def call_pointer(self, pointer: Value, result: Type | None, *values: Value) -> Value:
        """Call the function at an address."""
        return self._call(pointer.ref, result, values)

    def fma(self, left: Value, right: Value, plus: Value) -> Value:
        """Return `left * right + plus`, rounded once."""
        suffix = f"v{left.type.lanes}f32" if left.type.lanes else "f32"
        return self.call(f"llvm.fma.{suffix}", left.type, left, right, plus)

    def dot_bf16(self, pairs: Value, others: Value, plus: Value) -> Value:
        """Return `plus` plus the products of neighbouring pairs of bfloat16; for CPUs with `avx512bf16`."""
        numbers = BF16.times(2 * plus.type.lanes)
        left, right = (self.convert("bitcast", value, numbers) for value in (pairs, others))
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", plus.type, plus, left, right)

    def dot_i16(self, pairs: Value, others: Value) -> Value:
        """Return the sums of the products of neighbouring pairs of i16, 16 of them; for CPUs with `avx2`."""
        left, right = (self.convert("bitcast", value, I16.times(32)) for value in (pairs, others))
        halves = [
            self.call("llvm.x86.avx2.pmadd.wd", I32.times(8), *(self.shuffle(x, x, lanes) for x in (left, right)))
            for lanes in (range(16), range(16, 32))
        ]
        return self.shuffle(halves[0], halves[1], range(16))

    def fence(self, numbers: Value) -> Value:
        """Return these 32-bit integers; LLVM doesn't reorder sums across it."""
        kind = F32.times(numbers.type.lanes)
        fenced = self.call(f"llvm.arithmetic.fence.v{kind.lanes}f32", kind, self.convert("bitcast", numbers, kind))
        return self.convert("bitcast", fenced, numbers.type)

    def opaque(self, pointer: Value) -> Value:
        """Return the same pointer, from an instruction that does nothing and that LLVM can't look into.

        LLVM computes pointers at equal distances by a product each. If they are opaque, it adds the distance.
        """
        return self._emit(PTR, f'call ptr asm "", "=r,0"(ptr {pointer.ref})')

    def at(self, pointer: Value, offset: Value | int) -> Value:
        """Return a pointer `offset` bytes further."""
        offset = offset if isinstance(offset, Value) else self.constant(I64, offset)
        return self._emit(PTR, f"getelementptr i8, ptr {pointer.ref}, i64 {offset.ref}")

    def load(self, kind: Type, pointer: Value, offset: Value | int = 0) -> Value:
        """Load a value `offset` bytes after a pointer."""
        pointer = pointer if isinstance(offset, int) and offset == 0 else self.at(pointer, offset)
        return self._emit(kind, f"load {kind}, ptr {pointer.ref}, align {kind.alignment}")

    def store(self, value: Value, pointer: Value, offset: Value | int = 0) -> None:
        """Store a value `offset` bytes after a pointer."""
        pointer = pointer if isinstance(offset, int) and offset == 0 else self.at(pointer, offset)
        self._lines.append(f"  store {value.type} {value.ref}, ptr {pointer.ref}, align {value.type.alignment}")

    def to_bf16(self, numbers: Value) -> Value:
        """Round to the nearest bfloat16; for CPUs with `avx512bf16`."""
        return self.call("llvm.x86.avx512bf16.cvtneps2bf16.512", BF16.times(numbers.type.lanes), numbers)

    def prefetch(self, pointer: Value, cache: int = 1) -> None:
        """Prefetch a cache line that will be read soon into the first cache or a later one."""
        read, near, data = (self.constant(I32, number) for number in (0, 4 - cache, 1))
        self.call("llvm.prefetch.p0", None, pointer, read, near, data)

    def stack(self, nbytes: int) -> Value:
        """Allocate memory that is valid until the function returns."""
        value = Value(self, PTR, self._name())
        self._stack.append(f"  {value.ref} = alloca [{nbytes} x i8], align 64")
        return value

    def fetch_add(self, pointer: Value, number: int) -> Value:
        """Add to an integer in memory, atomically, and return its old value."""
        return self._emit(I64, f"atomicrmw add ptr {pointer.ref}, i64 {number} seq_cst")

    def load_shared(self, pointer: Value) -> Value:
        """Load an integer that other threads write."""
        return self._emit(I64, f"load atomic i64, ptr {pointer.ref} seq_cst, align 8")

    def broadcast(self, value: Value, lanes: int) -> Value:
        """Return a vector with the number in every lane."""
        kind = value.type.times(lanes)
        first = self._emit(kind, f"insertelement {kind} poison, {value.type} {value.ref}, i64 0")
        return self.shuffle(first, first, [0] * lanes)

    def first(self, vector: Value) -> Value:
        """Return the first lane."""
        return self._emit(Type(vector.type.name), f"extractelement {vector.type} {vector.ref}, i64 0")

    def shuffle(self, left: Value, right: Value, lanes: Sequence[int]) -> Value:
        """Return a vector of chosen lanes; numbers count through `left`, then through `right`."""
        mask = self.constant(I32.times(len(lanes)), list(lanes))
        kind = Type(left.type.name, len(lanes))
        code = f"shufflevector {left.type} {left.ref}, {right.type} {right.ref}, {mask.type} {mask.ref}"
        return self._emit(kind, code)

    def loop(
        self,
        stop: Value | int,
        body: Callable[..., Sequence[Value] | Value | None],
        *carried: Value,
        start: Value | int = 0,
        step: Value | int = 1,
    ) -> list[Value]:
        """Run `body(i, *carried)` for each `i`; it returns the next carried values. Returns the last ones."""
        first = start if isinstance(start, Value) else self.constant(I64, start)
        last = stop if isinstance(stop, Value) else self.constant(I64, stop)

        def turn(i: Value, *before: Value) -> list[Value]:
            given = body(i, *before)
            given = [] if given is None else [given] if isinstance(given, Value) else list(given)
            return [i + step, *given]

        return self.loop_while(lambda i, *_: i < last, turn, first, *carried)[1:]

    def loop_while(
        self, condition: Callable[..., Value], body: Callable[..., Sequence[Value]], *first: Value
    ) -> list[Value]:
        """Run `body(*values)` while the condition holds; it returns the next values. Returns the last ones."""
        head, inside, end = (self._label(part) for part in ("head", "body", "end"))
        before = self._block
        self._branch(head)
        self._open(head)
        values = [Value(self, value.type, self._name()) for value in first]
        holes = len(self._lines)
        self._lines += [""] * len(values)
        self._branch_if(condition(*values), inside, end)
        self._open(inside)
        later = body(*values)
        for i, (value, one, other) in enumerate(zip(values, first, later, strict=True)):
            incoming = f"[ {one.ref}, %{before} ], [ {other.ref}, %{self._block} ]"
            self._lines[holes + i] = f"  {value.ref} = phi {value.type} {incoming}"
        self._branch(head)
        self._open(end)
        return values

    def when(self, condition: Value, body: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
        """Run `body` if the condition holds, else `otherwise`."""
        yes, no, end = (self._label(part) for part in ("then", "else", "end"))
        self._branch_if(condition, yes, no)
        for label, some in ((yes, body), (no, otherwise)):
            self._open(label)
            if some is not None:
                some()
            self._branch(end)
        self._open(end)

    def ret(self, value: Value | None = None) -> None:
        """End the function and return `value`, if there is one."""
        self._lines.append("  ret void" if value is None else f"  ret {value.type} {value.ref}")

    def _call(self, target: str, result: Type | None, values: Sequence[Value]) -> Value:
        arguments = ", ".join(f"{value.type} {value.ref}" for value in values)
        if result is None:
            self._lines.append(f"  call void {target}({arguments})")
            return Value(self, I1, "poison")
        return self._emit(result, f"call {result} {target}({arguments})")

    def _emit(self, kind: Type, code: str) -> Value:
        value = Value(self, kind, self._name())
        self._lines.append(f"  {value.ref} = {code}")
        return value

    def _name(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def _label(self, part: str) -> str:
        self._count += 1
        return f"{part}{self._count}"

    def _open(self, label: str) -> None:
        self._lines.append(f"{label}:")
        self._block = label

    def _branch(self, label: str) -> None:
        self._lines.append(f"  br label %{label}")

    def _branch_if(self, condition: Value, yes: str, no: str) -> None:
        self._lines.append(f"  br i1 {condition.ref}, label %{yes}, label %{no}")
