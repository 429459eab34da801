"""Files: trees of stored values, damage, other versions, other weights, folders of earlier versions."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import laplace_plus as lp
from laplace_plus import persistence
from laplace_plus.errors import CheckpointError, ConfigurationError
from laplace_plus.persistence import decode, encode, fingerprint, read, require_same_weights, stored, write

OLD = Path(__file__).parent / "data" / "checkpoints_0_1_0"


@stored
@dataclass(frozen=True)
class Inner:
    values: Tensor
    name: str = "x"


@stored
@dataclass(frozen=True)
class Outer:
    parts: tuple[Inner, ...]
    numbers: dict[Any, Any]
    nothing: None = None


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return [*a] == [*b] and all(map(same, a.values(), b.values()))
    return type(a) is type(b) and (same(vars(a), vars(b)) if hasattr(a, "__dict__") else a == b)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).eval()


# -- trees -------------------------------------------------------------------------------------------------------------

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.text(), st.floats(allow_nan=False))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner, inner), st.dictionaries(st.one_of(st.text(), st.integers()), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=25, deadline=None)
@given(TREES)
def test_a_tree_of_plain_values_comes_back(tree: Any) -> None:
    found = decode(json.loads(json.dumps(encode(tree, {}, "it"))), {})
    assert same(found, tree)


def test_stored_dataclasses_and_tensors_come_back(tmp_path: Path) -> None:
    shared = torch.arange(6.0).view(2, 3)
    views = (Inner(shared), Inner(shared.T, "t"), Inner(shared[:, ::2].bfloat16()), Inner(torch.tensor([True, False])))
    tree = Outer(views, {"inf": float("inf"), 3: [torch.ones(()), torch.zeros(0, 2)], (1, 2): {"a": -0.0}})
    tensors: dict[str, Tensor] = {}
    write(tmp_path / "it", {"tree": encode(tree, tensors, "tree")}, tensors)
    header, found = read(tmp_path / "it")
    assert same(decode(header["tree"], found), tree)
    assert decode(header["tree"], found, "meta").parts[0].values.is_meta


def test_what_cannot_be_stored_is_refused_by_name() -> None:
    class Own: ...

    with pytest.raises(ConfigurationError, match=r"it\.a\.1 cannot be saved.*Own"):
        encode({"a": [1, Own()]}, {}, "it")
    with pytest.raises(ConfigurationError, match="name of its own"):
        stored(dataclass(type("Inner", (), {"__module__": "elsewhere"})))
    with pytest.raises(CheckpointError, match="Unknown"):
        decode({"class": "Unknown", "fields": {}}, {})


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "it", {"n": 1}, {"x": torch.arange(5), "y": torch.ones(2, 2)})
    return tmp_path / "it"


def test_a_flipped_bit_anywhere_is_found(file: Path) -> None:
    whole = file.read_bytes()
    for place in range(8, len(whole), 7):
        broken = bytearray(whole)
        broken[place] ^= 4
        file.write_bytes(broken)
        with pytest.raises(CheckpointError):
            read(file)
    for end in (0, 7, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:end])
        with pytest.raises(CheckpointError):
            read(file)
    with pytest.raises(CheckpointError, match="no saved posterior at"):
        read(file.parent / "nothing")


def test_other_versions_are_refused_by_number(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistence, "FORMAT_VERSION", "3")
    with pytest.raises(CheckpointError, match="Expected: version 3. Got: version 2, written by laplace_plus"):
        read(file)


def test_it_is_replaced_at_once_and_a_failure_leaves_what_was_there(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no space"):
            write(file, {"n": 2}, {})
    assert read(file)[0] == {"n": 1} and os.listdir(file.parent) == ["it"]
    write(file, {"n": 3}, {})
    assert read(file) == ({"n": 3}, {}) and os.listdir(file.parent) == ["it"]


def test_other_files_and_folders_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("mine")
    safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "tensors")
    (tmp_path / "folder").mkdir()
    for name in ("text", "tensors", "folder"):
        with pytest.raises(CheckpointError, match="not overwritten"):
            write(tmp_path / name, {}, {})
    write(tmp_path / "new" / "deep", {"n": 1}, {})
    assert read(tmp_path / "new" / "deep")[0] == {"n": 1}


# -- weights -----------------------------------------------------------------------------------------------------------


def test_another_network_is_refused_by_the_name_of_what_differs() -> None:
    known = fingerprint(network())
    require_same_weights(json.loads(json.dumps(known)), network().train())
    changed = network()
    with torch.no_grad():
        changed[3].weight[1, 2] += 1e-6
    buffer = network()
    buffer[1].running_mean[0] = 1
    for other, name in ((changed, "3.weight"), (buffer, "1.running_mean"), (network().double(), "0.weight")):
        with pytest.raises(CheckpointError, match=f"'{name}' first"):
            require_same_weights(known, other)
    with pytest.raises(CheckpointError, match=r"'4\.weight' first"):
        require_same_weights(known, nn.Sequential(*network(), nn.Linear(2, 2)))


# -- folders of earlier versions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.stem for path in OLD.glob("*.safetensors")))
def test_folders_of_gaussian_posteriors_load(name: str, tmp_path: Path) -> None:
    """Written by 0.1.0; beside each lie the network's weights, inputs and what was predicted for them."""
    stored = safetensors.torch.load_file(OLD / f"{name}.safetensors")
    weights = {key.removeprefix("network."): value for key, value in stored.items() if key.startswith("network.")}
    net = nn.Sequential(nn.Linear(2, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, len(weights["3.bias"]))).double()
    net.load_state_dict(weights)
    if "evidence" not in stored:
        with pytest.raises(CheckpointError, match="NullSpace of version 0.2.0 is not read"):
            lp.load(OLD / name, net.eval())
        return
    posterior = lp.load(OLD / name, net.eval())
    posterior.save(tmp_path / "new")
    for found in (posterior, lp.load(tmp_path / "new", net)):
        prediction = found.predictive(stored["x"], link="probit" if found.noise_std is None else None)
        torch.testing.assert_close(prediction.mean, stored["mean"], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(prediction.variance, stored["variance"], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(found.prior_precision.double(), stored["precision"])
        torch.testing.assert_close(found.log_marginal_likelihood(), stored["evidence"], rtol=1e-8, atol=1e-8)
    with torch.no_grad():
        net[0].weight[0, 0] += 1e-9
    with pytest.raises(CheckpointError, match=r"'0\.weight' first"):
        lp.load(OLD / name, net)
