"""What a compiled program's devices send one another, read from its HLO text; not a test by itself."""

import re
from math import prod

SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


def count_bytes(shapes):
    return sum(
        SIZES[dtype] * prod(int(size) for size in sizes.split(",") if size)
        for dtype, sizes in SHAPE.findall(shapes)
    )


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
    return found, entry


def count_group(line, devices):
    """How many devices take part together, in one of the notations of HLO."""
    if "replica_groups={}" in line:
        return devices
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(listed[1].split(","))
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(counted[1])
    sizes, named = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line).groups()
    sizes = dict(pair.split("=") for pair in sizes.split(","))
    return prod(int(sizes[name]) for name in named.split(","))


def sent_by(line, devices):
    """Bytes that a device sends on average in one instruction, by the kind of instruction."""
    match = re.search(
        r"= (.*?) (collective-permute|all-to-all|all-reduce|all-gather|reduce-scatter)(-start)?\(", line
    )
    if not match:
        return None
    shapes, kind, starts = match[1], match[2], match[3]
    total = count_bytes(shapes)
    if kind == "collective-permute":
        total = total // 2 if starts else total  # a start names what it sends and what it receives
        pairs = re.findall(r"\{(\d+),(\d+)\}", re.search(r"source_target_pairs=\{(\{.*?\})\}", line)[1])
        return kind, total * sum(one != other for one, other in pairs) / devices
    if kind in ("all-to-all", "all-gather", "all-reduce"):
        size = count_group(line, devices)
        return kind, total * (size - 1) / size * (2 if kind == "all-reduce" else 1)
    raise NotImplementedError(kind)


def count_sent(text, devices):
    """Bytes that each device sends, on average, by kind of instruction; loops count as often as they run."""
    computations, entry = split_computations(text)

    def walk(name):
        totals = {}
        for line in computations[name]:
            found = sent_by(line, devices)
            inner, times = [], 1
            if found:
                totals[found[0]] = totals.get(found[0], 0) + found[1]
                continue
            if " while(" in line:
                known = re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', line)
                inner = [re.search(r"body=%?([\w.\-]+)", line)[1]]
                times = int(known[1]) if known else None
            elif " call(" in line or " fusion(" in line:
                inner = re.findall(r"(?:to_apply|calls)=%?([\w.\-]+)", line)
            elif " conditional(" in line:
                branches = re.search(r"branch_computations=\{(.*?)\}", line)
                inner = re.findall(r"%?([\w.\-]+)", branches[1]) if branches else []
                inner += re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)
            for child in inner:
                for kind, count in walk(child).items():
                    assert times is not None, f"nobody knows how often this loop sends: {line[:200]}"
                    totals[kind] = totals.get(kind, 0) + times * count
        return totals

    return walk(entry)


def count_kinds(text):
    """How many instructions of each kind send anything."""
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in kinds}
    return {kind: count for kind, count in counts.items() if count}
