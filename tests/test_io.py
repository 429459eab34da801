"""Checkpoints that come back bit by bit, and damage of every kind that is refused."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shutil
import signal
import stat
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from laplace_plus import io
from laplace_plus._version import __version__
from laplace_plus.errors import CheckpointError

HEADER = {"class": "KFAC", "nested": {"a": [1, 2.5, None, True], "e": 1e-30}, "text": "σ² é"}


def example_tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "factor.0": torch.randn(5, 5, generator=generator, dtype=torch.float64),
        "scale": torch.tensor(3.0),
        "empty": torch.empty(0, 2),
        "index": torch.arange(4),
    }


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "posterior"
    io.write(path, HEADER, example_tensors())
    return path


def identical(left, right):
    """Whether two tensors agree in dtype, shape and every bit."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    return torch.equal(left, right)


def forge(path, **changes):
    """Changes the JSON file and makes its checksum fit again, as damage does not but another program could."""
    file = path / io.HEADER_FILE
    document = json.loads(file.read_text())
    document.update(changes)
    document.pop("checksum")
    document = {key: value for key, value in document.items() if value is not ...}
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["checksum"] = hashlib.sha256(canonical.encode()).hexdigest()
    file.write_text(json.dumps(document, indent=2) + "\n")


# -- round trips ------------------------------------------------------------------------------------------------------


def test_round_trip(checkpoint):
    header, tensors = io.read(checkpoint)
    assert header == HEADER
    assert list(tensors) == list(example_tensors())
    assert all(identical(tensors[name], value) for name, value in example_tensors().items())
    assert sorted(entry.name for entry in checkpoint.iterdir()) == [io.HEADER_FILE, io.TENSORS_FILE]
    assert [entry.name for entry in checkpoint.parent.iterdir()] == ["posterior"]  # nothing is left over


def test_the_documented_layout(checkpoint):
    document = json.loads((checkpoint / io.HEADER_FILE).read_text())
    assert (document["format"], document["version"]) == ("laplace_plus.posterior", 1)
    assert document["package_version"] == __version__
    assert document["header"] == HEADER
    assert document["tensors"]["factor.0"] == {"dtype": "float64", "shape": [5, 5]}
    raw = (checkpoint / io.TENSORS_FILE).read_bytes()
    assert document["tensors_sha256"] == hashlib.sha256(raw).hexdigest()
    checksum = document.pop("checksum")
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert checksum == hashlib.sha256(canonical.encode()).hexdigest()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.complex64, torch.int64]
DTYPES += [torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8]
tensors_of_any_kind = st.builds(
    lambda dtype, shape, seed: (
        torch.randint(0, 256, (*shape, dtype.itemsize), generator=torch.Generator().manual_seed(seed))
        .to(torch.uint8)
        .view(dtype)[..., 0]
        if dtype is not torch.bool
        else torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).bool()
    ),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 2**31),
)
names = st.text(st.characters(categories=("L", "N", "P")), max_size=5).filter(lambda name: name != "__metadata__")


@given(st.dictionaries(st.text(), json_values, max_size=4), st.dictionaries(names, tensors_of_any_kind, max_size=4))
@settings(max_examples=50, deadline=None)
def test_round_trip_of_everything(header, tensors):
    with tempfile.TemporaryDirectory() as directory:
        io.write(Path(directory) / "p", header, tensors)
        found_header, found = io.read(Path(directory) / "p")
    assert json.dumps(found_header) == json.dumps(header)
    assert list(found) == list(tensors)
    assert all(identical(found[name], tensors[name]) for name in tensors)


