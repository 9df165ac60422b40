"""Every reader of JSON: whatever a file says at any place, it is read or refused in one error of its own."""

import copy
import fnmatch
import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from regard.engine.flash import measurements
from regard.interop import huggingface, huggingface_configs
from regard.interop.weight_files import WeightFileError, open_weights
from regard.training import checkpoints, locks, loop, runs, tasks, token_files
from regard.training.history import training_document
from regard.training.tasks import text

ABSENT = object()
VALUES = (ABSENT, None, [], {}, 3, "x")


class RefusedError(Exception):
    """What stands for a reader's way to refuse a file where that is no error."""


@dataclass(frozen=True)
class Reader:
    """A sound document, how to read another in its place, and which changes of it mean something, too."""

    document: Any
    read: Callable[[Any], Any]
    error: type[Exception] = RefusedError
    free: tuple[str, ...] = ()


def list_places(document, place=()):
    yield place
    entries = document.items() if isinstance(document, dict) else ()
    entries = enumerate(document) if isinstance(document, list) else entries
    for name, entry in entries:
        yield from list_places(entry, (*place, name))


def mutate(document):
    """Each change at one place, in words, and the document with it."""
    for place in list_places(document):
        for value in VALUES[not place :]:
            root = changed = [copy.deepcopy(document)]
            *path, last = (0, *place)
            for name in path:
                changed = changed[name]
            if value is ABSENT:
                del changed[last]
            else:
                changed[last] = value
            if json.dumps(root) != json.dumps([document]):
                said = "absent" if value is ABSENT else json.dumps(value)
                yield f"{'/'.join(map(str, place))}={said}", root[0]


def demand(found):
    if not found:
        raise RefusedError


def seal(index, body):
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    index.write_text(json.dumps({"sha256": digest, "body": body}))


READERS = {}


def reader(make):
    READERS[make.__name__] = make
    return make


@reader
def checkpoint(folder):
    """Of two, the newer one is what it says, or damaged and skipped."""
    for step in (3, 7):
        checkpoints.save(folder, step, {"a": np.ones(2)}, {"seconds": 1.5})
    index = folder / "00000007" / "checkpoint.json"

    def read(body):
        seal(index, body)
        newest, damaged = checkpoints.load_newest(folder, skip_damaged=True)
        assert newest is not None
        assert [newest.path.name, *damaged] == (["00000003", index.parent] if damaged else ["00000007"])
        for error in damaged.values():
            assert str(index.parent) in str(error)
            raise error

    free = ("record/*", "record={}", "step=3", "arrays={}", "arrays/a=absent", "arrays/a/0=[[]]")
    free += ("arrays/a/0/0=3", "arrays/a/0/0=absent", "files={}", "files/*=absent")
    return Reader(json.loads(index.read_text())["body"], read, checkpoints.CheckpointError, free)


@reader
def record_of_sessions(folder):
    """What a checkpoint says of the sessions before, which training goes on from."""
    clocks = {"seconds": 1.5, "compile_seconds": 2.5, "elapsed_seconds": 4.5}
    path = checkpoints.save(folder, 7, {"a": np.ones(2)}, {})
    body = json.loads((path / "checkpoint.json").read_text())["body"]

    def read(record):
        seal(path / "checkpoint.json", body | {"record": record})
        loop._read_record(runs.Run(folder, tasks.Copy(), 0, checkpoints.load(path)))

    document = clocks | {"held_out": {"loss": 0.5}}
    return Reader(document, read, checkpoints.CheckpointError, ("*=absent", "={}", "*s=3", "held_out={}"))


@reader
def digests_of_a_process(folder):
    """What each of several processes writes beside a checkpoint that they saved together."""
    path = checkpoints.save(folder, 7, {"a": np.ones(2)}, {})
    files = json.loads((path / "checkpoint.json").read_text())["body"]["files"]

    def read(digests):
        seal(path / "digests-1.json", digests)
        checkpoints.load(path)

    digests = {name: files[name][1] for name in sorted(files)[:3]}
    return Reader(digests, read, checkpoints.CheckpointError, ("*=absent", "={}"))


@reader
def config_of_a_run(folder):
    task = tasks.Copy()
    runs.open_run(folder, task).begin({})
    path = folder / "config.json"

    def read(config):
        path.write_text(json.dumps(config))
        runs.open_run(folder, task)

    free = ("settings/*=absent", "settings={}", "settings/*={}", "versions/*=absent", 'versions/*="x"')
    free += ("versions={}", "kept=absent", "mesh=absent", 'mesh="x"', "continued_from=absent")
    free += ("outer=absent", 'outer="x"', "settings/cadence/*=[0-9]*")
    return Reader(json.loads(path.read_text()), read, runs.RunError, free)


