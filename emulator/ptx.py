"""PTX text as tables that machine.cpp runs: registers become slots, mnemonics numbers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

import numpy as np

INSTRUCTION = np.dtype(  # struct Ins
    [
        ("op", "i4"),
        ("guard", "i4"),
        ("negated", "i4"),
        ("o", "i4", 8),
        ("list", "i4"),
        ("list_count", "i4"),
        ("target", "i4"),
        ("line", "i4"),
        ("imm", "i8", 2),
    ],
    align=True,
)
VALUE = np.dtype(
    [("slot", "i4"), ("width", "i4"), ("kind", "i4"), ("unused", "i4"), ("bits", "u8")]
)
CONSTANT, PARAM_ADDRESS, SHARED_ADDRESS, TID, CTAID, NCTAID, NTID, LANE, WARP = range(9)
SPECIAL = {
    **{f"%{name}.{axis}": (kind, n) for name, kind in (("tid", TID), ("ctaid", CTAID),
       ("nctaid", NCTAID), ("ntid", NTID)) for n, axis in enumerate("xyz")},
    "%laneid": (LANE, 0),
    "%warpid": (WARP, 0),
}  # fmt: skip
KINDS = {"s8": 0, "u8": 1, "f16": 2, "bf16": 3}  # of a wgmma operand
NOTHING = re.compile(
    r"\.pragma|fence|membar|griddepcontrol|prefetch|setmaxnreg|wgmma\.fence|bar\.warp|nanosleep"
)
CACHE_HINTS = re.compile(r"\.(nc|relaxed|weak|cta|gpu|sys|volatile|L1::\w+|L2::\w+|ca|cg|cs)(?=\.)")


class PtxError(Exception):
    """The emulator does not know what this line says."""


@dataclasses.dataclass(frozen=True)
class Program:
    """One kernel: the tables of machine.cpp."""

    name: str
    instructions: np.ndarray
    lists: np.ndarray
    values: np.ndarray
    params: np.ndarray  # (offset, size) in bytes
    units: int  # size of a warp's registers, 32 bytes each


def width_of(kind: str) -> int:
    """Bytes of a lane of a register of this type."""
    if kind == "pred":
        return 1
    return {"8": 2, "16": 2, "32": 4, "16x2": 4, "64": 8}[kind.lstrip("abcdefghijklmnopqrstuvwxyz")]


def programs(text: str, op: Callable[[str], int]) -> Iterator[Program]:
    """Every kernel of a PTX file.

    Args:
        text: of the file.
        op: number of an operation of the machine, -1 if it has none of the name.

    Raises:
        PtxError: something that the machine cannot do; the message holds the line.
    """
    text = re.sub(r"//[^\n]*", "", text)
    for entry in re.finditer(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", text, re.S):
        yield _Parser(text, entry, op).program()


class _Parser:
    def __init__(self, text: str, entry: re.Match[str], op: Callable[[str], int]) -> None:
        self.text, self.op, self.name = text, op, entry.group(1)
        self.position = entry.end()
        self.line = text.count("\n", 0, self.position) + 1
        self.units = 0
        self.values: list[tuple[int, int, int, int, int]] = []
        self.known: dict[tuple[int, int, int], int] = {}
        self.scopes: list[int] = [0]
        self.parents = {0: -1}
        self.prefixes: dict[str, int] = {}
        self.registers: dict[tuple[int, str], tuple[int, int]] = {}
        self.labels: dict[tuple[int, str], int] = {}
        self.lists: list[int] = []
        self.rows: list[tuple] = []
        self.branches: list[tuple[int, int, str]] = []
        self.params: dict[str, int] = {}
        self.layout: list[tuple[int, int]] = []
        offset = 0
        for declaration in filter(None, map(str.strip, entry.group(2).split(","))):
            m = re.fullmatch(
                r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?", declaration
            )
            if m is None:
                raise PtxError(f"{self.name}: parameter {declaration!r}")
            size = int(re.sub(r"^[a-z]+", "", m[2])) // 8 * int(m[4] or 1)
            align = int(m[1] or size)
            offset = -(-offset // align) * align
            self.params[m[3]] = offset
            self.layout.append((offset, size))
            offset += size

    def program(self) -> Program:
        self.body()
        for row, scope, label in self.branches:
            while scope >= 0 and (scope, label) not in self.labels:
                scope = self.parents[scope]
            if scope < 0:
                raise PtxError(f"no label {label}")
            self.rows[row] = (
                *self.rows[row][:6],
                self.labels[scope, label],
                *self.rows[row][7:],
            )
        return Program(
            self.name,
            np.array(self.rows, INSTRUCTION),
            np.array(self.lists or [0], np.int32),
            np.array(self.values, VALUE),
            np.array(self.layout, np.int32).reshape(-1, 2),
            self.units,
        )

    # ---------------------------------------------------------------- statements

    def body(self) -> None:
        text, token = (
            self.text,
            re.compile(r"\s*(?:(\{)|(\})|([\w$]+):(?!:)|([^;{}]*(?:\{[^}]*\}[^;{}]*)*);)"),
        )
        while True:
            m = token.match(text, self.position)
            if m is None:
                raise PtxError(f"line {self.line}: {text[self.position : self.position + 80]!r}")
            start = m.end() - len(m.group().lstrip())
            self.line += text.count("\n", self.position, start)
            line = self.line
            self.line += text.count("\n", start, m.end())
            self.position = m.end()
            opens, closes, label, statement = m.groups()
            if opens:
                scope = len(self.parents)
                self.parents[scope] = self.scopes[-1]
                self.scopes.append(scope)
            elif closes:
                self.scopes.pop()
                if not self.scopes:
                    break
            elif label:
                self.labels[self.scopes[-1], label] = len(self.rows)
            else:
                try:
                    self.statement(statement.strip(), line)
                except (PtxError, KeyError, ValueError, IndexError) as error:
                    raise PtxError(f"line {line}: {statement.strip()!r}: {error}") from error
        self.emit("ret", line=self.line)

    def statement(self, statement: str, line: int) -> None:
        if statement.startswith(".reg"):
            kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S).groups()
            for name in map(str.strip, names.split(",")):
                if m := re.fullmatch(r"(.*)<\d+>", name):
                    self.prefixes[m[1]] = width_of(kind)
                else:
                    width = width_of(kind)
                    self.registers[self.scopes[-1], name] = (self.new_slot(width), width)
            return
        guard, negated = -1, 0
        if m := re.match(r"@(!?)([%\w]+)\s+", statement):
            guard, negated = self.register(m[2])[0], int(bool(m[1]))
            statement = statement[m.end() :]
        first = re.match(r"[\w.:$]+", statement).group()
        self.instruction(first, split_operands(statement[len(first) :]), guard, negated, line)

    # ---------------------------------------------------------------- operands

    def new_slot(self, width: int) -> int:
        slot = self.units
        self.units += width
        return slot

    def register(self, name: str) -> tuple[int, int]:
        """(slot, width) of a register."""
        scope = self.scopes[-1]
        while scope >= 0:
            if (scope, name) in self.registers:
                return self.registers[scope, name]
            scope = self.parents[scope]
        prefix = re.sub(r"\d+$", "", name)
        if prefix not in self.prefixes:
            raise PtxError(f"no register {name}")
        width = self.prefixes[prefix]
        self.registers[0, name] = (self.new_slot(width), width)
        return self.registers[0, name]

    def value(self, width: int, kind: int, bits: int) -> int:
        """Slot of what is the same for all lanes, or known of each."""
        key = (width, kind, bits)
        if key not in self.known:
            self.known[key] = self.new_slot(width)
            self.values.append((self.known[key], width, kind, 0, bits))
        return self.known[key]

    def operand(self, text: str, width: int) -> int:
        """Slot of a register, constant, special register or address."""
        if text == "_":  # a result that nobody wants
            return self.new_slot(width)
        if text in SPECIAL:
            return self.value(width, *SPECIAL[text])
        if m := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text):
            return self.value(width, CONSTANT, int(m[1], 16))
        if m := re.fullmatch(r"(-?(?:0x[0-9a-fA-F]+|\d+))U?", text):
            return self.value(width, CONSTANT, int(m[1], 0) & (1 << 8 * width) - 1)
        if text in self.params:
            return self.value(width, PARAM_ADDRESS, self.params[text])
        if text == "__dynamic_shmem__0":
            return self.value(width, SHARED_ADDRESS, 0)
        slot, actual = self.register(text)
        if actual != width:
            raise PtxError(f"{text} has {actual} bytes, not {width}")
        return slot

    def address(self, text: str, width: int) -> tuple[int, int]:
        """(slot of the base, offset) of ``[base+offset]``."""
        m = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
        if m is None:
            raise PtxError(f"address {text}")
        return self.operand(m[1], width), int(m[2] or "0", 0)

    def add_list(self, slots: list[int]) -> tuple[int, int]:
        self.lists += slots
        return len(self.lists) - len(slots), len(slots)

    def emit(
        self,
        op: str,
        slots: tuple[int, ...] = (),
        guard: int = -1,
        negated: int = 0,
        line: int = 0,
        items: list[int] | None = None,
        imm: tuple[int, int] = (0, 0),
    ) -> None:
        number = self.op(op)
        if number < 0:
            raise PtxError(f"the emulator has no {op}")
        start, count = self.add_list(items) if items else (-1, 0)
        slots = (*slots, *[-1] * (8 - len(slots)))
        self.rows.append((number, guard, negated, slots, start, count, -1, line, imm))

    # ---------------------------------------------------------------- instructions

    def instruction(self, name: str, args: list[str], guard: int, negated: int, line: int) -> None:
        def emit(op: str, *slots: int, **more: object) -> None:
            self.emit(op, slots, guard, negated, line, **more)

        parts = name.split(".")
        if NOTHING.match(name):
            return
        if parts[0] == "bra":
            self.branches.append((len(self.rows), self.scopes[-1], args[0]))
            emit("bra")
        elif parts[0] in ("ret", "exit"):
            emit("ret")
        elif parts[0] in ("trap",):
            emit("trap")
        elif parts[0] in ("ld", "st"):
            self.memory(name, args, emit)
        elif parts[0] == "wgmma":
            self.wgmma(name, args, emit)
        elif parts[0] == "mbarrier":
            self.mbarrier(name, args, emit)
        elif name.startswith("cp.async.bulk.tensor") and ".global.tile.mbarrier" in name:
            target, offset = self.address(args[0], 4)
            tensor_map, coordinates = split_operands(args[1][1:-1])
            barrier, barrier_offset = self.address(args[2], 4)
            emit(
                "tensor_copy", target, self.operand(tensor_map, 8), barrier,
                items=[self.operand(x, 4) for x in split_operands(coordinates[1:-1])],
                imm=(offset, barrier_offset),
            )  # fmt: skip
        elif parts[0] in ("bar", "barrier"):
            threads = self.operand(args[1], 4) if len(args) > 1 else -1
            emit("bar", self.operand(args[0], 4), threads, imm=(int("arrive" not in parts), 0))
        elif name == "elect.sync":
            lane, predicate = args[0].split("|")
            emit(name, self.operand(lane, 4) if lane != "_" else -1, self.operand(predicate, 1))
        elif parts[0] == "vote":
            emit(
                name, self.operand(args[0], 4 if "ballot" in parts else 1), self.operand(args[1], 1)
            )
        elif parts[0] == "shfl":
            emit(name, *(self.operand(x, 4) for x in args[:4]))
        elif parts[0] == "mov" and any(x.startswith("{") for x in args):
            wide, half = width_of(parts[1]), width_of(parts[1]) // 2
            suffix = "64" if wide == 8 else ""
            if args[0].startswith("{"):
                low, high = split_operands(args[0][1:-1])
                emit(
                    "split" + suffix,
                    self.operand(low, half),
                    self.operand(high, half),
                    self.operand(args[1], wide),
                )
            else:
                low, high = split_operands(args[1][1:-1])
                emit(
                    "join" + suffix,
                    self.operand(args[0], wide),
                    self.operand(low, half),
                    self.operand(high, half),
                )
        else:
            if name in ("cvt.s32.s8", "cvt.u32.u8") and self.register(args[1])[1] == 4:
                emit(name + "@4", self.operand(args[0], 4), self.operand(args[1], 4))
            else:
                emit(name, *self.plain(name, parts, args))

    def plain(self, name: str, parts: list[str], args: list[str]) -> list[int]:
        """Slots of an arithmetic instruction: the type at its end is that of its sources."""
        width = width_of(parts[-1])
        if name == "prmt.b32":
            return [self.operand(x, 4) for x in args]
        if parts[0] == "setp":
            return [self.operand(args[0], 1), *(self.operand(x, width) for x in args[1:])]
        if parts[0] == "selp":
            return [*(self.operand(x, width) for x in args[:3]), self.operand(args[3], 1)]
        if parts[0] == "cvt":
            source = width
            target = 4 if "x2" in parts[-2] else width_of(parts[-2])
            return [self.operand(args[0], target), *(self.operand(x, source) for x in args[1:])]
        if parts[0] in ("shl", "shr"):
            return [
                self.operand(args[0], width),
                self.operand(args[1], width),
                self.operand(args[2], 4),
            ]
        if "wide" in parts:
            slots = [self.operand(args[0], 2 * width), *(self.operand(x, width) for x in args[1:3])]
            return slots + [self.operand(x, 2 * width) for x in args[3:]]
        return [self.operand(x, width) for x in args]

    def memory(self, name: str, args: list[str], emit: Callable[..., None]) -> None:
        name = CACHE_HINTS.sub("", name)
        m = re.fullmatch(r"(ld|st)\.(param|global|shared)(?:::cta)?(?:\.v(\d))?\.(\w+)", name)
        if m is None:
            raise PtxError("kind of access")
        kind, space, _, element = m.groups()
        where, values = (args[1], args[0]) if kind == "ld" else args[:2]
        names = split_operands(values[1:-1]) if values.startswith("{") else [values]
        items = [self.operand(x, width_of(element)) for x in names]
        op = f"{kind}.{space}.{element}"
        if space == "param":
            base, _, offset = where[1:-1].partition("+")
            emit(op, items=items, imm=(self.params[base] + int(offset or 0), 0))
        else:
            slot, offset = self.address(where, 8 if space == "global" else 4)
            emit(op, slot, items=items, imm=(offset, 0))

    def mbarrier(self, name: str, args: list[str], emit: Callable[..., None]) -> None:
        if ".init" in name:
            slot, offset = self.address(args[0], 4)
            emit("mbarrier.init", slot, self.operand(args[1], 4), imm=(offset, 0))
        elif ".try_wait" in name:
            slot, offset = self.address(args[1], 4)
            emit(
                "mbarrier.try_wait", self.operand(args[0], 1), slot, self.operand(args[2], 4),
                imm=(offset, int(len(args) > 3)),
            )  # fmt: skip
        elif ".arrive" in name:
            if args[0] == "_" or not args[0].startswith("["):
                args = args[1:]
            slot, offset = self.address(args[0], 4)
            count = self.operand(args[1], 4) if len(args) > 1 else -1
            op = "mbarrier.arrive.expect_tx" if "expect_tx" in name else "mbarrier.arrive"
            emit(op, slot, count, imm=(offset, 0))
        elif ".expect_tx" in name:
            slot, offset = self.address(args[0], 4)
            emit("mbarrier.expect_tx", slot, self.operand(args[1], 4), imm=(offset, 0))
        else:
            raise PtxError("kind of mbarrier")

    def wgmma(self, name: str, args: list[str], emit: Callable[..., None]) -> None:
        if "commit_group" in name:
            return emit("wgmma.commit")
        if "wait_group" in name:
            return emit("wgmma.wait", imm=(int(args[0]), 0))
        m = re.search(r"\.m64n(\d+)k\d+\.(?:satfinite\.)?(s32|f32)\.(\w+)\.(\w+)$", name)
        if m is None:
            raise PtxError("kind of wgmma")
        n, (kind_a, kind_b) = int(m[1]), (KINDS[m[3]], KINDS[m[4]])
        items = [self.operand(x, 4) for x in split_operands(args[0][1:-1])]
        in_registers = args[1].startswith("{")
        a = -1
        if in_registers:
            items += [self.operand(x, 4) for x in split_operands(args[1][1:-1])]
        else:
            a = self.operand(args[1], 8)
        signs, transposed = args[4:6], [int(x) for x in args[6:]]
        if any(sign != "1" for sign in signs):
            raise PtxError("negated operands")
        if m[2] == "s32" and kind_a < 2 and "satfinite" not in name:
            raise PtxError("sums that wrap around")
        transpose_a, transpose_b = (0, *transposed)[-2:] if transposed else (0, 0)
        kinds = kind_a | kind_b << 4 | in_registers << 8 | transpose_a << 9 | transpose_b << 10
        return emit(
            "wgmma", a, self.operand(args[2], 8), self.operand(args[3], 1), items=items,
            imm=(n | kinds << 16, 0),
        )  # fmt: skip


def split_operands(text: str) -> list[str]:
    """Splits at commas outside of braces and brackets."""
    found, depth, start = [], 0, 0
    for n, character in enumerate(text):
        if character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
        elif character == "," and depth == 0:
            found.append(text[start:n])
            start = n + 1
    found.append(text[start:])
    return [x for x in map(str.strip, found) if x]
