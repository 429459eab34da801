"""Fits in one pass that are interrupted go on to the bits of an uninterrupted fit."""

from __future__ import annotations

import pytest
import torch
from problems import Stopped, Until
from torch import nn

import laplace_plus as lp
from laplace_plus import io
from laplace_plus.errors import CheckpointError, UnsupportedError

pytestmark = pytest.mark.usefixtures("saved_after_each_batch")


def network(scale=1.0):
    torch.manual_seed(0)
    parts = [nn.Conv1d(1, 3, 3), nn.Flatten(), nn.Linear(12, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 3)]
    net = nn.Sequential(*parts)
    with torch.no_grad():
        net[0].weight *= scale
    return net


def batches(seed=1):
    generator = torch.Generator().manual_seed(seed)
    sizes = (5, 2, 7, 3, 9, 4)  # some factors hold rows that wait to be multiplied when a save comes
    return [(torch.randn(n, 1, 6, generator=generator), torch.arange(n) % 3) for n in sizes]


MAKERS = {
    "KFAC": lambda net: lp.KFAC(net, "classification"),
    "limited rank": lambda net: lp.KFAC(net, "classification", factor_rank=2),
    "EKFAC": lambda net: lp.KFAC(net, "classification", eigenvalue_corrected=True),
    "Full": lambda net: lp.Full(net, "classification"),
    "Diagonal": lambda net: lp.Diagonal(net, "classification"),
    "last layer": lambda net: lp.Full(net, "classification", parameters="last_layer"),
    "drawn targets": lambda net: lp.KFAC(
        net, "classification", backend=lp.curvature.Native(kind="ggn_mc"), eigenvalue_corrected=True
    ),
    "Subnetwork": lambda net: lp.Subnetwork(net, "classification", lp.LargestMagnitude(20)),
    "regression": lambda net: lp.KFAC(net, "regression"),
}


def data_of(name):
    return [(x, x[:, 0, :3]) for x, _ in batches()] if name == "regression" else batches()


def seeded():
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("name", MAKERS)
def test_an_interrupted_fit_goes_on_to_the_same_bits(name, tmp_path):
    data, generator = data_of(name), seeded()
    whole = MAKERS[name](network()).fit(data, generator=generator)
    passes = 2 if getattr(whole.structure, "eigenvalue_corrected", False) else 1
    expected = whole.description()[1]
    for stop in (1, 3, 4, 5) if passes == 1 else (4, 8, 11):
        folder, other = tmp_path / str(stop), seeded()
        with pytest.raises(Stopped):
            MAKERS[name](network()).fit(Until(data, stop), generator=seeded(), checkpoint=folder)
        found = MAKERS[name](network()).fit(data, generator=other, checkpoint=folder)
        tensors = found.description()[1]
        assert tensors.keys() == expected.keys() and found.n_data == whole.n_data
        assert all(torch.equal(tensors[key], expected[key]) for key in expected), stop
        assert torch.equal(other.get_state(), generator.get_state())


LOW_RANK = {
    "LowRank": {"remainder_probes": 2, "remainder_depth": 3},
    "without a rest": {"remainder_probes": 0, "parameters": "last_layer"},
    "drawn targets": {"remainder_probes": 1, "remainder_depth": 2, "backend": lp.curvature.Native(kind="ggn_mc")},
}


