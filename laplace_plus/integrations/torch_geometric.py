"""Graphs of torch_geometric as batches of a posterior; see ``docs/how-to/graphs.md``.

Outputs of nodes depend on other nodes, so that the examples that a posterior may separate are whole graphs. A node
task is one example with outputs ``[1, N, C]``: positions that share their graph. All fields get a leading axis of
graphs, along which the library finds the examples in each layer. ``torch_geometric.nn.Linear`` calls ``F.linear``,
which has a rule, so that convolutions on graphs have Kronecker factors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from laplace_plus import checks
from laplace_plus.errors import DataError, UnsupportedError

__all__ = ["GraphLoader", "GraphNetwork"]

TARGET, MASK = "y", "node_mask"


class GraphNetwork(nn.Module):
    """A model of graphs, to be given to a posterior; it holds the model itself, no copy.

    Args:
        model: Its ``forward`` takes fields of :class:`torch_geometric.data.Data` by their names (``x``,
            ``edge_index``, ``batch``, …), or one argument ``data``.
        level: What has a target: each ``"node"``, or each ``"graph"``.

    Raises:
        ConfigurationError: Another level.
        UnsupportedError: A layer that keeps a graph of its own, with ``cached=True``.
    """

    def __init__(self, model: nn.Module, level: Literal["node", "graph"] = "node"):
        super().__init__()
        checks.choice("level", level, ("node", "graph"))
        cached = [name for name, module in model.named_modules() if getattr(module, "cached", False) is True]
        if cached:
            what, fix = f"Layer {cached[0]!r} keeps the graph of an earlier call.", "Make it with cached=False."
            raise UnsupportedError(what, expected="cached=False", got="cached=True", fix=fix)
        self.model, self.level = model, level
        parameters = inspect.signature(model.forward).parameters
        self._names = None if "data" in parameters else tuple(parameters)

    def forward(self, **fields: Tensor) -> Tensor:
        """Outputs ``[B, N, C]`` of nodes, or of those in the mask, for B graphs of one size; of graphs ``[B, C]``."""
        mask = fields.pop(MASK, None)
        each = [dict(zip(fields, own, strict=True)) for own in zip(*fields.values(), strict=True)]
        union = Batch.from_data_list([Data(**own) for own in each])
        if self._names is None:
            outputs = self.model(union)
        else:
            outputs = self.model(**{name: union[name] for name in self._names if name in union})
        if self.level == "graph":
            return outputs
        return (outputs if mask is None else outputs[mask.flatten()]).unflatten(0, (len(each), -1))

    def inputs(self, data: Data, mask: str | None = None) -> dict[str, Tensor]:
        """What ``predictive`` takes for one graph, or for some of its nodes, by the name of a mask.

        Raises:
            DataError: Not one graph.
            UnsupportedError: Graphs with sampled neighbours.
        """
        if "n_id" in data:
            what, fix = "The batch has sampled neighbours, others in each pass.", "Pass the whole graph: [data]."
            raise UnsupportedError(what, expected="whole graphs", got="a batch of a neighbour loader", fix=fix)
        if self.level == "graph" and isinstance(data, Batch) and data.num_graphs > 1:
            fix = "Pass them one by one: batch.to_data_list()."
            raise DataError("These are several graphs.", expected="one", got=f"{data.num_graphs}", fix=fix)
        given = {name: value for name, value in data.to_dict().items() if isinstance(value, Tensor) and name != TARGET}
        names = given.keys() if self._names is None else self._names
        wanted = [name for name in names if name in given and name not in ("batch", "ptr", mask)]
        found = {name: given[name].unsqueeze(0) for name in wanted if not name.endswith("_mask")}
        return found if mask is None else {**found, MASK: given[mask].unsqueeze(0)}


class GraphLoader:
    """Batches of a posterior from graphs, one graph or one batch of nodes at a time.

    Args:
        data: Graphs, or a ``torch_geometric.loader.DataLoader`` of them; a single graph for one.
        network: The network that the posterior has.
        mask: For nodes, the name of the mask of those to be counted, such as ``"train_mask"``; None for all.

    Raises:
        DataError: While iterating: graphs without targets, or not one for each node or graph.
    """

    def __init__(self, data: Data | Iterable[Data], network: GraphNetwork, mask: str | None = None):
        self.data: Iterable[Any] = [data] if isinstance(data, Data) else data
        self.network, self.mask = network, mask

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for item in self.data:
            apart = self.network.level == "graph" and isinstance(item, Batch)
            for graph in item.to_data_list() if apart else [item]:
                inputs, target = self.network.inputs(graph, self.mask), graph.y
                count = graph.num_nodes if self.network.level == "node" else 1
                if not isinstance(target, Tensor) or len(target) != count:
                    got = "none" if target is None else f"{len(target)}"
                    raise DataError("The targets do not fit the graph.", expected=f"y with {count} of them", got=got)
                if self.network.level == "node":
                    target = (target if self.mask is None else target[inputs[MASK][0]]).unsqueeze(0)
                yield inputs, target
