"""Batches of every form, trees of tensors, and what is refused."""

from __future__ import annotations

from collections import UserDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from laplace_plus.errors import DataError, EmptyDataError, OutputError
from laplace_plus.network import batches
from laplace_plus.network.batches import Batch

Pair = namedtuple("Pair", ["first", "second"])
X, X2, Y = torch.arange(12.0).reshape(4, 3), torch.ones(4, 2), torch.tensor([0, 1, 2, 1])


class Stream(IterableDataset):
    """Single examples without a length."""

    def __init__(self, n, length=None):
        self.n, self.length = n, length

    def __iter__(self):
        return ((X[i % 4], Y[i % 4]) for i in range(self.n))

    def __len__(self):
        if self.length is None:
            raise TypeError
        return self.length


# -- split ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", [(X, Y), [X, Y], Pair(X, Y)])
def test_split_of_a_pair(item):
    batch = batches.split(item)
    assert batch.inputs is X
    assert batch.target is Y
    assert batch.size == 4


def test_split_keeps_nested_inputs():
    nested, mapping = (X, X2), {"a": X, "b": X2}
    assert batches.split((nested, Y)).inputs is nested
    assert batches.split((mapping, Y)).inputs is mapping


@pytest.mark.parametrize("item", [(X, X2, Y), [X, X2, Y]])
def test_the_last_of_a_flat_tuple_is_the_target(item):
    batch = batches.split(item)
    assert batch.inputs == (X, X2)
    assert batch.target is Y
    assert len(item) == 3


@pytest.mark.parametrize("key", batches.TARGET_KEYS)
@pytest.mark.parametrize("mapping_type", [dict, UserDict])
def test_split_of_a_mapping_leaves_it_as_it_was(key, mapping_type):
    item = mapping_type({"input_ids": X, key: Y, "mask": X2})
    batch = batches.split(item)
    assert type(batch.inputs) is dict
    assert list(batch.inputs) == ["input_ids", "mask"]
    assert batch.inputs["input_ids"] is X
    assert batch.target is Y
    assert set(item) == {"input_ids", key, "mask"}


def test_the_first_target_key_wins():
    batch = batches.split({"y": X, "label": X2, "labels": Y})
    assert batch.target is Y
    assert list(batch.inputs) == ["y", "label"]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (X, r"no tensor as its target.*labels.*Got: float32 \[4, 3\]"),
        ((X,), r"Got: \(float32 \[4, 3\]\)"),
        ((), r"Got: \(\)"),
        ({"input_ids": X, "mask": X2}, "labels, label.*input_ids: .*mask: "),
        ({"labels": Y}, "no inputs.*{labels: "),
        ((X, 3), r"no tensor as its target.*\[4, 3\], int"),
        ((X, {"labels": 3}), "no tensor as its target.*labels"),
        ("text", "Got: str"),
        (None, "Got: NoneType"),
    ],
)
def test_split_refuses_what_has_no_target(item, message):
    with pytest.raises(DataError, match=message):
        batches.split(item)


# -- bind and call ----------------------------------------------------------------------------------------------------


def one(x):
    """Takes one argument."""


def two(x, mask):
    """Takes two arguments."""


def optional(x, mask=None):
    """Takes one argument or two."""


def anything(*args, **kwargs):
    """Takes everything, as wrappers do."""


def keyword_only(x, *, mask):
    """Takes the second argument by its name alone."""


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (one, 1, ((1,), {})),
        (one, (1, 2), (((1, 2),), {})),
        (one, [1, 2], (([1, 2],), {})),
        (one, (1,), ((1,), {})),
        (one, Pair(1, 2), ((Pair(1, 2),), {})),
        (one, {"x": 1}, ((), {"x": 1})),
        (one, {"a": 1, "b": 2}, (({"a": 1, "b": 2},), {})),
        (one, {0: 1}, (({0: 1},), {})),
        (two, (1, 2), ((1, 2), {})),
        (two, [1, 2], ((1, 2), {})),
        (two, Pair(1, 2), ((1, 2), {})),
        (two, {"mask": 2, "x": 1}, ((), {"mask": 2, "x": 1})),
        (optional, 1, ((1,), {})),
        (optional, (1, 2), ((1, 2), {})),
        (optional, {"x": 1}, ((), {"x": 1})),
        (anything, (1, 2), ((1, 2), {})),
        (anything, {"x": 1}, ((), {"x": 1})),
        (keyword_only, {"x": 1, "mask": 2}, ((), {"x": 1, "mask": 2})),
    ],
)
def test_bind(function, inputs, expected):
    assert batches.bind(function, inputs) == expected