def test_tensors_that_share_memory_or_are_not_contiguous(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "base": base,
        "again": base,
        "part": base[1:],
        "transposed": base.T,
        "expanded": base[:1].expand(5, 4),
        "parameter": nn.Parameter(base),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    io.write(tmp_path / "p", {}, tensors)
    _, found = io.read(tmp_path / "p")
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert not found[name].requires_grad
    found["base"].add_(1)  # every tensor came back with memory of its own
    assert torch.equal(found["again"], torch.arange(12.0).reshape(3, 4))
    assert torch.equal(base, torch.arange(12.0).reshape(3, 4))


def test_what_was_read_does_not_follow_the_file(checkpoint):
    _, found = io.read(checkpoint)
    file = checkpoint / io.TENSORS_FILE
    file.write_bytes(bytes(file.stat().st_size))
    assert identical(found["factor.0"], example_tensors()["factor.0"])


def test_read_onto_a_device(checkpoint):
    _, tensors = io.read(str(checkpoint), device="meta")
    assert all(tensor.device.type == "meta" for tensor in tensors.values())


# -- writing ----------------------------------------------------------------------------------------------------------


def test_paths_of_all_kinds(tmp_path, monkeypatch):
    io.write(tmp_path / "new" / "deep" / "p", {"n": 1}, {})
    assert io.read(tmp_path / "new" / "deep" / "p") == ({"n": 1}, {})
    (tmp_path / "empty").mkdir()
    io.write(str(tmp_path / "empty"), {"n": 2}, {})
    assert io.read(tmp_path / "empty")[0] == {"n": 2}
    monkeypatch.chdir(tmp_path)
    io.write("relative", {"n": 3}, {})
    assert io.read("relative")[0] == {"n": 3}
    (tmp_path / "link").symlink_to("relative")
    io.write("link", {"n": 4}, {})
    assert io.read("relative")[0] == {"n": 4}
    assert (tmp_path / "link").is_symlink()


def test_a_checkpoint_is_replaced(checkpoint):
    io.write(checkpoint, {"n": 2}, {"other": torch.ones(1)})
    header, tensors = io.read(checkpoint)
    assert header == {"n": 2}
    assert list(tensors) == ["other"]
    assert [entry.name for entry in checkpoint.parent.iterdir()] == ["posterior"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("stage", ["safetensors.torch.save_file", "os.fsync"])
def test_a_failure_half_way_leaves_the_older_checkpoint(checkpoint, monkeypatch, stage, error):
    def fail(*_, **__):
        raise error("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(stage, fail)
        with pytest.raises(error, match="disk full"):
            io.write(checkpoint, {"n": 2}, {"other": torch.ones(1)})
    assert io.read(checkpoint)[0] == HEADER
    assert [entry.name for entry in checkpoint.parent.iterdir()] == ["posterior"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads names of open files as Linux shows them")
def test_the_data_are_on_the_disk_before_their_name_is_and_the_name_before_the_save_ends(tmp_path, monkeypatch):
    done, rename, sync = [], os.rename, os.fsync

    def renamed(*paths, **options):
        done.append("the move")
        return rename(*paths, **options)

    def synced(descriptor):
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        return sync(descriptor)

    monkeypatch.setattr("os.rename", renamed)
    monkeypatch.setattr("os.fsync", synced)
    io.write(tmp_path / "it", {}, {"x": torch.ones(1)})
    at = done.index("the move")
    assert {io.HEADER_FILE, io.TENSORS_FILE} == {*done[: at - 1]}
    assert done[at - 1].endswith(".partial")
    assert done[at + 1 :] == [tmp_path.name]


def no_library(*_, **__):
    raise OSError("none")


def test_a_failing_move_is_taken_back(checkpoint, monkeypatch):
    rename = Path.rename
    monkeypatch.setattr("ctypes.CDLL", no_library)  # systems that cannot exchange two folders

    def fail_for_the_new_one(self, target):
        if self.name.endswith(".partial"):
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(OSError, match="no"):
        io.write(checkpoint, {"n": 2}, {})
    assert io.read(checkpoint)[0] == HEADER
    assert [entry.name for entry in checkpoint.parent.iterdir()] == ["posterior"]


def killed_at(line, path, header):
    """Overwrites a checkpoint in a process of its own, which dies before its n-th line; whether it came so far."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # threads of torch, which the child does not use
        child = os.fork()
    if not child:
        seen = 0

        def trace(frame, event, _):
            nonlocal seen
            if not frame.f_code.co_filename.endswith("io/files.py"):
                return None
            seen += event == "line"
            if seen == line:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        io.write(path, header, {"other": torch.ones(1)})
        os.kill(os.getpid(), signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.skipif(not sys.platform.startswith(("linux", "darwin")), reason="systems that exchange folders")
def test_a_killed_save_leaves_the_old_or_the_new_one(checkpoint, every):
    """At any line of it; and what it left beside the checkpoint goes with the next save."""
    found, line = [HEADER], 1
    while killed_at(line, checkpoint, {"n": line}):
        header, tensors = io.read(checkpoint)
        assert header in (found[-1], {"n": line})
        assert list(tensors) == (["other"] if "n" in header else list(example_tensors()))
        found.append(header)
        line += every
    assert found[-1] != HEADER
    assert line > 40
    assert [entry.name for entry in checkpoint.parent.iterdir()] == ["posterior"]


def test_readers_during_saves_see_no_damage(checkpoint):
    stop, errors = threading.Event(), []

    def read_on():
        while not stop.is_set():
            try:
                header, tensors = io.read(checkpoint)
                assert header == HEADER or tensors["x"].eq(header["n"]).all()
            except (CheckpointError, AssertionError) as error:
                errors.append(error)

    reader = threading.Thread(target=read_on)
    reader.start()
    for number in range(30):
        io.write(checkpoint, {"n": number}, {"x": torch.full((4,), float(number))})
    stop.set()
    reader.join()
    assert errors == []


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(checkpoint, monkeypatch):
    """Between the hash of the tensors and the tensors."""
    known, left = safetensors.safe_open, [2, 3]

    def replaced(*args, **options):
        if left:
            number = left.pop()
            io.write(checkpoint, {"n": number}, {"x": torch.full((4,), float(number))})
        return known(*args, **options)

    monkeypatch.setattr("safetensors.safe_open", replaced)
    header, tensors = io.read(checkpoint)
    assert header == {"n": 2}
    assert tensors["x"].eq(2).all()


def test_what_killed_saves_left_behind_goes(checkpoint):
    """Also of this process's number, as in containers, and of another host when it is old."""
    names = {f"{platform.node()}-{os.getpid()}": "goes", f"{platform.node()}-{os.getppid()}": "stays"}
    for name, fate in {**names, "other-host-12": "goes", "other.host-13": "stays"}.items():
        folder = checkpoint.with_name(f".{checkpoint.name}.{name}-{fate}.partial")
        folder.mkdir()
        if name == "other-host-12":
            os.utime(folder, (0, 0))
    io.write(checkpoint, {"n": 2}, {})
    left = {entry.name.rsplit("-")[-1] for entry in checkpoint.parent.iterdir()}
    assert left == {"posterior", "stays.partial"}


def test_files_can_be_read_by_whom_the_umask_allows(tmp_path):
    before = os.umask(0o027)
    try:
        io.write(tmp_path / "p", {}, {"x": torch.ones(2)})
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "p").iterdir()} == {0o640}


def test_a_full_disk_is_an_os_error(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        io.write(tmp_path / "p", {}, {})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"notes.txt": "x"}, "notes.txt"),
        ({io.HEADER_FILE: "{}", io.TENSORS_FILE: "x"}, "valid posterior.json"),
        ({io.HEADER_FILE: "not JSON", io.TENSORS_FILE: "x"}, "valid posterior.json"),
        ({io.HEADER_FILE: '{"format": "other"}', io.TENSORS_FILE: "x"}, "valid posterior.json"),
        ({io.HEADER_FILE: "[]", io.TENSORS_FILE: "x"}, "valid posterior.json"),
        ({io.TENSORS_FILE: "x"}, "valid posterior.json.*posterior.safetensors"),
        ({io.HEADER_FILE: '{"format": "laplace_plus.posterior"}', "mine.txt": "x"}, "mine.txt"),
    ],
)
def test_other_directories_are_not_overwritten(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"not a checkpoint.*{message}.*another path"):
        io.write(tmp_path, {}, {})
    assert {entry.name: entry.read_text() for entry in tmp_path.iterdir()} == files


