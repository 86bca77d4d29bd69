"""Reads the text of a compiled program: its computations, their instructions, and the bytes that each one moves."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<types>.*?) (?P<opcode>[a-z][a-z0-9-]*)\((?P<arguments>[^)]*)\)"
)
_ARRAY = re.compile(r"\b(?P<type>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<dims>[\d,]*)\](?P<layout>\{[^}]*\})?")
# The memory space of a TPU's VMEM.
_ON_CHIP = "S(1)"
_OPERAND = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.-]+)")
_BODIES = re.compile(r"\b(?:body|true_computation|false_computation)=%?([\w.-]+)|\bbranch_computations=\{([^}]*)\}")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_OP_NAME = re.compile(r'op_name="([^"]+)"')

# Operations that copy nothing: their output is their operand's memory, with another type or shape.
_VIEWS = {"bitcast", "reshape", "get-tuple-element", "optimization-barrier"}
# Operations that read as much of their first operand as they output.
_SLICES = {"slice", "dynamic-slice", "gather"}
# Operations that write into their first operand, and the operand that says how much.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_CONTROL = {"while", "conditional"}
_INDEX = re.compile(r" get-tuple-element\(.*\), index=(\d+)")
_PRODUCTS = {"dot", "convolution"}
_BATCH = re.compile(r"lhs_batch_dim(?:s=\{|ensions\":\[)(?P<axes>[^\]}]*)")
_LIBRARY_PRODUCT = "matmul"
_QUANTIZED_PRODUCT = "quantized_matmul"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction, with elements and bytes of each array that it outputs, and whether a TPU keeps it in VMEM."""

    name: str
    opcode: str
    sizes: tuple[int, ...]
    arrays: tuple[int, ...]
    on_chip: tuple[bool, ...]
    operands: tuple[str, ...]
    is_root: bool
    line: str = dataclasses.field(repr=False)

    @property
    def elements(self) -> int:
        """Elements of the largest array."""
        return max(self.sizes, default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that it outputs to device memory."""
        return sum(size for size, on_chip in zip(self.arrays, self.on_chip) if not on_chip)

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of the first array."""
        return self.arrays[0] // max(1, self.sizes[0])

    @property
    def aliased(self) -> bool:
        """Whether a custom call declares that it writes into its operands."""
        return "output_to_operand_aliasing" in self.line

    @property
    def called(self) -> str | None:
        """The computation of a fusion or a call."""
        if self.opcode not in ("fusion", "call", "async-start"):
            return None
        return found[1] if (found := _CALLED.search(self.line)) else None

    @property
    def bodies(self) -> list[str]:
        """The computations of a loop, a condition, a call or an asynchronous operation."""
        bodies = _BODIES.findall(self.line) if self.opcode in _CONTROL else []
        if self.opcode in ("call", "async-start") and self.called:
            return [self.called]
        return [name for one, several in bodies for name in (one, *_OPERAND.findall(several)) if name]

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return found[1] if (found := _TARGET.search(self.line)) else ""

    @property
    def op_name(self) -> str:
        """The path of the traced operation that it stems from."""
        return found[1] if (found := _OP_NAME.search(self.line)) else ""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that an instruction reads and writes, and the floating-point operations of its product.

    Operations on two operands of 8 bits count half: devices that multiply such numbers do twice as many of them.
    """

    read_bytes: int
    written_bytes: int
    flops: float


@dataclasses.dataclass(frozen=True)
class Tables:
    """Arrays of which a kernel uses a part that depends on the requests: the `pools` and other `state`, by size.

    A pool is an output of each kernel that writes into it; other state is known by being a parameter as well.
    """

    pools: frozenset[int] = frozenset()
    state: frozenset[int] = frozenset()

    def include(self, size: int, source: Instruction | None) -> bool:
        """Return whether an operand of this size, which comes from `source`, is one of these arrays."""
        return size in self.pools or (source is not None and source.opcode == "parameter" and size in self.state)


class Computation:
    """The instructions of a computation by name, in order."""

    def __init__(self, found: Sequence[Instruction]) -> None:
        self.instructions = {one.name: one for one in found}
        self.users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for one in found:
            for operand in dict.fromkeys(one.operands):
                self.users.setdefault(operand, []).append(one)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        return {
            int(found[1]): one
            for one in self.instructions.values()
            if one.opcode == "parameter" and (found := re.search(r"parameter\((\d+)\)", one.line))
        }

    @property
    def root(self) -> Instruction:
        """The instruction that makes the computation's output."""
        return next(one for one in self.instructions.values() if one.is_root)

    def source(self, name: str) -> Instruction | None:
        """Return the instruction that makes an array, behind other views of it."""
        one = self.instructions.get(name)
        while one is not None and one.opcode in _VIEWS and one.operands:
            one = self.instructions.get(one.operands[0])
        return one

    def arrays_used(self, one: Instruction) -> list[int]:
        """Return the bytes of each array that an instruction outputs and another uses: others are scratch memory."""
        used = [found[1] for user in self.users[one.name] if (found := _INDEX.search(user.line))]
        return [one.arrays[int(index)] for index in used] if used else list(one.arrays)

    def bytes_read(self, number: int) -> int:
        """Return the bytes of a parameter that the computation reads."""
        parameter = self.parameters.get(number)
        return 0 if parameter is None else min(self._bytes_used(parameter), parameter.nbytes)

    def _bytes_used(self, array: Instruction) -> int:
        used = 0
        for user in self.users[array.name]:
            if user.opcode in _VIEWS:
                used += self._bytes_used(user)
            elif user.opcode in _SLICES and user.operands[0] == array.name:
                used += user.nbytes
            elif not (user.opcode in _UPDATES and user.operands[0] == array.name):
                return array.nbytes
        return used

    def bytes_written(self) -> int:
        """Return the bytes of its output that the computation writes."""
        outputs = self.root.operands if self.root.opcode == "tuple" else (self.root.name,)
        return sum(self._bytes_updated(source) for name in outputs if (source := self.source(name)) is not None)

    def _bytes_updated(self, one: Instruction) -> int:
        if one.opcode not in _UPDATES:
            return one.nbytes
        update = self.instructions.get(one.operands[_UPDATES[one.opcode]])
        return one.nbytes if update is None else update.nbytes

    def flops(self) -> float:
        """Return the floating-point operations of the products."""
        return sum(self.product_flops(one) for one in self.instructions.values() if one.opcode in _PRODUCTS)

    def product_flops(self, one: Instruction) -> float:
        """Return the operations of one product, from the sizes of its operands: [batch, m, k] x [batch, k, n]."""
        made = [made for name in one.operands[:2] if (made := self.instructions.get(name)) and made.sizes]
        if len(made) < 2:
            return 0.0
        batch = 1
        if found := _BATCH.search(one.line):
            dims = next(_ARRAY.finditer(made[0].line))["dims"].split(",")
            batch = math.prod(int(dims[int(axis)]) for axis in re.findall("[0-9]+", found["axes"]))
        flops = 2 * math.sqrt(made[0].sizes[0] * made[1].sizes[0] * one.sizes[0] / batch)
        return flops / 2 if all(operand.item_bytes == 1 for operand in made) else flops

    def kernel_flops(self, one: Instruction) -> float:
        """Return the operations of our kernel for a quantized weight, 0 for other custom calls.

        The kernel's first operand is [m, k], its output [..., n].
        """
        x = self.instructions.get(one.operands[0]) if one.operands else None
        if x is None or _QUANTIZED_PRODUCT not in one.op_name:
            return 0.0
        flops = 2.0 * x.sizes[0] * int(next(_ARRAY.finditer(one.line))["dims"].split(",")[-1])
        return flops / 2 if x.item_bytes == 1 else flops


class HloModule:
    """A compiled program's text, parsed."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self.entry = Computation([])
        for name, is_entry, found in _computations(text):
            self.computations[name] = Computation(found)
            if is_entry:
                self.entry = self.computations[name]
        self._owners = {name: one for one in self.computations.values() for name in one.instructions}

    @property
    def instructions(self) -> list[Instruction]:
        """The instructions of all computations."""
        return [one for computation in self.computations.values() for one in computation.instructions.values()]

    def traffic(self, one: Instruction, tables: Tables) -> Traffic:
        """Return the traffic of an instruction. Each operand counts once; `tables` of a custom call don't count."""
        owner = self._owners[one.name]
        inputs = [made.nbytes if (made := owner.instructions.get(name)) else 0 for name in one.operands]
        called = self.computations.get(one.called or "")
        if called is not None:
            read = sum(min(called.bytes_read(number), size) for number, size in enumerate(inputs))
            return Traffic(read, min(called.bytes_written(), one.nbytes), called.flops())
        if one.opcode == "custom-call":
            is_product = _LIBRARY_PRODUCT in one.target
            sources = map(owner.source, one.operands)
            read = sum(size for size, source in zip(inputs, sources) if is_product or not tables.include(size, source))
            written = sum(size for size in owner.arrays_used(one) if is_product or size not in tables.pools)
            return Traffic(read, written, owner.product_flops(one) if is_product else owner.kernel_flops(one))
        if one.opcode in _UPDATES:
            return Traffic(sum(inputs[1:]), owner._bytes_updated(one), 0.0)
        if one.opcode in _SLICES:
            return Traffic(min(sum(one.arrays), sum(inputs)), one.nbytes, 0.0)
        if one.opcode == "slice-start":  # the first array is the whole, the second the slice
            return Traffic(one.arrays[1], 0 if one.on_chip[1] else one.arrays[1], 0.0)
        if one.opcode == "copy-start":  # the first array is the copy, the second the original
            return Traffic(sum(inputs), 0 if one.on_chip[0] else one.arrays[0], 0.0)
        flops = owner.product_flops(one) if one.opcode in _PRODUCTS else 0.0
        return Traffic(sum(inputs), one.nbytes, flops)


def instructions(text: str) -> Iterator[Instruction]:
    """Parse all instructions of a program's text."""
    for _, _, found in _computations(text):
        yield from found


def _computations(text: str) -> Iterator[tuple[str, bool, list[Instruction]]]:
    name, is_entry, found = "", False, list[Instruction]()
    for line in text.split("\n"):
        if parsed := _INSTRUCTION.match(line):
            found.append(_instruction(parsed, line))
        elif header := _COMPUTATION.match(line):
            if found:
                yield name, is_entry, found
            name, is_entry, found = header["name"], header["entry"] is not None, []
    if found:
        yield name, is_entry, found


def _instruction(parsed: re.Match[str], line: str) -> Instruction:
    arrays = list(_ARRAY.finditer(parsed["types"]))
    sizes = [math.prod(int(size) for size in array["dims"].split(",") if size) for array in arrays]
    return Instruction(
        parsed["name"],
        parsed["opcode"],
        tuple(sizes),
        tuple(_bytes(array, size) for array, size in zip(arrays, sizes)),
        tuple(_ON_CHIP in (array["layout"] or "") for array in arrays),
        tuple(_OPERAND.findall(parsed["arguments"])),
        parsed["root"] is not None,
        line,
    )


def _bytes(array: re.Match[str], elements: int) -> int:
    bits = 8 if array["type"] == "pred" else int(array["bits"])
    return -(-elements * bits // 8)
