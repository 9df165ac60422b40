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
SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+?)(-start)?\((.*)")
KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
MOVES = ("bitcast", "convert", "copy", "reshape", "transpose")
PARTITIONED = {"xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": "all-reduce-promotion"}


class Instruction(NamedTuple):
    name: str
    shape: str
    kind: str
    starts: str | None
    rest: str

    @property
    def operands(self):
        return re.findall(r"%([\w.\-]+)", self.rest.split(")")[0])

    @property
    def size(self):
        shapes = ((SIZES[dtype], sizes.split(",")) for dtype, sizes in SHAPE.findall(self.shape))
        return sum(width * prod(int(size) for size in sizes if size) for width, sizes in shapes)


class Computation:
    """Instructions by name, and by the names of what they read."""

    def __init__(self, lines):
        found = (Instruction(*match.groups()) for match in map(INSTRUCTION.match, lines) if match)
        self.named, self.users = {one.name: one for one in found}, defaultdict(list)
        for one in self.named.values():
            for name in one.operands:
                self.users[name].append(one)

    def reader(self, name):
        """The only reader of a value, and what is read, wherever the value is moved; None if it has more."""
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

    def send_sum(self, one, group, joined, devices):
        """Bytes that an all-reduce sends, by kind; `joined` are the devices of sums that came before."""
        group *= joined.pop(one.name, 1)
        name, reader = self.reader(one.name)
        if reader and reader.kind == "all-reduce" and group * count_group(reader.rest, devices) <= devices:
            joined[reader.name] = group
            return {}
        while reader and reader.kind == "add" and all(map(self.is_sum, reader.operands)):
            if name != reader.operands[-1]:
                return {}  # that of the last operand is counted
            name, reader = self.reader(reader.name)
        parts = 1
        if self.users[name] and all(user.kind == "dynamic-slice" for user in self.users[name]):
            parts = min(self.named[name].size / max(user.size for user in self.users[name]), group)
        alike = group / parts
        sent = {"all-reduce": 2 * one.size / parts * (alike - 1) / alike}
        return sent if parts == 1 else {**sent, "reduce-scatter": one.size * (parts - 1) / parts}


def split_computations(text):
    """Lines of each computation by its name, and the name of the one that runs first."""
    found, entry, lines = {}, None, []
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith(" "):
            found[head[2]] = lines = []
            entry = head[2] if head[1] else entry
        else:
            lines.append(line)
    return {name: Computation(lines) for name, lines in found.items()}, entry


def count_group(rest, devices):
    """How many devices take part together, in one of the notations of HLO."""
    if "replica_groups={}" in rest:
        return devices
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(listed[1].split(","))
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(counted[1])
    sizes, named = re.search(r"replica_groups=mesh\[(.*?)\].*? \{(.*?)\}", rest).groups()
    sizes = dict(re.findall(r"(\w+)'?=(\d+)", sizes))
    return prod(int(sizes[name]) for name in re.findall(r"\w+", named))


def count_trips(loop, computations):
    """How often a loop runs: as XLA wrote, or as its condition says."""
    if known := re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', loop.rest):
        return int(known[1])
    condition = computations[re.search(r"condition=%?([\w.\-]+)", loop.rest)[1]].named.values()
    (limit,) = (one.rest for one in condition if one.kind == "constant" and one.shape.startswith("s32[]"))
    return int(limit.split(")")[0])


def count_sent(text, devices):
    """Bytes that each device sends, on average, by kind of instruction; loops count as often as they run."""
    computations, entry = split_computations(text)

    def walk(name):
        computation, totals, joined = computations[name], defaultdict(float), {}
        for one in computation.named.values():
            inner, sent = [], {}
            if one.kind == "all-reduce":
                sent = computation.send_sum(one, count_group(one.rest, devices), joined, devices)
            elif one.kind == "collective-permute":
                size = one.size // 2 if one.starts else one.size  # a start names what it sends and receives
                pairs = re.findall(r"\{(\d+),(\d+)\}", one.rest.split("source_target_pairs=")[1])
                sent = {one.kind: size * sum(source != target for source, target in pairs) / devices}
            elif one.kind in KINDS:
                group = count_group(one.rest, devices)
                sent = {one.kind: one.size * (group - 1) / group}
            elif one.kind == "while":
                inner = [re.search(r"body=%?([\w.\-]+)", one.rest)[1]]
            elif one.kind in ("call", "fusion"):
                inner = re.findall(r"(?:to_apply|calls)=%?([\w.\-]+)", one.rest)
            elif one.kind == "conditional":
                branches = re.search(r"branch_computations=\{(.*?)\}", one.rest)
                inner = re.findall(r"%?([\w.\-]+)", branches[1]) if branches else []
                inner += re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", one.rest)
            elif one.kind == "reduce-scatter":
                raise NotImplementedError(one.kind)
            for part in [sent, *map(walk, inner)]:
                times = count_trips(one, computations) if one.kind == "while" and part else 1
                for kind, count in part.items():
                    totals[kind] += times * count
        return {kind: count for kind, count in totals.items() if count}

    return walk(entry)


def count_kinds(text):
    """How many instructions of each kind send anything."""
    counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in (*KINDS, "reduce-scatter")}
    return {kind: count for kind, count in counts.items() if count}