@pytest.mark.parametrize(
    "name", ["without a rest", *(pytest.param(x, marks=pytest.mark.slow) for x in [*LOW_RANK][::2])]
)
def test_eigenpairs_are_continued(name, tmp_path):
    def fit(data, folder=None, net=None, rank=4, generator=None):
        options = {"rank": rank, "max_restarts": 2, "tolerance": 0.5, **LOW_RANK[name]}
        posterior = lp.LowRank(network() if net is None else net, "classification", **options)
        return posterior.fit(data, checkpoint=folder, generator=generator or seeded())

    generator, loader = seeded(), Until(batches(), 10**9)
    whole = fit(loader, generator=generator)
    read, expected = 10**9 - loader.left, whole.description()[1]
    assert read > 6 * 8
    for stop in (read // 2,) if name == "without a rest" else (3, read // 2, read - 1):
        folder, other, loader = tmp_path / str(stop), seeded(), Until(batches(), 10**9)
        with pytest.raises(Stopped):
            fit(Until(batches(), stop), folder)
        found = fit(loader, folder, generator=other)
        assert 10**9 - loader.left <= read - stop + 6 * 4  # the passes that compare and survey, and the one that ended
        tensors = found.description()[1]
        assert tensors.keys() == expected.keys() and found.n_data == whole.n_data
        assert all(torch.equal(tensors[key], expected[key]) for key in expected), stop
        assert torch.equal(other.get_state(), generator.get_state())
    loader = Until(batches(), 10**9)
    fit(loader, folder)
    assert 10**9 - loader.left <= 2 * 6  # finished: nothing but the comparison, and the first batch
    for changed in ({"net": network(1.5)}, {"rank": 5}, {"data": batches(seed=2)}, {"data": batches()[::-1]}):
        with pytest.raises(CheckpointError, match="another computation"):
            fit(**{"data": batches(), "folder": folder, **changed})


MORE = [pytest.param(name, marks=pytest.mark.slow) for name in ("EKFAC", "Full", "limited rank", "regression")]


@pytest.mark.parametrize("name", ["KFAC", "drawn targets", "Subnetwork", *MORE])
def test_an_interrupted_update_goes_on_to_the_same_bits(name, tmp_path):
    data, first = data_of(name), data_of(name)[:2]

    def before():
        return MAKERS[name](network()).fit(first, generator=seeded())

    generator = seeded()
    expected = before().update(data, generator=generator).description()[1]
    passes = 2 if getattr(before().structure, "eigenvalue_corrected", False) else 1
    for stop in (1, 6 * passes - 2):
        folder, other = tmp_path / str(stop), seeded()
        with pytest.raises(Stopped):
            before().update(Until(data, stop), generator=seeded(), checkpoint=folder)
        found = before().update(data, generator=other, checkpoint=folder)
        tensors = found.description()[1]
        assert found.n_data == 37 and tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[key], expected[key]) for key in expected), stop
        assert torch.equal(other.get_state(), generator.get_state())
    others = {"fit": before().update(data[:1]), "weights": MAKERS[name](network(1.5)).fit(first, generator=seeded())}
    for other in others.values():
        with pytest.raises(CheckpointError, match="its (fit before|network|masks) differs"):
            other.update(data, generator=seeded(), checkpoint=folder)
    with pytest.raises(CheckpointError, match="its data differ"):
        before().update(data[::-1], generator=seeded(), checkpoint=folder)


@pytest.mark.parametrize("name", ["EKFAC", "LowRank"])
def test_what_followed_the_first_pass_is_refused_to_more_data(name, tmp_path):
    """The first pass alone could go on with them."""
    make = MAKERS.get(name, lambda net: lp.LowRank(net, "classification", rank=4, tolerance=0.5, remainder_probes=0))
    make(network()).fit(batches()[:4], generator=seeded(), checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="its number of data differs"):
        make(network()).fit(batches(), generator=seeded(), checkpoint=tmp_path)


class Stream(torch.utils.data.IterableDataset):
    """Batches as they come; nobody knows how many."""

    def __init__(self, most):
        self.most = most

    def __iter__(self):
        for number, batch in enumerate(batches()):
            if number == self.most:
                raise Stopped
            yield batch


@pytest.mark.parametrize("form", ["data set", "loader", "generator"])
def test_a_stream_of_unknown_length_goes_on(form, tmp_path):
    def stream(most=-1):
        found = Stream(most)
        return {
            "data set": lambda: found,
            "loader": lambda: torch.utils.data.DataLoader(found, batch_size=None),
            "generator": lambda: iter(found),  # which can be run over only once
        }[form]()

    def posterior():
        return lp.KFAC(network(), "classification", memory_budget="16 MiB")

    whole = posterior().fit(stream())
    with pytest.raises(Stopped):
        posterior().fit(stream(4), checkpoint=tmp_path)
    found = posterior().fit(stream(), checkpoint=tmp_path)
    assert found.n_data == whole.n_data == 30
    assert torch.equal(found.variance(), whole.variance())