@reader
def metrics_of_a_run(folder):
    path = folder / "metrics.jsonl"
    heads = {"step": 3, "split": "heads", "entropy": {"blocks.0": [0.5, None]}}
    lines = [{"step": 3, "loss": 0.5, "seconds": 1.5}, heads]

    def read(lines):
        lines = lines if isinstance(lines, list) else [lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        training_document(folder)

    free = ("=[[]]", "[01]=absent", "0/*=null", "0/*=3", "0/[ls]*=absent", "1/*")
    return Reader(lines, read, ValueError, free)


@reader
def facts_of_a_corpus(folder):
    """Whatever else it says, it is not what is there."""
    facts = {"documents": [7, 2], "sha256": ["a", "b"], "tokenizer": "c"}
    return Reader(facts, lambda found: text._demand_same_facts(json.dumps(found), facts), ValueError)


@reader
def record_of_tokens(folder):
    for name in token_files.SIDES:
        (folder / name).write_bytes(b"tokens")
    facts = {name: [7, 2] for name in ("documents", "bytes", "tokens")}
    record = {"facts": facts | {"sha256": ["a", "b"], "tokenizer": "c"}, "overlap": 0.5, "skipped": ["d"]}
    sizes = dict.fromkeys(token_files.SIDES, 6)

    def read(document):
        (folder / token_files.RECORD).write_text(json.dumps(document))
        demand(token_files._read_record(folder, "e"))

    free = ("record/facts/*/[01]=3", 'record/facts/sha256/*="x"', "record/facts/tokenizer=null")
    free += ('record/facts/tokenizer="x"', "record/overlap=3", "record/skipped=[[]]", "record/skipped/*")
    return Reader({"inputs": "e", "sizes": sizes, "record": record}, read, free=free)


@reader
def holder_of_a_lock(folder):
    def read(holder):
        (folder / locks.HOLDER).write_text(json.dumps(holder))
        demand(locks._read_holder(folder) != "another process")

    return Reader({"host": "a", "process": 7, "since": "b"}, read, free=("?*",))


@reader
def measurements_of_a_device(folder):
    path = folder / "tuning.json"
    measurements.write_tuning(path, measurements.Tuning())

    def read(document):
        path.write_text(json.dumps(document))
        measurements.write_tuning(folder / "other.json", measurements.read_tuning(path))

    free = ("={}", "*=absent", "*=null", "*/*=3", f"{measurements.device_key()}={{}}")
    return Reader(json.loads(path.read_text()), read, UserWarning, free)


def write_weights(path, header):
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + np.ones(2, np.float32).tobytes())


HEADER = {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@reader
def header_of_weights(folder):
    path = folder / "model.safetensors"

    def read(header):
        write_weights(path, header)
        weights = open_weights(path)
        for name in weights:
            weights.read(name)

    return Reader(HEADER, read, WeightFileError, ("__metadata__*",))


@reader
def config_of_a_pretrained_model(folder):
    sizes = {"hidden_size": 6, "num_attention_heads": 3, "intermediate_size": 11, "num_hidden_layers": 1}
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 64}
    more = {"vocab_size": 13, "max_position_embeddings": 8}

    def read(config):
        (folder / "config.json").write_text(json.dumps(config))
        huggingface_configs.read_config(folder)

    return Reader({"model_type": "llama", "rope_scaling": rope, **sizes, **more}, read, ValueError, ("?*",))


@reader
def tokens_that_end_a_text(folder):
    path = folder / huggingface.DEFAULTS

    def read(document):
        path.write_text(json.dumps(document))
        generation = huggingface.read_object(path)
        loaded = huggingface.Pretrained(None, None, None, "llama", {}, folder, generation)
        for name in ("eos_token_id", "bos_token_id"):
            loaded.name_tokens(name)

    free = ("=*", "*=absent", "*=null", "*_id=[[]]", "*=3")
    return Reader({"eos_token_id": [1, 2], "bos_token_id": 0}, read, ValueError, free)


@pytest.mark.parametrize("name", READERS)
def test_no_change_of_a_document_raises_anything_else(name, tmp_path):
    made = READERS[name](tmp_path)
    made.read(made.document)
    changes = list(mutate(made.document))
    assert len(changes) > 5
    for change, document in changes:
        try:
            made.read(document)
        except Exception as error:
            assert type(error) is made.error, f"{change}: {type(error).__name__}: {error}"
            if made.error is not RefusedError:
                assert len(str(error)) > 20, change
        else:
            assert any(fnmatch.fnmatchcase(change, pattern) for pattern in made.free), f"{change} is read"