def test_a_file_is_not_overwritten(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="not a checkpoint.*a file"):
        io.write(tmp_path / "file", {}, {})
    assert (tmp_path / "file").read_text() == "x"


def cyclic():
    header = {}
    header["self"] = header
    return header


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": {"b": torch.ones(1)}}, "type Tensor"),
        ({"a": [1, {2, 3}]}, "type set"),
        ({"a": math.nan}, "Out of range float"),
        ({"a": -math.inf}, "Out of range float"),
        ({"a": {(1, 2): 2}}, "keys must be str"),
        ({"a": [{1: 2, "1": 3}]}, "keys must be str, not 1"),
        ({"a": b"x"}, "bytes"),
        ({"a": torch.float32}, "dtype"),
        (cyclic(), "Circular"),
    ],
)
def test_headers_that_json_cannot_hold(tmp_path, header, message):
    with pytest.raises(CheckpointError, match=message):
        io.write(tmp_path / "p", header, {})
    assert not list(tmp_path.iterdir())


def test_tuples_come_back_as_lists(tmp_path):
    io.write(tmp_path / "p", {"shape": torch.Size([2, 3])}, {})
    assert io.read(tmp_path / "p")[0] == {"shape": [2, 3]}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": [1.0]}, "'a' is list, not a dense tensor"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "complex128"),
        ({"a": torch.eye(2).to_sparse()}, "not a dense tensor"),
        ({"a": torch.ones(2, device="meta")}, "meta tensor"),
        ({1: torch.ones(2)}, "'int'"),
        ({"__metadata__": torch.ones(2)}, "__metadata__"),
        ({"\ud800": torch.ones(2)}, "surrogates"),
    ],
)
def test_tensors_that_cannot_be_stored(tmp_path, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        io.write(tmp_path / "p", {}, tensors)
    assert not list(tmp_path.iterdir())


# -- damage -----------------------------------------------------------------------------------------------------------


def test_missing_paths_and_files(checkpoint):
    with pytest.raises(CheckpointError, match="no checkpoint at.*Got: no posterior.json"):
        io.read(checkpoint / "nowhere")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        io.read(checkpoint / io.HEADER_FILE)
    for name in (io.HEADER_FILE, io.TENSORS_FILE):
        copy = shutil.copytree(checkpoint, checkpoint.with_name(f"without-{name}"))
        (copy / name).unlink()
        with pytest.raises(CheckpointError, match=f"no checkpoint at.*Got: no {name}"):
            io.read(copy)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000])
