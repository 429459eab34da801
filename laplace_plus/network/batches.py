"""Batches of a data loader in one form: inputs for the network, and a target.

A loader is any iterable of batches. A batch is one of

* ``(x, y)``, ``((x1, x2), y)``, ``({"a": ..., "b": ...}, y)`` or flat ``(x1, x2, ..., y)``: the last entry is the
  target, or the pair ``(y, w)`` of targets and their weights;
* a mapping with the target under one of :data:`TARGET_KEYS`, such as a Hugging Face ``BatchEncoding``.

Inputs are trees: tensors in nested tuples, lists, named tuples and mappings. Everything else in them, including a
``torch.nn.utils.rnn.PackedSequence``, is a leaf and passes through unchanged. Mappings become plain dictionaries. The
caller's own objects never change. A list with one entry for each example (tensors of several lengths, mappings, objects
of any class) is a single argument of ``forward``; see :class:`Examples`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset, IterableDataset

from laplace_plus._progress import progress_bar
from laplace_plus.checks import describe
from laplace_plus.errors import DataError, EmptyDataError, LabelError, OutputError

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
"""The keys under which a mapping may hold its target; the first that is present is taken."""

signature_of = lru_cache(256)(inspect.signature)  # of plain functions: a method as key would keep its object alive

_ENOUGH_REPEATED = 8
"""Targets that repeat their own tokens until data are refused; a masked language model's do so with odds of 1 to 9."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs of one batch, which :func:`bind` passes to the network, and its target ``[B, ...]``, or a tree of them."""

    inputs: Any
    target: Any

    @property
    def size(self) -> int:
        """The number of examples, by the target; inputs may be of other lengths, such as tokens beside offsets."""
        return batch_size(self.target)


class Examples(list[Any]):
    """Inputs with one entry for each example: one argument of ``forward``, and cut into examples by its entries."""


# -- from the loader to a batch ---------------------------------------------------------------------------------------


def split(item: Any) -> Batch:
    """Separate what a loader yields into inputs and target; DataError if either is missing, or the target no tensor.

    Of a pair, the inputs are the first entry as it is; of a longer tuple, the tuple of all but the last; of a mapping,
    a new dictionary of the remaining keys. Several tensors as a target, in a tuple or mapping, stay as they are: joint
    likelihoods take them, and those of values with their noise.

    Example:
        >>> batch = split({"input_ids": torch.zeros(2, 3), "labels": torch.tensor([0, 1])})
        >>> list(batch.inputs), batch.target
        (['input_ids'], tensor([0, 1]))
    """
    target: Any = None
    if isinstance(item, Mapping):
        target = item.get(_target_key(item))
    elif _is_sequence(item) and len(item) > 1:
        target = item[-1]
    leaves = leaves_of(target)
    if not leaves or not all(map(torch.is_tensor, leaves)):
        expected = f"(inputs, target), or a mapping with the target under one of {', '.join(TARGET_KEYS)}"
        fix = "let the loader yield batches (a DataLoader collates examples), or rename the target's key"
        fix = _graphs(item) or fix
        raise DataError("A batch has no tensor as its target.", expected=expected, got=describe(item), fix=fix)
    return Batch(inputs_of(item), target)


def _graphs(item: Any) -> str:
    """How graphs of torch_geometric become batches; empty for anything else."""
    if not any(cls.__module__.startswith("torch_geometric") for cls in type(item).__mro__):
        return ""
    what = "give the posterior network = GraphNetwork(model), of whole graphs with level='graph', fit to "
    what += "GraphLoader(loader, network), and predict at network.inputs(graph); both are in "
    return what + "laplace_plus.integrations.torch_geometric"


def _target_key(item: Mapping[Any, Any]) -> Any:
    return next(filter(item.__contains__, TARGET_KEYS), None)