def test_what_is_finished_is_not_computed_again(tmp_path, monkeypatch):
    net, computed = network(), []
    accumulate = lp.curvature.Native.accumulate

    def counted(self, *args, **kwargs):
        computed.append(1)
        return accumulate(self, *args, **kwargs)

    monkeypatch.setattr(lp.curvature.Native, "accumulate", counted)
    with pytest.raises(Stopped):
        lp.KFAC(net, "classification").fit(Until(batches(), 4), checkpoint=tmp_path / "fit")
    computed.clear()
    lp.KFAC(net, "classification").fit(batches(), checkpoint=tmp_path / "fit")
    assert len(computed) == 1 + 2  # the first, which shapes the sums, and those that are missing
    computed.clear()
    again = lp.KFAC(net, "classification").fit(batches(), checkpoint=tmp_path / "fit")
    assert len(computed) == 1 and again.n_data == 30


def test_a_tangent_is_continued(tmp_path):
    def posterior():
        return lp.Riemannian(network(), "classification", n_samples=2)

    with pytest.raises(Stopped):  # two batches and a pass that surveys come first
        posterior().fit(Until(batches(), 1 + 6 + 3), checkpoint=tmp_path / "fit")
    found = posterior().fit(batches(), checkpoint=tmp_path / "fit")
    assert torch.equal(found.tangent.variance(), posterior().fit(batches()).tangent.variance())
    assert (tmp_path / "fit" / "curvature").is_dir()


@pytest.mark.parametrize(
    ("made", "data"),
    [
        (lambda: lp.KFAC(network(1.5), "classification"), batches()),  # another network
        (lambda: lp.Diagonal(network(), "classification"), batches()),
        (lambda: lp.KFAC(network(), "classification", weight_sharing="reduce"), batches()),
        (lambda: lp.KFAC(network(), "classification"), batches(seed=2)),
        (lambda: lp.KFAC(network(), "classification"), [*batches()[1:3], batches()[0], *batches()[3:]]),
        (lambda: lp.KFAC(network(), "classification"), batches()[:2]),
    ],
    ids=["network", "class", "settings", "data", "order", "fewer"],
)
def test_the_checkpoint_of_another_fit_is_refused(made, data, tmp_path):
    folder = tmp_path / "fit"
    with pytest.raises(Stopped):
        lp.KFAC(network(), "classification").fit(Until(batches(), 5), checkpoint=folder)
    with pytest.raises(CheckpointError, match="another computation"):
        made().fit(data, checkpoint=folder)
    lp.KFAC(network(), "classification").fit(batches(), checkpoint=folder)  # which is as it was


def test_what_cannot_continue_says_so(tmp_path):
    with pytest.raises(UnsupportedError, match="cannot continue"):
        lp.VariationalLastLayer(network(), "classification").fit(batches(), checkpoint=tmp_path / "fit")
    with pytest.raises(UnsupportedError, match="cannot continue"):
        lp.VariationalLastLayer(network(), "classification").update(batches(), checkpoint=tmp_path / "fit")
    assert not (tmp_path / "fit").exists()


@pytest.mark.parametrize("entry", [{"names": ["4.weight"]}, {"key": {}}, {"rule": "general"}])
def test_sums_of_other_blocks_are_refused(entry, tmp_path):
    MAKERS["KFAC"](network()).fit(batches(), checkpoint=tmp_path)
    stage = tmp_path / "curvature"
    header, tensors = io.read(stage)
    header["stage"]["blocks"][0] |= entry
    io.write(stage, header, tensors)
    with pytest.raises(CheckpointError, match="other parameters|cannot be read"):
        MAKERS["KFAC"](network()).fit(batches(), checkpoint=tmp_path)