def test_what_is_not_json(checkpoint, raw):
    (checkpoint / io.HEADER_FILE).write_bytes(raw)
    with pytest.raises(CheckpointError, match="damaged"):
        io.read(checkpoint)


@pytest.mark.parametrize("raw", ["[]", "{}", "null", '{"format": "other", "version": 1}'])
def test_json_of_something_else(checkpoint, raw):
    (checkpoint / io.HEADER_FILE).write_text(raw)
    with pytest.raises(CheckpointError, match="damaged.*laplace_plus.posterior"):
        io.read(checkpoint)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_other_versions_are_named(checkpoint, version):
    forge(checkpoint, version=version, package_version="9.9")
    with pytest.raises(CheckpointError, match=f"Expected: version 1. Got: version {version!r}, written by .* 9.9"):
        io.read(checkpoint)


@given(st.data())
@settings(max_examples=150, deadline=None)
@pytest.mark.slow
def test_a_flipped_bit_is_refused(data):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "p"
        io.write(path, HEADER, example_tensors())
        file = path / data.draw(st.sampled_from([io.HEADER_FILE, io.TENSORS_FILE]))
        raw = bytearray(file.read_bytes())
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(raw)
        with pytest.raises(CheckpointError):
            io.read(path)


@pytest.mark.parametrize("name", [io.HEADER_FILE, io.TENSORS_FILE])
def test_cut_and_lengthened_files_are_refused(checkpoint, name):
    file = checkpoint / name
    raw = file.read_bytes()
    for altered in (raw[:0], raw[: len(raw) // 2], raw[:-1], raw + b"\n"):
        file.write_bytes(altered)
        with pytest.raises(CheckpointError, match="damaged"):
            io.read(checkpoint)
    file.write_bytes(raw)
    assert io.read(checkpoint)[0] == HEADER


@pytest.mark.parametrize(
    ("old", "new"), [("1e-30", "1E-30"), (r"\u00e9", r"\u00E9"), ("KFAC", "Full"), ("2.5", "2.50")]
)
def test_changed_and_respelled_values_are_refused(checkpoint, old, new):
    file = checkpoint / io.HEADER_FILE
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    with pytest.raises(CheckpointError, match="damaged: it is not the file that was written"):
        io.read(checkpoint)


def test_tensors_of_another_checkpoint_are_refused(checkpoint):
    other = checkpoint.with_name("other")
    io.write(other, HEADER, {**example_tensors(), "scale": torch.tensor(4.0)})
    shutil.copy(other / io.TENSORS_FILE, checkpoint / io.TENSORS_FILE)
    with pytest.raises(CheckpointError, match="safetensors is damaged.*SHA-256"):
        io.read(checkpoint)


def test_pickles_are_never_opened(checkpoint):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("it was unpickled",))

    file = checkpoint / io.TENSORS_FILE
    torch.save(Bomb(), file)
    forge(checkpoint, tensors_sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    with pytest.raises(CheckpointError, match="does not hold the tensors"):
        io.read(checkpoint)


# -- fingerprints -----------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Parameters and buffers of several dtypes."""

    def __init__(self, width=3, extra=False, tied=False, buffer_dtype=torch.int64):
        super().__init__()
        self.first = nn.Linear(2, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, width, dtype=torch.bfloat16)
        self.other = nn.Linear(width, width, dtype=torch.bfloat16)
        if tied:
            self.other.weight = self.last.weight
        self.register_buffer("mask", torch.ones(2, dtype=buffer_dtype), persistent=False)
        self.register_buffer("adjacency", torch.eye(3).to_sparse())
        self.register_buffer("phase", torch.tensor([1 + 1j]))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("scalar", torch.tensor(2.0, dtype=torch.float16))
        self.register_buffer("nothing", torch.empty(0))
        if extra:
            self.register_buffer("extra", torch.ones(1))


def network(seed=0, **options):
    torch.manual_seed(seed)
    return Network(**options)


def test_a_fingerprint_is_json_and_repeats():
    model = network()
    found = io.fingerprint(model)
    assert json.loads(json.dumps(found)) == found == io.fingerprint(network())
    assert found["n_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert [entry["name"] for entry in found["tensors"]] == [
        *dict(model.named_parameters()),
        *dict(model.named_buffers()),
    ]
    weight = model.first.weight.detach().numpy()
    assert found["tensors"][0] == {
        "name": "first.weight",
        "kind": "parameter",
        "dtype": "float32",
        "shape": [3, 2],
        "sha256": hashlib.sha256(weight.tobytes()).hexdigest(),
    }


def test_the_same_network_is_accepted_in_every_state(checkpoint):
    model = network()
    saved = io.fingerprint(model)
    io.write(checkpoint, {"network": saved}, {})
    header, _ = io.read(checkpoint)
    model.eval().requires_grad_(False)
    model.first.weight.data = model.first.weight.data.T.contiguous().T  # other strides, same values
    io.compare_fingerprint(header["network"], model)
    assert header["network"] == saved


CHANGES = ["first.weight", "last.bias", "norm.running_mean", "norm.num_batches_tracked", "mask", "adjacency", "phase"]


@pytest.mark.parametrize("name", [*CHANGES, "flags", "scalar"])
def test_any_other_value_is_named(name):
    model, other = network(), network()
    saved = io.fingerprint(model)
    tensor = {**dict(other.named_parameters()), **dict(other.named_buffers())}[name]
    with torch.no_grad():
        if tensor.dtype is torch.bool:
            tensor.logical_not_()
        elif tensor.is_sparse:
            tensor.mul_(3)
        else:
            tensor.view(-1)[-1] += 1
    assert io.fingerprint(other)["names_sha256"] == saved["names_sha256"]
    assert io.fingerprint(other)["sha256"] != saved["sha256"]
    with pytest.raises(CheckpointError, match=rf"other values.*(parameter|buffer) {name} with SHA-256"):
        io.compare_fingerprint(saved, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 4}, r"first.weight float32 \[3, 2\].*first.weight float32 \[4, 2\]"),
        ({"extra": True}, "Got: buffer extra"),
        ({"tied": True}, "parameter other.weight bfloat16"),
        ({"buffer_dtype": torch.int32}, r"mask int64 \[2\].*mask int32 \[2\]"),
    ],
)
def test_another_architecture_is_named(options, message):
    saved = io.fingerprint(network())
    assert io.fingerprint(network(**options))["names_sha256"] != saved["names_sha256"]
    with pytest.raises(CheckpointError, match=f"of another network.*{message}"):
        io.compare_fingerprint(saved, network(**options))