def inputs_of(item: Any, *, whole: bool | None = False) -> Any:
    """The inputs of what a loader yields, with or without a target; the last of several entries is one.

    Where a list is a ``whole`` argument, one without a list as its first entry is the inputs themselves.
    """
    if whole and _is_sequence(item) and item and not _is_sequence(item[0]):
        return item
    if isinstance(item, Mapping):
        inputs = dict(item)
        inputs.pop(_target_key(item), None)
        if not inputs:
            raise DataError("There are no inputs.", expected="x, or entries besides the target", got=describe(item))
        return inputs
    if _is_sequence(item) and item:
        return tuple(item[:-1]) if len(item) > 2 else item[0]  # noqa: PLR2004
    return item


def iterate(
    data: Iterable[Any], *, device: torch.device | str, progress: bool = False, description: str = ""
) -> Iterator[Batch]:
    """Run once over any iterable of batches.

    Tensors move to ``device`` and keep their dtypes. Batches without examples are left out. ``data`` need only be
    iterable: it may have no length, sample with replacement, or end with a shorter batch. Trailing shapes, such as the
    number of tokens, may differ between batches.

    Raises:
        EmptyDataError: No batch holds an example.
        DataError: ``data`` is not an iterable of batches (a bare batch, a dataset of single examples, ...), or a
            batch is of no known form.
        LabelError: Labels of a mapping repeat its ``"input_ids"``, as a transformers model's own loss would take them.
    """
    is_dataset = isinstance(data, Dataset) and not isinstance(data, IterableDataset)
    is_batch = isinstance(data, (Tensor, Mapping)) or (
        isinstance(data, (tuple, list)) and any(map(torch.is_tensor, data))
    )
    is_iterable = isinstance(data, Iterable) or hasattr(data, "__getitem__")
    if is_dataset or is_batch or not is_iterable or isinstance(data, (str, bytes)):
        raise DataError(
            "The data are not an iterable of batches.",
            expected="a DataLoader, or a list of batches: [(x, y)]",
            got=f"one batch, {describe(data)}" if is_batch else describe(data),
            fix="put a single batch into a list; wrap a dataset in a DataLoader: DataLoader(dataset, batch_size=...)",
        )
    seen, repeated = False, 0.0
    if progress:
        data = progress_bar(data, enabled=True, description=description)
    for index, item in enumerate(data):
        batch = split(item)
        target = to_device(batch.target, device)
        size, is_paired = -1, True
        for leaf in tensors_in(target):
            is_paired = is_paired and leaf.ndim > 0 and size in (-1, len(leaf))
            size = len(leaf) if leaf.ndim else 0
        inputs = batch.inputs if isinstance(batch.inputs, Tensor) else _by_example(batch.inputs, size)
        inputs = to_device(inputs, device)
        if not is_paired or (batch_size(inputs) == 0) != (size == 0):
            raise DataError(
                f"Batch {index} does not pair examples with targets.",
                expected="as many inputs as targets [B, ...]",
                got=f"{describe(inputs)} with the target {describe(target)}",
                fix="wrap a dataset of single examples in a DataLoader, and check the function that collates",
            )
        if size == 0:
            continue
        if repeated >= 0 and isinstance(inputs, Mapping) and "input_ids" in inputs:
            repeated += _repeated_tokens(inputs, target)
            if repeated >= _ENOUGH_REPEATED:
                break  # and do not read on
        seen = True
        yield Batch(inputs, target)
    if repeated > 0:
        raise LabelError(
            "The labels repeat 'input_ids', so that the network would be judged by how well it copies each token.",
            expected="the target of the output at each position: for a causal language model, the next token",
            got=f"{describe(target)} equal to 'input_ids' wherever they are not ignored. A transformers model shifts "
            "such labels in the loss that it computes itself, which is not used here",
            fix="Let the loader yield labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1). "
            "Where copying is the task, yield (input_ids, labels)",
        )
    if not seen:
        fix = "check the dataset and its sampler; an iterator or generator can be run over only once"
        raise EmptyDataError("The loader yielded no data.", expected="at least one example", got="none", fix=fix)


