"""Graph networks against dense references: the adjacency matrix written out, and Jacobians by autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, DataError, UnsupportedError

pytest.importorskip("torch_geometric", reason="needs the extra `graphs`")
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, Linear, global_mean_pool
from torch_geometric.utils import to_dense_adj

from laplace_plus.integrations.torch_geometric import GraphLoader, GraphNetwork

pytestmark = pytest.mark.filterwarnings("ignore::laplace_plus.errors.NoGainWarning")


def graph(n=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ring = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
    more = torch.randint(0, n, (2, n // 2), generator=generator)
    more = more[:, more[0] != more[1]]
    edges = torch.cat([ring, more], 1)
    edges = torch.cat([edges, edges.flip(0)], 1).unique(dim=1)
    x = torch.randn(n, 3, generator=generator).double()
    return Data(x=x, edge_index=edges, y=(x[:, 0] > 0).long(), train_mask=torch.arange(n) < n // 2)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = GCNConv(3, 5), GCNConv(5, 4), Linear(4, 2)

    def forward(self, x, edge_index):
        return self.head(self.second(self.first(x, edge_index).tanh(), edge_index).tanh())


class Dense(nn.Module):
    """The same network with the normalised adjacency matrix written out."""

    def __init__(self, model, data):
        super().__init__()
        a = to_dense_adj(data.edge_index)[0].double().T + torch.eye(data.num_nodes).double()
        self.a = a / (a.sum(1)[:, None] * a.sum(1)).sqrt()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in ((3, 5, False), (5, 4, False), (4, 2))).double()
        self.biases = nn.ParameterList([model.first.bias.detach(), model.second.bias.detach()])
        for own, theirs in zip(self.layers, (model.first.lin, model.second.lin, model.head), strict=True):
            own.weight.data = theirs.weight.data.clone()
        self.layers[2].bias.data = model.head.bias.data.clone()

    def forward(self, x):
        for layer, bias in zip(self.layers[:2], self.biases, strict=True):
            x = (self.a @ layer(x) + bias).tanh()
        return self.layers[2](x)


def weights(posterior):
    """Positions of all weight matrices and the head's bias, in the order of the layers."""
    names, sizes = posterior.parameter_names, [item.size for item in posterior.network.selected]
    start = dict(zip(names, torch.tensor([0, *sizes]).cumsum(0).tolist(), strict=False))
    of = dict(zip(names, sizes, strict=True))
    wanted = [name for name in names if name.endswith(("weight", "head.bias", "layers.2.bias"))]
    return torch.cat([torch.arange(start[name], start[name] + of[name]) for name in sorted(wanted, key=layer)])


def layer(name):
    order = ["first", "second", "head", "layers.0", "layers.1", "layers.2"]
    return next(k % 3 for k, part in enumerate(order) if part in name), name.endswith("bias")


def test_nodes_have_the_dense_gauss_newton_matrix():
    data, model = graph(), GCN().double()
    network = GraphNetwork(model)
    posterior = lp.Full(network, "classification").fit(GraphLoader(data, network, "train_mask"))
    vector = posterior.network.vector()

    def outputs(v):
        return posterior.network(network.inputs(data, "train_mask"), posterior.network.substitute(v))[0]

    rows, p = torch.func.jacrev(outputs)(vector), outputs(vector).softmax(-1)
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    expected = torch.einsum("nip,nij,njq->pq", rows, hessian, rows) + torch.eye(len(vector)).double()
    torch.testing.assert_close(posterior.precision_matrix(), expected)
    assert torch.equal(outputs(vector), model(data.x, data.edge_index)[data.train_mask])
    prediction = posterior.predictive(network.inputs(data))
    assert prediction.mean.shape == (1, 12, 2)
    torch.testing.assert_close(prediction.functional_mean[0], model(data.x, data.edge_index))


@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, lp.Diagonal])
def test_curvature_is_that_of_the_dense_network(cls):
    data, model = graph(), GCN().double()
    network, dense = GraphNetwork(model), Dense(model, graph())
    torch.testing.assert_close(dense(data.x), model(data.x, data.edge_index))
    ours = cls(network, "classification").fit(GraphLoader(data, network))
    theirs = cls(dense, "classification").fit([(data.x[None], data.y[None])])
    mine, own = weights(ours), weights(theirs)
    expected = theirs.covariance_matrix()[own[:, None], own]
    torch.testing.assert_close(ours.covariance_matrix()[mine[:, None], mine], expected)
    if cls is lp.KFAC:
        treated = {row[0]: row[3] for row in ours.summary().rows}
        assert treated["model.first.lin.weight"].startswith("Kronecker, 5 × 3")


class Graphs(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = GCNConv(3, 5), nn.Linear(5, 1)

    def forward(self, x, edge_index, batch):
        return self.head(global_mean_pool(self.first(x, edge_index).tanh(), batch))


def test_graphs_of_any_size_are_examples():
    graphs = [graph(n, n) for n in (5, 6, 9)]
    for own in graphs:
        own.y = own.x.sum()[None, None]
    network = GraphNetwork(Graphs().double(), "graph")
    loader = DataLoader(graphs, batch_size=3)
    posterior = lp.Full(network, lp.Gaussian(0.5)).fit(GraphLoader(loader, network))
    assert posterior.n_data == 3
    vector, total = posterior.network.vector(), torch.eye(posterior.n_parameters).double()
    whole = next(iter(loader))
    for wrong in (lambda: posterior.predictive(graphs[0]), lambda: posterior.fit(loader)):
        with pytest.raises(DataError, match=r"GraphLoader\(loader, network\), and predict at network.inputs\(graph\)"):
            wrong()

    def outputs(v):
        named = {name.removeprefix("model."): own for name, own in posterior.network.substitute(v).items()}
        return torch.func.functional_call(network.model, named, (whole.x, whole.edge_index, whole.batch))[:, 0]

    rows = torch.func.jacrev(outputs)(vector)
    torch.testing.assert_close(posterior.precision_matrix(), total + 4 * rows.T @ rows)
    assert posterior.predictive(network.inputs(graphs[1])).interval(0.9)[0].shape == (1, 1)
    with pytest.raises(DataError, match="several graphs"):
        network.inputs(whole)


def test_a_model_may_take_the_graph_itself():
    class Whole(GCN):
        def forward(self, data):
            return super().forward(data.x, data.edge_index)

    data = graph()
    by_name, by_graph = (GraphNetwork(cls().double()) for cls in (GCN, Whole))
    means = []
    for network in (by_name, by_graph):
        posterior = lp.Diagonal(network, "classification").fit(GraphLoader([data, data], network, "train_mask"))
        means.append(posterior.predictive(network.inputs(data)).mean)
    torch.testing.assert_close(*means)


def test_what_is_no_graph_is_refused():
    network, data = GraphNetwork(GCN().double()), graph()
    with pytest.raises(ConfigurationError, match="level"):
        GraphNetwork(network.model, "edge")
    sampled = data.clone()
    sampled.n_id = torch.arange(12)
    with pytest.raises(UnsupportedError, match="sampled"):
        network.inputs(sampled)
    data.y = data.y[:3]
    with pytest.raises(DataError, match="12 of them"):
        list(GraphLoader(data, network))