@pytest.mark.parametrize(
    ("function", "inputs", "message"),
    [
        (two, 1, r"do not fit two.*\(x, mask\).*Got: int"),
        (two, (1, 2, 3), r"\(x, mask\).*\(int, int, int\)"),
        (two, {"x": 1}, r"\(x, mask\).*{x: int}"),
        (optional, {"x": 1, "token_type_ids": 2}, r"\(x, mask=None\).*{x: int, token_type_ids: int}"),
        (keyword_only, (1, 2), r"\(x, \*, mask\)|\(x, mask\)"),
    ],
)
def test_bind_refuses_rather_than_drops(function, inputs, message):
    with pytest.raises(DataError, match=message):
        batches.bind(function, inputs)


class TwoInputs(nn.Module):
    """Adds the output of a linear layer to a second input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        """Adds."""
        return self.linear(x) + offset


@pytest.mark.parametrize("inputs", [(X, X2), [X, X2], {"offset": X2, "x": X}])
def test_call_agrees_with_functional_call(inputs):
    torch.manual_seed(0)
    model = TwoInputs()
    expected = model.linear(X) + X2
    assert torch.equal(batches.call(model, inputs), expected)
    args, kwargs = batches.bind(model, inputs)
    assert torch.equal(torch.func.functional_call(model, dict(model.named_parameters()), args, kwargs), expected)


# -- output_tensor ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [X, SimpleNamespace(logits=X), {"logits": X, "out": X2}, {"out": X, "aux": X2}, UserDict(logits=X)],
)
def test_output_tensor(raw):
    assert batches.output_tensor(raw) is X


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ((X, X2), r"Got: \(float32 \[4, 3\], float32 \[4, 2\]\)"),
        ({"loss": X}, "{loss: float32"),
        ({}, "{}"),
        (None, "NoneType"),
        (SimpleNamespace(logits=None), "SimpleNamespace"),
        ({"logits": None}, "{logits: NoneType}"),
    ],
)
def test_output_tensor_refuses_what_is_not_one_tensor(raw, message):
    with pytest.raises(OutputError, match=message):
        batches.output_tensor(raw)


# -- iterate ----------------------------------------------------------------------------------------------------------


def collect(data, **options) -> list[Batch]:
    return list(batches.iterate(data, device="cpu", **options))


@pytest.mark.parametrize(
    ("data", "sizes"),
    [
        ([(X, Y)], [4]),
        (((X, Y), (X[:1], Y[:1])), [4, 1]),
        (((X, Y) for _ in range(3)), [4, 4, 4]),
        (DataLoader(TensorDataset(X, Y), batch_size=3), [3, 1]),
        (DataLoader(TensorDataset(X, Y), batch_size=3, sampler=RandomSampler(range(4), True, 7)), [3, 3, 1]),
        (DataLoader(Stream(5), batch_size=2), [2, 2, 1]),
        (DataLoader([{"a": x, "y": y} for x, y in zip(X, Y, strict=True)], batch_size=2), [2, 2]),
    ],
)
def test_iterate_over_loaders_of_every_kind(data, sizes):
    assert [batch.size for batch in collect(data)] == sizes


def test_progress_is_shown_only_when_asked_for(capfd):
    collect([(X, Y)] * 3, description="Fitting")
    assert capfd.readouterr().err == ""
    collect([(X, Y)] * 3, progress=True, description="Fitting")
    shown = capfd.readouterr().err
    assert "Fitting" in shown
    assert "3/3" in shown


def test_empty_batches_are_left_out():
    empty = (torch.empty(0, 5), torch.empty(0, dtype=torch.long))
    found = collect([empty, (X, Y), empty, (X[:2], Y[:2]), empty])
    assert [batch.size for batch in found] == [4, 2]


@pytest.mark.parametrize("data", [[], [(X[:0], Y[:0])], iter(()), DataLoader(Stream(0), batch_size=2)])
def test_no_data_at_all(data):
    with pytest.raises(EmptyDataError, match="no data.*only once"):
        collect(data)


class Examples(Dataset):
    """A map-style dataset."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return X[index], Y[index]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "NoneType"),
        (3, "int"),
        (Stream(1).__iter__, "method"),
        ("text", "str"),
        (b"bytes", "bytes"),
        (X, r"\[\(x, y\)\].*one batch, float32 \[4, 3\]"),
        ((X, Y), r"one batch, \(float32 \[4, 3\], int64 \[4\]\)"),
        ([X, Y], "one batch"),
        (((X, X2), Y), "one batch"),
        ((X, X2, Y), "one batch"),
        ({"x": X, "y": Y}, r"one batch, \{x: float32 \[4, 3\], y: int64 \[4\]\}"),
        (UserDict(x=X, y=Y), "one batch"),
        (Examples(), "Examples.*DataLoader"),
        (TensorDataset(X, Y), "TensorDataset.*DataLoader"),
    ],
)
def test_what_is_no_loader_is_refused(data, message):
    with pytest.raises(DataError, match=message):
        next(batches.iterate(data, device="cpu"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([(X[0], Y[0])], r"Batch 0 does not pair.*int64 \[\]"),
        (Stream(2), "Batch 0 does not pair"),
        (iter([(X, Y), X]), "no tensor as its target"),
        ([(X, Y), (X, Y[:0])], r"Batch 1 does not pair.*\[4, 3\] with the target int64 \[0\]"),
        ([(X[:0], Y)], r"Batch 0 does not pair.*\[0, 3\] with the target int64 \[4\]"),
        ([(X.numpy(), Y)], "no tensor with a batch dimension.*ndarray"),
        ([(torch.tensor(1.0), Y)], r"no tensor with a batch dimension.*float32 \[\]"),
    ],
)
def test_bad_batches_are_refused(data, message):
    with pytest.raises(DataError, match=message):
        collect(data)


