"""What a program's devices send one another, read from its HLO text; not a test by itself.

Counted is what compilers for GPUs and TPUs make of what the partitioner wrote, and XLA's CPU does not: of
a sum of which devices take parts, these are summed and sent (reduce-scatter); sums over one axis and then
another are one; of sums that are added, the sum is sent once. XLA's CPU also sends bfloat16 as float32:
`PARTITIONED` are the options with which it writes the program as it is before that.
"""

import re
from collections import defaultdict
from math import prod
from typing import NamedTuple

SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", re.MULTILINE)
KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
MOVES = ("bitcast", "convert", "copy", "get-tuple-element", "reshape", "transpose")
PARTITIONED = {"xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": "all-reduce-promotion"}


class Instruction(NamedTuple):
    name: str
    shape: str
    kind: str
    rest: str

    @property
    def operands(self):
        return re.findall(r"%([\w.\-#]+)", self.rest.split(")")[0])

    @property
    def size(self):
        shapes = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", self.shape)
        return sum(SIZES[dtype] * prod(map(int, re.findall(r"\d+", sizes))) for dtype, sizes in shapes)


class Computation:
    """Instructions by name, and by the names of what they read."""

    def __init__(self, text):
        self.named = {found[0]: Instruction(*found) for found in INSTRUCTION.findall(text)}
        # Since jax 0.12 an operand is also written as a part of a tuple, %name#1, without an instruction.
        for name, index in set(re.findall(r"%([\w.\-]+)#(\d+)", text)):
            shape = re.findall(r"\w+\[[\d,]*\]", self.named[name].shape)[int(index)]
            part = Instruction(f"{name}#{index}", shape, "get-tuple-element", f"%{name}), index={index}")
            self.named[part.name] = part
        self.users = defaultdict(list)
        for one in self.named.values():
            for name in one.operands:
                self.users[name].append(one)
        # What is only put in a tuple and taken out again is moved.
        for packed in [one for one in self.named.values() if one.kind == "tuple" and self.users[one.name]]:
            taken = self.users[packed.name]
            if all(one.kind == "get-tuple-element" for one in taken):
                for name in packed.operands:
                    self.users[name].remove(packed)
                for one in taken:
                    name = packed.operands[int(re.search(r"index=(\d+)", one.rest)[1])]
                    self.users[name].append(one)
                    self.named[one.name] = one._replace(rest=f"%{name})")

    def reader(self, name):
        """The name of a value where it is moved to, and what reads it there; None where more do."""
        while len(self.users[name]) == 1 and self.users[name][0].kind in MOVES:
            name = self.users[name][0].name
        return name, self.users[name][0] if len(self.users[name]) == 1 else None

    def is_sum(self, name):
        """Whether a value is an all-reduce, or an addition of values that are; read nowhere else."""
        one = self.named.get(name)
        if one is None or len(self.users[name]) > 1:
            return False
        if one.kind in MOVES:
            return self.is_sum(one.operands[0])
        return one.kind == "all-reduce" or (one.kind == "add" and all(map(self.is_sum, one.operands)))

    def send_sum(self, one, joined, devices):
        """Bytes that an all-reduce sends, by kind; `joined` are the devices of sums that came before."""
        group = joined.pop(one.name, 1) * count_group(one, devices)
        name, reader = self.reader(one.name)
        if reader and reader.kind == "all-reduce" and group * count_group(reader, devices) <= devices:
            joined[reader.name] = group
            return {}
        while reader and reader.kind == "add" and all(map(self.is_sum, reader.operands)):
            if name != reader.operands[-1]:
                return {}  # that of the last operand is counted
            name, reader = self.reader(reader.name)
        parts, users = 1, self.users[name]
        if users and all(user.kind == "dynamic-slice" for user in users):
            parts = min(self.named[name].size / max(user.size for user in users), group)
        sent = {"all-reduce": 2 * one.size / parts * (1 - parts / group)}
        return sent | ({"reduce-scatter": one.size * (1 - 1 / parts)} if parts > 1 else {})


def count_group(one, devices):
    """How many devices take part together, in one of the notations of HLO."""
    if "replica_groups={}" in one.rest:
        return devices
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", one.rest):
        return len(listed[1].split(","))
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", one.rest):
        return int(counted[1])
    sizes, named = re.search(r"replica_groups=mesh\[(.*?)\].*? \{(.*?)\}", one.rest).groups()
    sizes = dict(re.findall(r"(\w+)'?=(\d+)", sizes))
    return prod(int(sizes[name]) for name in re.findall(r"\w+", named))


def count_sent(text, devices):
    """Bytes that each device sends, on average, by kind of instruction; loops count as often as they run."""
    found = COMPUTATION.findall(text)
    computations = {name: Computation(lines) for _, name, lines in found}

    def count_trips(loop):
        if known := re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', loop.rest):
            return int(known[1])
        condition = computations[re.search(r"condition=%?([\w.\-]+)", loop.rest)[1]].named.values()
        (limit,) = (one.rest for one in condition if one.kind == "constant" and one.shape.startswith("s32[]"))
        return int(limit.split(")")[0])

    def walk(name):
        computation, totals, joined = computations[name], defaultdict(float), {}
        for one in computation.named.values():
            parts = []
            if one.kind == "all-reduce":
                parts = [computation.send_sum(one, joined, devices)]
            elif one.kind == "collective-permute":
                pairs = re.findall(r"\{(\d+),(\d+)\}", one.rest.split("source_target_pairs=")[1])
                parts = [{one.kind: one.size * sum(source != target for source, target in pairs) / devices}]
            elif one.kind == "reduce-scatter":  # written as such; XLA's CPU makes none
                parts = [{one.kind: one.size * (count_group(one, devices) - 1)}]
            elif one.kind in KINDS:
                parts = [{one.kind: one.size * (1 - 1 / count_group(one, devices))}]
            elif one.kind in ("call", "conditional", "fusion", "while"):
                called = re.findall(r"[\w.\-]+", one.rest.partition(")")[2].split("metadata=")[0])
                parts = [walk(inner) for inner in called if inner in computations]
            for part in filter(None, parts):
                times = count_trips(one) if one.kind == "while" else 1
                for kind, count in part.items():
                    totals[kind] += times * count
        return {kind: count for kind, count in totals.items() if count}

    return walk(next(name for is_entry, name, _ in found if is_entry))


def count_kinds(text):
    """How many instructions of each kind send anything."""
    counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in KINDS}
    return {kind: count for kind, count in counts.items() if count}