def test_the_order_of_the_parameters_counts():
    first, second = nn.Module(), nn.Module()
    for module, names in ((first, "ab"), (second, "ba")):
        for name in names:
            module.register_parameter(name, nn.Parameter(torch.ones(2)))
    with pytest.raises(CheckpointError, match="another network.*parameter a .*parameter b "):
        io.compare_fingerprint(io.fingerprint(first), second)


def test_values_that_compare_equal_but_are_not_the_same():
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(0.0), other.weight.fill_(-0.0), other.bias.copy_(model.bias)
    with pytest.raises(CheckpointError, match="other values.*weight"):
        io.compare_fingerprint(io.fingerprint(model), other)
    with torch.no_grad():
        model.weight.fill_(math.nan)
    io.compare_fingerprint(io.fingerprint(model), model)


@pytest.mark.parametrize("model", [nn.Linear(2, 2, device="meta"), nn.LazyLinear(2)])
def test_networks_without_values(model):
    with pytest.raises(CheckpointError, match="parameter weight has no values"):
        io.fingerprint(model)


@pytest.mark.parametrize("saved", [{}, {"sha256": "x"}, {"sha256": "x", "tensors": [1]}, {"sha256": "x", "tensors": 1}])
def test_unreadable_fingerprints(saved):
    with pytest.raises(CheckpointError, match="cannot be read"):
        io.compare_fingerprint(saved, network())


def test_a_fingerprint_that_contradicts_itself():
    saved = {**io.fingerprint(network()), "sha256": "x"}
    with pytest.raises(CheckpointError, match="contradict"):
        io.compare_fingerprint(saved, network())