def test_the_loaders_own_error_is_not_hidden():
    def broken():
        yield X, Y
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        collect(broken())


def test_tensors_go_to_the_device_and_the_items_stay_as_they_were():
    item = {"a": X, "nested": [X2.half(), "text"], "labels": Y}
    (batch,) = batches.iterate([item], device="meta")
    assert batch.inputs["a"].device.type == batch.target.device.type == "meta"
    assert batch.inputs["nested"][0].dtype is torch.float16
    assert batch.inputs["nested"][1] == "text"
    assert item["a"] is X
    assert item["labels"] is Y
    assert item["nested"][0].device.type == "cpu"


# -- trees ------------------------------------------------------------------------------------------------------------

dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
shapes = st.lists(st.integers(0, 3), max_size=3)
tensors = st.builds(lambda shape, dtype: torch.ones(shape, dtype=dtype), shapes, dtypes)
leaves = tensors | st.none() | st.integers() | st.sampled_from(["", "a", "ab"])
trees = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.builds(Pair, children, children),
        st.dictionaries(st.sampled_from(["", "a", "b", "ab"]), children, max_size=3),
    ),
    max_leaves=8,
)


def same(left, right) -> bool:
    """Whether two trees have the same containers and the very same leaves."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left is right


@given(trees)
@settings(max_examples=40, deadline=None)
def test_flatten_and_rebuild(tree):
    found, rebuild = batches.flatten(tree)
    assert not any(isinstance(leaf, (list, tuple, dict)) for leaf in found)
    assert same(rebuild(found), tree)
    assert same(rebuild(iter(found)), tree)


@given(trees)
@settings(max_examples=60, deadline=None)
def test_to_device_changes_nothing_but_the_device(tree):
    moved = batches.to_device(tree, "meta")
    before, rebuild = batches.flatten(tree)
    after, _ = batches.flatten(moved)
    for old, new in zip(before, after, strict=True):
        if isinstance(old, torch.Tensor):
            assert new.device.type == "meta"
            assert (new.dtype, new.shape) == (old.dtype, old.shape)
        else:
            assert new is old
    assert same(rebuild(after), moved)
    assert same(batches.to_device(tree, torch.device("cpu")), tree)


def test_packed_sequences_are_leaves():
    packed = pack_sequence([X, X[:2]])
    (batch,) = collect([(packed, Y[:2])])
    assert isinstance(batch.inputs, PackedSequence)
    assert batch.size == 2
    assert batches.bind(nn.LSTM(3, 2), batch.inputs) == ((batch.inputs,), {})
    assert batches.call(nn.LSTM(3, 2), batch.inputs)[0].data.shape == (6, 2)


@pytest.mark.parametrize(
    ("inputs", "size"),
    [
        (X, 4),
        ((torch.tensor(1.0), X), 4),
        ({"text": ["a"] * 7, "mask": None, "b": {"c": X2[:3]}}, 3),
        ([X[:0]], 0),
    ],
)
def test_batch_size(inputs, size):
    assert batches.batch_size(inputs) == size


@pytest.mark.parametrize("inputs", [None, (), torch.tensor(0.0), {"text": ["a", "b"]}])
def test_batch_size_needs_a_tensor(inputs):
    with pytest.raises(DataError, match="no tensor with a batch dimension"):
        batches.batch_size(inputs)


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def test_a_hugging_face_network_and_its_batches():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3
    )
    model = transformers.BertForSequenceClassification(config).eval()
    tokens = torch.randint(0, 11, (2, 5))
    item = transformers.BatchEncoding(
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": torch.tensor([0, 2])}
    )
    (batch,) = collect([item])
    assert type(batch.inputs) is dict
    assert list(batch.inputs) == ["input_ids", "attention_mask"]
    assert "labels" in item
    raw = batches.call(model, batch.inputs)
    assert raw.loss is None  # the labels were not passed
    expected = model(input_ids=tokens).logits
    torch.testing.assert_close(batches.output_tensor(raw), expected)
    nested = transformers.BatchEncoding({"input_ids": tokens})
    (batch,) = collect([(nested, torch.tensor([0, 2]))])
    torch.testing.assert_close(batches.output_tensor(batches.call(model, batch.inputs)), expected)
    with pytest.raises(DataError, match="one batch"):
        collect(item)