def _by_example(inputs: Any, size: int) -> Any:
    """Inputs with each list of ``size`` examples, which they are or hold, told from lists of arguments."""
    if _is_sequence(inputs) and not any(map(_is_sequence, inputs)) and _are_examples(inputs, size):
        return Examples(inputs)

    def told(own: Any) -> Any:
        return Examples(own) if type(own) is list and _are_examples(own, size) else own

    if isinstance(inputs, Mapping):
        return {key: told(own) for key, own in inputs.items()}
    return type(inputs)(map(told, inputs)) if type(inputs) in (tuple, list) else inputs


def _are_examples(entries: Any, size: int) -> bool:
    """Whether there is one entry for each example: as many alike, whose tensors do not all have a row for each."""
    if len(entries) != size or hasattr(entries, "_fields"):
        return False
    if len({(own.dtype, own.ndim) if isinstance(own, Tensor) else type(own) for own in entries}) > 1:
        return False
    tensors = tensors_in([dict(own) if isinstance(own, Mapping) else own for own in entries])
    return not tensors or any(own.ndim == 0 or len(own) != size for own in tensors)


def _repeated_tokens(inputs: Mapping[Any, Any], target: Any) -> float:
    """How many targets repeat the token at their position and not the next one; −∞ if any differs from its own token.

    Negative targets are ignored. Of a decoder with inputs of its own, targets may be what the encoder reads.
    """
    tokens = inputs["input_ids"]
    is_text = isinstance(tokens, Tensor) and tokens.ndim == 2 and isinstance(target, Tensor)  # noqa: PLR2004
    if not is_text or tokens.shape != target.shape or target.is_floating_point() or "decoder_input_ids" in inputs:
        return -math.inf
    kept, tokens = target >= 0, tokens.to(target.device)
    if bool((kept & (target != tokens)).any()):
        return -math.inf
    return float((kept[:, :-1] & (target[:, :-1] != tokens[:, 1:])).sum())


# -- from a batch to the network --------------------------------------------------------------------------------------


