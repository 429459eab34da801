"""Damaged, forged and foreign checkpoints: each is refused by name, or gives what was saved or could have been."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign.cases import (
    ADAPTED,
    CLASSES,
    FURTHER,
    OTHER,
    RESUMED,
    Tally,
    adapted,
    answer,
    calibrated,
    fitted,
    network,
    network_of,
    same,
    seeded,
)

import laplace_plus as lp
from laplace_plus import io
from laplace_plus.errors import CheckpointError, LaplacePlusError, UnsupportedError
from laplace_plus.io import checkpoints as stages_of_work

pytestmark = pytest.mark.slow

Files = tuple[bytes, bytes]  # description and tensors
ROOM = 64 << 20
"""Address space that one load may take on top of what the process has, in bytes; the files have some 10 KiB."""
LIMIT = 20
"""Seconds for one load."""
SAVED = [*CLASSES, *OTHER, *FURTHER, "calibrated Full", "calibrated KFAC"]
PER_CLASS = {"damaged": 110, "forged header": 90, "forged tensors": 70}
PER_WORK = {"damaged": 50, "forged header": 35, "forged tensors": 25}


# -- mutations ---------------------------------------------------------------------------------------------------------


def damaged(files: Files, draw: random.Random) -> Files:
    """Bits flipped, bytes overwritten, cut off, removed, inserted or moved, in either file."""
    which = draw.randrange(2)
    raw = bytearray(files[which])
    start, size = draw.randrange(len(raw)), draw.randint(1, 64)
    way = draw.randrange(7)
    if way == 0:
        for _ in range(draw.randint(1, 8)):
            raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    elif way == 1:
        raw[start : start + size] = draw.randbytes(len(raw[start : start + size]))
    elif way == 2:
        raw[start : start + size] = bytes(len(raw[start : start + size]))
    elif way == 3:
        del raw[start:]
    elif way == 4:
        del raw[start : start + size]
    elif way == 5:
        raw[start:start] = draw.randbytes(size)
    else:
        raw[start : start + size], raw[:size] = raw[:size], raw[start : start + size]
    return (bytes(raw), files[1]) if which == 0 else (files[0], bytes(raw))


def sign(document: dict[str, Any], tensors: bytes) -> Files:
    """The two files with all checksums right."""
    document = {key: value for key, value in document.items() if key != "checksum"}
    document["tensors_sha256"] = hashlib.sha256(tensors).hexdigest()
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["checksum"] = hashlib.sha256(canonical.encode()).hexdigest()
    return (json.dumps(document, indent=2) + "\n").encode(), tensors


def paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    yield from [path] if path else []
    for key, child in children:
        yield from paths(child, (*path, key))


VALUES: list[Any] = [None, -1, 0, 1, 2, 3, 10**15, 2**63, 2**70, 0.5, -0.5, 1e308, 1e-320, "?", "", "Full", "KFAC"]
VALUES += ["float32", "complex64", [], {}, [[0]], [0], [10**9, 10**9], {"name": "Full"}, {"a": 1}, True, False]
VALUES += ["../../x", "x" * 5000, [[[[[[]]]]]], list(range(300))]


def forged_header(files: Files, draw: random.Random) -> Files:
    """Entries of the description replaced, removed, added, swapped or repeated."""
    document = json.loads(files[0])
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        places = [path for path in paths(document) if path[0] in ("header", "tensors", "package_version", "version")]
        path = draw.choice(places)
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        way, value = draw.randrange(6), parent[path[-1]]
        if way == 0:
            del parent[path[-1]]
        elif way == 1 and isinstance(parent, dict):
            parent[draw.choice(["a", "rank", "calibration", "groups", *map(str, parent)])] = copy.deepcopy(
                draw.choice(VALUES)
            )
        elif way == 2 and isinstance(parent, list):
            parent.insert(path[-1], draw.choice([value, copy.deepcopy(draw.choice(VALUES))]))
        elif way == 3 and isinstance(value, (int, float)):
            parent[path[-1]] = draw.choice([-value, value + 1, value * 1e9, str(value), value - 1])
        elif way == 4:
            other = draw.choice(places)
            source = document
            for key in other:
                source = source[key] if not isinstance(source, (dict, list)) or source else source
                if not isinstance(source, (dict, list)):
                    break
            parent[path[-1]] = json.loads(json.dumps(source))
        else:
            parent[path[-1]] = copy.deepcopy(draw.choice(VALUES))
    return sign(document, files[1])


TYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1, "C64": 8, "Q99": 3}


def forged_tensors(files: Files, draw: random.Random) -> Files:
    """Tensors' values, names, types, shapes or places in the file changed, and listed so in the description."""
    document, raw = json.loads(files[0]), files[1]
    length = int.from_bytes(raw[:8], "little")
    table, content = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
    names = [name for name in table if name != "__metadata__"]
    if not names:
        return forged_header(files, draw)
    name = draw.choice(names)
    entry, listed = table[name], document["tensors"].get(name)
    start, end = entry["data_offsets"]
    way = draw.randrange(11)
    prefix = None
    if way <= 3:  # values
        width = {"F64": 8, "F32": 4}.get(entry["dtype"], 1)
        numbers = [float("nan"), float("inf"), -1.0, 0.0, 1e300, 1e-300, 7.0]
        for _ in range(draw.choice([1, 1, 1000])):
            if end - start < width:
                break
            at = start + width * draw.randrange((end - start) // width)
            value = torch.tensor([draw.choice(numbers)], dtype=torch.float64 if width == 8 else torch.float32)
            content[at : at + width] = value.view(torch.uint8).numpy().tobytes() if width > 1 else draw.randbytes(1)
    elif way == 4:
        content[start:end] = draw.randbytes(end - start)
    elif way == 5:
        entry["shape"] = draw.choice(
            [[*entry["shape"], 1], entry["shape"][::-1], [1, *entry["shape"]], [10**9], [2**40, 2**40], [0], [-1], []]
        )
    elif way == 6:
        entry["dtype"] = draw.choice(list(TYPES))
    elif way == 7:
        entry["data_offsets"] = draw.choice([[0, end], [start, start], [start, 2**62], [end, start], [0, 8], ["a", 1]])
    elif way == 8:
        document["tensors"].pop(name, None)
        if draw.random() < 0.5:
            del table[name]
    elif way == 9:
        other = draw.choice([*names, "hyper.prior_precision", "vector", "mask.0.weight", "groups.index", "x"])
        table[other], document["tensors"][other] = table.pop(name), document["tensors"].pop(name, listed)
    else:
        prefix = draw.choice([0, 2**62, 2**64 - 1, length - 1, length + 7])
    if name in document["tensors"] and draw.random() < 0.8:
        kinds = {"F64": "float64", "F32": "float32", "I64": "int64", "BOOL": "bool"}
        known = table.get(name, entry)
        document["tensors"][name] = {"dtype": kinds.get(known["dtype"], "float32"), "shape": known["shape"]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return sign(document, (len(text) if prefix is None else prefix).to_bytes(8, "little") + text + bytes(content))


WAYS: dict[str, Callable[[Files, random.Random], Files]] = {
    "damaged": damaged,
    "forged header": forged_header,
    "forged tensors": forged_tensors,
}


# -- one process -------------------------------------------------------------------------------------------------------


class Hang(BaseException):
    """A load that took too long."""


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def memory_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def read_files(path: Path) -> Files:
    return (path / io.HEADER_FILE).read_bytes(), (path / io.TENSORS_FILE).read_bytes()


def write_files(path: Path, files: Files) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / io.HEADER_FILE).write_bytes(files[0])
    (path / io.TENSORS_FILE).write_bytes(files[1])


def use(posterior: Any) -> torch.Tensor:
    """All that a loaded posterior is asked for; LaplacePlusError where its numbers cannot be right."""
    found = answer(posterior)
    inner = getattr(posterior, "posterior", posterior)
    inner.sample(2, generator=seeded())
    inner.summary()
    if isinstance(inner, lp.GaussianPosterior):
        inner.variance()
        try:
            inner.log_marginal_likelihood()
        except UnsupportedError as error:  # of data that nobody has seen
            if "not known" not in str(error):
                raise
    return found


def said(error: BaseException) -> str:
    """An error with those that it came from."""
    own = f"{type(error).__name__}: {error}"
    return own if error.__cause__ is None else f"{own} <- {said(error.__cause__)}"


def judge(load: Callable[[], Any], expected: torch.Tensor, *, signed: bool) -> str:
    """What came of it; outcomes in capitals are violations."""
    used = False
    try:
        with warnings.catch_warnings(), time_limit(), memory_limit():
            warnings.simplefilter("ignore")
            posterior = load()
            used = True
            found = use(posterior)
    except Hang:
        return "HANG"
    except LaplacePlusError as error:
        text = said(error)
        if "alloc" in text or "MemoryError" in text:
            return f"MEMORY: {text[:300]}"
        if isinstance(error, CheckpointError) and not used:
            return "refused"
        if signed and used:
            return "refused when used"
        # Of values that somebody wrote and signed, any error that says what is wrong with them will do.
        if signed:
            return "refused"
        return f"UNTYPED: {text[:300]}"
    except BaseException as error:  # that is the test
        return f"UNTYPED: {'used: ' if used else ''}{said(error)[:300]}"
    if found.shape == expected.shape and same(found, expected, 1e-12):
        return "equal"
    valid = found.shape == expected.shape and bool(torch.isfinite(found).all())
    if bool(((expected.sum(-1) - 1).abs() < 1e-6).all()):  # probabilities
        valid = valid and bool(((found.sum(-1) - 1).abs() < 1e-6).all())
    return "another posterior" if signed and valid else "SILENT"


def make(name: str, net: Any) -> Any:
    return calibrated(name.removeprefix("calibrated "), net) if name.startswith("calibrated") else fitted(name, net)


def checkpoints(name: str, folder: Path, seed: int) -> Tally:
    """Loads of mutated checkpoints of a class."""
    net = network_of(name)
    posterior = make(name, net)
    posterior.save(folder / "good")
    files, expected = read_files(folder / "good"), answer(posterior)
    found = Tally()
    assert judge(lambda: lp.load(folder / "good", net), expected, signed=False) == "equal"
    for kind, count in PER_CLASS.items():
        for number in range(count):
            mutated = WAYS[kind](files, random.Random(f"{seed} {name} {kind} {number}"))
            write_files(folder / "it", mutated)
            signed = kind != "damaged" or mutated == files
            outcome = judge(lambda: lp.load(folder / "it", net), expected, signed=signed)
            found.note(kind, f"{name} {number}", outcome, None if signed else {"refused"})
    return found


@contextmanager
def stages_read() -> Iterator[set[str]]:
    """Names of the stages that work looks into; a later one may make an earlier one needless."""
    names, read = set(), stages_of_work.read

    def reading(path: Path, *args: Any) -> Any:
        names.add(path.name)
        return read(path, *args)

    stages_of_work.read = reading
    try:
        yield names
    finally:
        stages_of_work.read = read


def resumed(name: str, folder: Path, seed: int) -> Tally:
    """Fits, draws, tunings and training that find a mutated stage in their folder."""
    net = network_of(name)

    def run(path: Path | None) -> Any:
        return RESUMED[name](net, path)

    expected = answer(run(folder / "good"))
    stages = sorted(str(file.parent.relative_to(folder / "good")) for file in (folder / "good").rglob(io.HEADER_FILE))
    assert stages and same(answer(run(None)), expected) and same(answer(run(folder / "good")), expected)
    found = Tally()
    for kind, count in PER_WORK.items():
        for number in range(count):
            draw = random.Random(f"{seed} {name} resumed {kind} {number}")
            stage = draw.choice(stages)
            shutil.rmtree(folder / "it", ignore_errors=True)
            shutil.copytree(folder / "good", folder / "it")
            for other in stages:  # a run that was interrupted has some of them
                if other not in (stage, "draws") and draw.random() < 0.5:
                    shutil.rmtree(folder / "it" / other)
            files = read_files(folder / "good" / stage)
            mutated = WAYS[kind](files, draw)
            write_files(folder / "it" / stage, mutated)
            signed = kind != "damaged" or mutated == files
            with stages_read() as looked_at:
                outcome = judge(lambda: run(folder / "it"), expected, signed=signed)
            needed = Path(stage).name in looked_at
            allowed = {"refused"} if needed and not signed else None
            found.note(f"resumed, {kind}", f"{name} {number} {stage}", outcome, allowed)
    return found


def strangers(name: str) -> dict[str, torch.nn.Module]:
    """Other networks than the one that the class was fitted to."""
    others = {
        "other weights": network(1),
        "other width": network(0, 5),
        "single precision": network(),
        "other activation": network(),
        "fewer layers": network()[:4],
    }
    others["other activation"][2] = torch.nn.ReLU()
    if name == ADAPTED:
        others = {title: adapted(net) for title, net in others.items()}
    others["single precision"].float()
    return others


def foreign(_: str, folder: Path, seed: int) -> Tally:
    """Whole files of other posteriors, networks and versions, and halves of two checkpoints."""
    nets = {name: network_of(name) for name in SAVED}
    made = {name: make(name, nets[name]) for name in SAVED}
    for name, posterior in made.items():
        posterior.save(folder / name)
    files = {name: read_files(folder / name) for name in SAVED}
    found = Tally()

    def note(what: str, load: Callable[[], Any], expected: torch.Tensor, allowed: set[str]) -> None:
        kind, detail = what.split(": ")
        found.note(f"foreign, {kind}", detail, judge(load, expected, signed=False), allowed)

    for name in SAVED:
        expected = answer(made[name])
        for title, net in strangers(name).items():
            note(f"{title}: {name}", lambda n=net, p=name: lp.load(folder / p, n), expected, {"refused"})
        for version in (0, 2, "1", None, [1], 1.5):
            document = json.loads(files[name][0])
            write_files(folder / "it", sign({**document, "version": version}, files[name][1]))
            note(f"version: {name} {version}", lambda n=name: lp.load(folder / "it", nets[n]), expected, {"refused"})
        for other in SAVED:
            if other != name:
                write_files(folder / "it", (files[name][0], files[other][1]))
                note(
                    f"halves: {name} with tensors of {other}",
                    lambda n=name: lp.load(folder / "it", nets[n]),
                    expected,
                    {"refused", *(["equal"] if files[name][1] == files[other][1] else [])},
                )
                document = json.loads(files[name][0])
                document["header"]["class"] = json.loads(files[other][0])["header"]["class"]
                write_files(folder / "it", sign(document, files[name][1]))
                outcome = judge(lambda n=name: lp.load(folder / "it", nets[n]), expected, signed=True)
                found.note("foreign, class", f"{other} for {name}", outcome)
        (folder / "it" / io.TENSORS_FILE).unlink()
        note(f"one file: {name}", lambda n=name: lp.load(folder / "it", nets[n]), expected, {"refused"})
    return found


# -- all of it ---------------------------------------------------------------------------------------------------------


JOBS = {"checkpoints": checkpoints, "resumed": resumed, "foreign": foreign}


def work(job: str, name: str, folder: str, seed: int) -> Tally:
    torch.set_num_threads(1)
    sys.setrecursionlimit(1000)
    path = Path(folder) / f"{job} {name} {os.getpid()}"
    path.mkdir()
    return JOBS[job](name, path, seed)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the address space as Linux shows it")
def test_files(tmp_path: Path) -> None:
    seed = int(os.environ.get("CAMPAIGN_SEED", "0"))
    jobs = [
        ("foreign", ""),
        *(("checkpoints", name) for name in SAVED),
        *(("resumed", name) for name in RESUMED),
    ]
    found = Tally()
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for part in pool.map(work, *zip(*jobs, strict=True), [str(tmp_path)] * len(jobs), [seed] * len(jobs)):
            found += part
    found.report("files", 10_000)
