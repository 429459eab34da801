"""Many sets of weights in one preparation give what each gives by itself, and leave the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace_plus.errors import InputError
from laplace_plus.network.network import Network
from laplace_plus.testing import assert_untouched, snapshot


class Remembering(nn.Module):
    """Adds the last call's activations, of which there are none, and counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(3, 2), None
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        out = self.layer(x) * self.calls
        out = out if self.last is None else out + self.last
        self.last = out
        return out


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x[:, None])[0][:, 0])


def normalised():
    with pytest.warns(FutureWarning):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Dropout(), nn.Linear(4, 2))


def tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2))
    model[2].weight = model[0].weight
    return model


MODELS = {"remembering": Remembering, "recurrent": Recurrent, "weight norm": normalised, "tied": tied}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_as_one_by_one(model, masked):
    torch.manual_seed(0)
    model = MODELS[model]().train()
    total = sum(p.numel() for p in model.parameters())
    network = Network(model, torch.arange(total) % 3 > 0 if masked else "all", lambda raw: raw)
    x, vectors = torch.randn(5, 3), network.vector() + torch.randn(4, network.n_parameters)
    before = snapshot(model)
    found = network.several(x, vectors)
    with torch.no_grad():
        one_by_one = [network(x, network.substitute(vector)) for vector in vectors]
    assert len(found) == 4 and not torch.equal(found[0], found[1])
    for mine, alone in zip(found, one_by_one, strict=True):
        torch.testing.assert_close(mine, alone)
    with pytest.raises(InputError):
        network.several(torch.randn(5, 7), vectors)
    network.bytes_forward = 1  # one input goes through all networks at once, where its operations can be batched
    for mine, alone in zip(network.several(x[:1], vectors), one_by_one, strict=True):
        torch.testing.assert_close(mine, alone[:1])
    with pytest.raises(InputError):
        network.several(torch.randn(1, 7), vectors)
    assert_untouched(model, before)