def bind(
    source: nn.Module | Callable[..., Any], inputs: Any, *, whole: bool | None = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments ``(args, kwargs)`` that pass inputs to a network, from the signature of its ``forward``.

    * A mapping is passed by keyword if ``forward`` takes exactly such keywords. Otherwise, if none of its keys is a
      parameter of ``forward``, it is passed whole, as the one argument. A mapping of which only some keys are known is
      refused, because dropping inputs would change what the network computes.
    * A tuple or list is spread over the positional parameters if ``forward`` takes that many, else it is passed whole;
      :class:`Examples`, or with ``whole``, the other way round.
    * Everything else is the one argument.

    A wrapper's ``forward(*args, **kwargs)`` (``torch.compile``) takes mappings by keyword and tuples spread.

    Raises:
        DataError: ``forward`` takes the inputs in none of these ways; names its parameters and the batch's keys.

    Example:
        >>> bind(nn.Linear(2, 1), torch.zeros(3, 2))[0][0].shape
        torch.Size([3, 2])
        >>> bind(lambda a, b: a + b, {"a": 1, "b": 2})
        ((), {'a': 1, 'b': 2})
    """
    forward = source.forward if isinstance(source, nn.Module) else source
    function = getattr(forward, "__func__", None)
    owner = () if function is None else (source,)
    candidates: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    if isinstance(inputs, Mapping):
        if all(isinstance(key, str) for key in inputs):
            candidates.append(((), dict(inputs)))
    elif _is_sequence(inputs):
        candidates.append((tuple(inputs), {}))
        whole = whole or isinstance(inputs, Examples)
    try:
        signature = inspect.signature(forward) if function is None else signature_of(function)
    except (TypeError, ValueError):  # compiled code may have none
        return candidates[0] if candidates else ((inputs,), {})
    if not (isinstance(inputs, Mapping) and signature.parameters.keys() & inputs.keys()):
        candidates.insert(0 if whole else len(candidates), ((inputs,), {}))
    for args, kwargs in candidates:
        with suppress(TypeError):
            signature.bind(*owner, *args, **kwargs)
            return args, kwargs
    named = f"{type(source).__name__}.forward" if isinstance(source, nn.Module) else getattr(source, "__name__", "it")
    shown = [str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in signature.parameters.values()]
    expected = f"inputs for the parameters ({', '.join(shown[len(owner) :])})"
    fix = _graphs(inputs)
    fix = fix or "let the loader yield just the inputs that the network takes, under the names of its parameters"
    raise DataError(f"The inputs do not fit {named}.", expected=expected, got=describe(inputs), fix=fix)


def call(model: nn.Module | Callable[..., Any], inputs: Any) -> Any:
    """Run a network on a batch's inputs, passed as its signature requires; errors as of :func:`bind`."""
    args, kwargs = bind(model, inputs)
    return model(*args, **kwargs)


def output_tensor(raw: Any) -> Tensor:
    """Find the tensor of outputs in what a network returns; OutputError if there is none.

    That is a tensor; a mapping with ``"logits"`` (Hugging Face) or ``"out"`` (torchvision's segmentation networks); or
    an object with ``.logits``.
    """
    if isinstance(raw, Tensor):
        return raw
    found = raw.get("logits", raw.get("out")) if isinstance(raw, Mapping) else getattr(raw, "logits", None)
    if not isinstance(found, Tensor):
        expected = 'a tensor, an object with .logits, or a mapping with "logits" or "out"'
        fix = "wrap the network in a module whose forward returns the output that the likelihood is about; of several, "
        fix += "torch.cat(outputs, -1), with their joint log-density lp.LogDensity(function) as the likelihood"
        raise OutputError("The network's output is not one tensor.", expected=expected, got=describe(raw), fix=fix)
    return found


# -- trees of tensors -------------------------------------------------------------------------------------------------


def flatten(inputs: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """The leaves of a tree, and a function that builds the same tree from as many new leaves.

    ``None`` is a leaf. Named tuples keep their type, mappings become plain dictionaries.

    Example:
        >>> leaves, rebuild = flatten({"a": (1, 2), "b": [3]})
        >>> leaves, rebuild([10, 20, 30])
        ([1, 2, 3], {'a': (10, 20), 'b': [30]})
    """

    def rebuild(new_leaves: Iterable[Any]) -> Any:
        remaining = iter(new_leaves)
        return _map(lambda _: next(remaining), inputs)

    return leaves_of(inputs, apart=True), rebuild


def leaves_of(inputs: Any, *, apart: bool = False) -> list[Any]:
    """The leaves of a tree, among them whole :class:`Examples`, or with ``apart`` what is in these."""
    leaves: list[Any] = []
    _map(leaves.append, inputs, PackedSequence if apart else Examples)
    return leaves


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    found, waiting = [], [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, dict):
            waiting += reversed(item.values())
        elif isinstance(item, (tuple, list)):
            waiting += reversed(item)
    return found


def to_device(tree: Any, device: torch.device | str) -> Any:
    """A new tree with all tensors on a device; dtypes and everything that is not a tensor stay as they are.

    :class:`DataError` for tensors that are sparse, nested or without data.
    """
    if isinstance(tree, Tensor):
        if tree.layout != torch.strided or tree.is_meta or tree.is_nested:
            kind = "meta" if tree.is_meta else str(tree.layout).removeprefix("torch.")
            got = "nested tensors" if tree.is_nested else f"{kind} {describe(tree)}"
            what, fix = "A batch holds a tensor that cannot be cut into examples.", "Pass a dense one: x.to_dense()."
            fix += " A sparse matrix that is the same for all examples can be a buffer of the network."
            raise DataError(what, expected="dense tensors with data", got=got, fix=fix)
        # Tensors made in inference mode cannot take part in derivatives; copies of them can.
        return tree.to(device, copy=tree.is_inference())
    if isinstance(tree, PackedSequence):
        return tree.to(device)  # type: ignore[arg-type]  # torch declares only some of the types it takes
    return _map(lambda leaf: to_device(leaf, device), tree) if isinstance(tree, (Mapping, tuple, list)) else tree


def batch_size(inputs: Any) -> int:
    """The number of examples: the first size of a tensor with axes, or of a ``PackedSequence``; else DataError."""
    for leaf in leaves_of(inputs):
        if isinstance(leaf, Examples):
            return len(leaf)
        if isinstance(leaf, PackedSequence):
            return int(leaf.batch_sizes[0])
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return leaf.size(0)  # nested tensors have no shape
    what = "A batch's inputs hold no tensor with a batch dimension."
    fix = "convert the inputs to tensors, and collate. Objects of your own (graphs, molecules) come as a list "
    fix += "of as many as targets, forward's one argument"
    fix = _graphs(inputs) or fix
    raise DataError(what, expected="a tensor [B, ...], also in a tuple or mapping", got=describe(inputs), fix=fix)


def can_be_cut(inputs: Any, size: int) -> bool:
    """Whether every tensor of the inputs, except single numbers, has its ``size`` examples along the first axis.

    :class:`Examples` have them as their entries, which plain lists of so many tensors may have, too.
    """
    found = False
    if _is_sequence(inputs) and not isinstance(inputs, Examples) and len(inputs) == size and type(inputs[0]) is Tensor:
        return False
    for leaf in leaves_of(inputs):
        if isinstance(leaf, Examples):
            found = len(leaf) == size
            if not found:
                return False
        elif isinstance(leaf, Tensor):
            if leaf.ndim and leaf.shape[0] != size:
                return False
            found = found or leaf.ndim > 0
        elif leaf is not None and not isinstance(leaf, (bool, int, float, str)):
            return False
    return found and size > 0


def cut(inputs: Any, examples: slice | list[int] | Tensor) -> Any:
    """Some examples of inputs that :func:`can_be_cut`."""
    if isinstance(inputs, Tensor):
        return inputs[examples] if inputs.ndim else inputs
    if isinstance(inputs, Examples):
        return Examples(inputs[examples] if isinstance(examples, slice) else [inputs[n] for n in examples])
    return _map(lambda leaf: cut(leaf, examples) if isinstance(leaf, (Tensor, Examples)) else leaf, inputs, Examples)


def joined(trees: Sequence[Any]) -> Any:
    """Trees of tensors as one, each leaf concatenated along its first axis."""
    columns = zip(*map(leaves_of, trees), strict=True)

    def one(leaf: Any) -> Any:
        parts = next(columns)
        return Examples(chain(*parts)) if isinstance(leaf, Examples) else torch.cat(parts)

    return _map(one, trees[0], Examples)


def rejoined(parts: list[Any], size: int) -> list[Any]:
    """Few examples of many batches as batches of so many, where the shapes of their tensors agree."""
    leaves = [flatten(part)[0] for part in parts]
    shapes = {tuple(getattr(leaf, "shape", ())[1:] for leaf in own) for own in leaves}
    if len(shapes) > 1 or not all(isinstance(leaf, Tensor) and leaf.ndim for own in leaves[:1] for leaf in own):
        return parts
    whole = joined(parts)
    return [cut(whole, slice(start, start + size)) for start in range(0, batch_size(whole), size)]


def _map(function: Callable[[Any], Any], tree: Any, leaf: type[Any] = PackedSequence) -> Any:
    if isinstance(tree, Mapping):
        return {key: _map(function, value, leaf) for key, value in tree.items()}
    if _is_sequence(tree) and not isinstance(tree, leaf):
        children = [_map(function, child, leaf) for child in tree]
        if isinstance(tree, list):
            return Examples(children) if isinstance(tree, Examples) else children
        # torch.Size and the structured results of torch's functions cannot be built from new entries.
        return type(tree)._make(children) if hasattr(tree, "_make") else tuple(children)
    return function(tree)


def _is_sequence(tree: Any) -> bool:
    return isinstance(tree, (tuple, list)) and not isinstance(tree, PackedSequence)
