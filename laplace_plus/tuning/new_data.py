"""What new data would say of a posterior, told from the training data alone.

A network that has learnt its labels by heart, wrong ones among them, has no gradients left at its data. Nothing that is
computed from its weights there, such as leaving out a datum by a Newton step, then knows what new data cost. Two views
do, and neither needs derivatives by the weights:

- **Between neighbouring data** the network was not trained. What a new label would be there is told by the labels of
  others, see :func:`fresh_labels`; a point halfway between two data stands for new data, as the synthetic examples of
  Chawla et al. (2002, "SMOTE: synthetic minority over-sampling technique") do.
- **At the data** the outputs of the network can be told from those at other data, as far as they are a smooth function
  of what a network of this kind makes of its inputs; see :func:`unlearned_features`. Where an output belongs to its own
  datum alone, the others tell another, and its own label counts as new.

Both predict by ridge regression with a Gaussian kernel. Without the datum n it predicts ``y_n − [M y]_n / M_nn``, with
``M = (K + λ)⁻¹``, of which the ridge λ and the kernel's width are those of least left-out error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from laplace_plus.likelihoods import Likelihood
from laplace_plus.network import batches
from laplace_plus.network.network import Network
from laplace_plus.network.selection import last_layer_of, layer_of
from laplace_plus.predictive import Prediction, from_functional
from laplace_plus.predictive.linearized import outputs_for
from laplace_plus.tuning.base import Tunable

ROWS, POINTS, NEIGHBOURS = 700, 200, 5
"""Data (or positions) that predict each other, at how many of them losses are compared, and of how many near ones the
other end of a midpoint is one."""

CHOOSING = 350
"""Rows that choose a kernel's width and ridge, which depend on their number little."""

ASKED, FEWEST = 2000, 100
"""At most and at least how many rows are asked: among more, what mini-batches leave shows; fewer tell nothing."""

KEPT = 1e8
"""Numbers of the inputs among which neighbours are searched at most; of more, evenly spread ones."""

FEATURES, DRAWS = 64, 2
"""Features that stand for an input, from each of two networks with shuffled weights."""

TOLD_LABELS, TOLD_OUTPUTS = 2 / 3, 0.45
"""What others must tell for a view to count: the share of labels that are not wrong, and of the outputs' variance. On
tables and digits these were at least .72 and .46; on photographs, and digits at any place of an image, .6 and .4."""

SURE = (0.15, 0.25, 0.4, 0.5)
"""Shares of the data whose labels others predict most surely: the least error among them is the rate of wrong labels.
One share alone errs where data are few, or hard."""

BETWEEN = 3.0
"""Weight of the view between data to that at the data. On the development cells of benchmarks/defaults losses were
nearer to those of the best scale than with 1 or 2, and as near as with 4."""

LITTLE = 0.1
"""Nats of expected gain over the network below which the next narrower scale is taken: where little is gained, the
doubt is the network's. On the battery 92 % of classifiers were then within .005 nats of the network or better, now all,
and as many within .05 of the best scale (96 %, 97 % without)."""

ENOUGH, LEAST, ENTRIES, PRODUCTS = 2000, 100, 1e8, 3e9
"""Data whose covariances are computed: at most 2000, whose mean loss has a standard error of about .02 nats, and at
least 100, as fewer tell nothing. In between as many as have 10⁸ covariances of outputs together, and 3·10⁹ outputs
times weights."""

TOLERANCE = 0.005
"""Nats by which a loss of regression may exceed the least; standard errors are rarely less."""

MASKED = -5e3
"""Logits below it are masked: no other input tells them, and they tell none."""

WORSE = 0.05
"""Nats by which a loss exceeds the least where no wider scale is tried."""

LEAST_ROWS = 10
"""Data of which fewer tell nothing of each other."""


def evenly(n: int, most: int, device: torch.device | None = None) -> Tensor:
    """Indices of at most so many of n, evenly spread."""
    return torch.linspace(0, n - 1, min(most, n), device=device).round().long()


def thinned(loader: Iterable[batches.Batch], share: float) -> Iterator[batches.Batch]:
    """Evenly spread examples of each batch, of the first one at least; batches that cannot be cut stay whole."""
    owed = 1.0
    for batch in loader:
        size = batches.batch_size(batch.target)
        count = round(share * size)
        if not count:  # of many small batches, some give one example
            owed += share * size
            count = int(owed)
            owed -= count
        if share == 1 or not batches.can_be_cut(batch.inputs, size):
            yield batch
        elif count:
            chosen = torch.linspace(0, size - 1, count).round().long().tolist()
            yield batches.Batch(batches.cut(batch.inputs, chosen), batches.cut(batch.target, chosen))


@dataclass(frozen=True)
class Rows:
    """Evenly spread training data with one target each; several positions of an example are several rows.

    Attributes:
        inputs: Of E examples, in parts of the loader's batches.
        outputs: f, ``[E·M, C]`` float64.
        targets: ``[E·M, ...]``, or a tree of these.
        weights: ``[E·M]``; zero where there is no label.
        per_example: M.
        batch_size: Examples of the first batch.
    """

    inputs: list[Any]
    outputs: Tensor
    targets: Any
    weights: Tensor
    per_example: int
    batch_size: int

    @property
    def are_points(self) -> bool:
        """Whether an input is one real tensor of one shape, with one target."""
        tensors = [x for x in self.inputs if isinstance(x, Tensor) and x.is_floating_point()]
        return len(tensors) == len(self.inputs) and self.per_example == len({x.shape[1:] for x in tensors}) == 1

    def chosen(self, most: int) -> Tensor:
        """Indices of at most so many evenly spread rows that have a label."""
        rows = self.weights.nonzero()[:, 0]
        return rows[evenly(len(rows), most, rows.device)]

    def merged(self) -> Rows:
        """Copies of a datum as the first of them, with the weight of all: as many as a weight says."""
        draw = torch.randn(self.inputs[0][0].numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        # Equal for copies alone.
        key = [(x.reshape(len(x), -1) * draw.to(x.device)).sum(1, keepdim=True) for x in self.inputs]
        targets = [leaf.reshape(len(self.weights), -1) for leaf in batches.tensors_in(self.targets)]
        kept, total = distinct(torch.cat([torch.cat(key), *targets], 1), self.weights)
        return replace(self, weights=torch.zeros_like(self.weights).index_copy(0, kept, total))

    def around(self, index: Tensor) -> tuple[list[Any], Tensor]:
        """Inputs that hold rows of ascending indices, in parts, and where their outputs have these rows."""
        if self.per_example != 1:
            return self.inputs, index
        parts, start = [], 0
        for part in self.inputs:
            size = batches.batch_size(part)
            own = index[(index >= start) & (index < start + size)] - start
            start += size
            if len(own):
                parts.append(batches.cut(part, own.tolist()))
        return batches.rejoined(parts, self.batch_size), torch.arange(len(index), device=index.device)


def rows_of(
    network: Network, likelihood: Likelihood, data: Iterable[Any], n_data: int, *, progress: bool = False
) -> Rows | None:
    """Training data for both views, in one pass; None where batches cannot be cut into examples."""
    first = next(iter(batches.iterate(data, device=network.device)))
    size = batches.batch_size(first.target)
    per_example = network.forward(first.inputs)[0, ..., 0].numel()
    numbers = sum(leaf.numel() for leaf in batches.tensors_in(first.inputs)) / size
    most = KEPT / max(numbers, POINTS) if per_example == 1 else max(8.0, ROWS / per_example)
    parts, found = [], []
    passed = batches.iterate(data, device=network.device, progress=progress, description="new data")
    for batch in thinned(passed, min(1.0, most / n_data)):
        if not batches.can_be_cut(batch.inputs, len(outputs := network.forward(batch.inputs))):
            return None
        likelihood.validate(outputs, batch.target)
        if outputs[0, ..., 0].numel() != per_example:
            per_example = 0  # padded to several lengths
        parts.append(batch.inputs)
        found.append(likelihood.rows(outputs.double(), batch.target))
    outputs, targets, weights = (batches.joined(column) for column in zip(*found, strict=True))
    for values in (outputs, *batches.tensors_in(targets)):
        weights = weights * values.reshape(len(values), -1).isfinite().all(1)
    rows = Rows(parts, outputs, targets, weights, per_example, size)
    return rows.merged() if rows.are_points else rows


def classes_of(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A network's own probabilities of classes, the labels' ones, ``[N, K]`` each, and the labels like the outputs."""
    members = targets.to(outputs)
    if not targets.is_floating_point() and likelihood.couples_outputs:
        members = one_hot(targets, outputs.shape[1]).to(outputs)
    found = from_functional(likelihood, outputs, torch.zeros_like(outputs)).mean
    return likelihood.class_probabilities(found), likelihood.class_probabilities(members), members


def surprise(likelihood: Likelihood, rows: Rows) -> float:
    """By how many standard errors labels lose more than a network's own probabilities p expect; 0 where unknown.

    It is ``Σ w (−log p_y − H(p)) / √(Σ w² Var_{y~p} log p_y)``. Of 106 trained networks it was at most 2.4 on training
    rows, and above 3 on 53 % of the sets of 500 unseen rows: it finds those of which the network is too sure. Soft
    labels, options that change the loss of training, and positions, which depend on each other, are not asked.
    """
    index, options = rows.chosen(ASKED), likelihood.training_options.items()
    plain = likelihood.is_classifier and all(getattr(likelihood, name) == value for name, value in options)
    if not plain or rows.per_example != 1 or len(index) < FEWEST:
        return 0.0
    if likelihood.couples_outputs and rows.targets.is_floating_point():
        return 0.0
    weights = rows.weights[index].double()
    p, truth, _ = classes_of(likelihood, rows.outputs[index], rows.targets[index])
    logs = p.clamp_min(torch.finfo(p.dtype).tiny).log()
    entropy, weights = -(p * logs).sum(1), weights.repeat_interleave(len(p) // len(weights))
    variance = ((p * logs.square()).sum(1) - entropy.square()).clamp_min(0.0)
    excess = (weights * (-(truth * logs).sum(1) - entropy)).sum()
    return float(excess / (weights.square() * variance).sum().sqrt().clamp_min(torch.finfo(p.dtype).tiny))


def midpoints(rows: Rows, chosen: Tensor) -> Tensor:
    """Halfway from each chosen datum to one of the five nearest others, as many; a copy of it is none."""
    x = torch.cat(rows.inputs)
    flat = (x - x.mean(0)).flatten(1).float()  # distances come of products, which lose digits far from the origin
    distances = torch.cdist(flat[chosen], flat).masked_fill(rows.weights == 0, torch.inf)
    distances.scatter_(1, chosen[:, None], torch.inf)
    near = distances.topk(min(2 * NEIGHBOURS, int(rows.weights.count_nonzero()) - 1), largest=False).indices
    copies = (flat[near] == flat[chosen][:, None]).all(-1)
    near = near.gather(1, copies.long().sort(dim=1, stable=True).indices)[:, :NEIGHBOURS]
    place = torch.arange(len(chosen), device=x.device)
    return (x[chosen] + x[near[place, place % near.shape[1]]]) / 2


def unlearned_features(network: Network, inputs: Sequence[Any]) -> Tensor:
    """What the network makes of its inputs before it has learnt, ``[E·M, 2 · 64]``.

    They are outputs of the network with the entries of each trained tensor shuffled, which keeps their size, and with a
    last layer that projects to 64 random outputs. Frozen weights have not learnt and stay. Where the last layer cannot
    have other outputs, they are its own.
    """
    generator = torch.Generator().manual_seed(0)
    trained = {name for name, parameter in network.model.named_parameters() if parameter.requires_grad}
    last, drawn = last_layer_of(network.model), []
    for _ in range(DRAWS):
        values, head = dict[str, Tensor](), dict[str, Tensor]()
        for name, own in network.parameters.items():
            if name in trained and own.is_floating_point():
                order = torch.randperm(own.numel(), generator=generator).to(own.device)
                values[name] = own.flatten()[order].view_as(own)
            if layer_of(name) == last and own.is_floating_point():
                shape = (FEATURES, *own.shape[1:])
                random = torch.randn(shape, generator=generator).to(own)
                head[name] = random if own.ndim > 1 else torch.zeros_like(random)
        try:
            found = [network(x, {**values, **head}).detach() for x in inputs]
        except Exception:  # whatever a network with a tied or nested last layer makes of it
            found = [network(x, values).detach() for x in inputs]
        flat = unmasked(torch.cat([outputs.flatten(0, -2) for outputs in found]).double())
        flat = flat - flat.mean(0)
        drawn.append(flat / flat.square().sum(1).mean().sqrt().clamp_min(torch.finfo(flat.dtype).tiny))
    return torch.cat(drawn, 1)


def unmasked(logits: Tensor) -> Tensor:
    """Logits ``[n, C]`` with the mean of their column's others in place of masked ones."""
    masked = logits < MASKED
    return torch.where(masked, logits.masked_fill(masked, math.nan).nanmean(0).nan_to_num(0.0), logits)


def left_out(features: Tensor, values: Tensor, widths: Sequence[float], ridges: Tensor) -> Tensor:
    """Values ``[n, m]`` predicted for each of n rows from the others by their features, float64.

    Widths are in units of the median squared distance. Of rows with the same features one is told by none of them.
    """
    squares = torch.cdist(features, features).square().double()
    scale = squares.median().clamp_min(torch.finfo(squares.dtype).tiny)
    some, mean, best = evenly(len(values), CHOOSING, values.device), values.mean(0), (math.inf, 1.0, 1.0)
    wanted, ridges = (values - mean)[some], ridges.to(squares)
    for width in widths:
        kernel = torch.exp(-squares[some[:, None], some] / (2 * width * scale))
        eigenvalues, basis = torch.linalg.eigh(kernel)
        inverse = 1 / (eigenvalues.clamp_min(0.0)[:, None] + ridges)  # [n, L]
        turned = inverse[..., None] * (basis.T @ wanted)[:, None]
        errors = (basis @ turned.flatten(1)).view(*turned.shape) / (basis.square() @ inverse)[..., None]
        losses = errors.square().mean((0, 2))
        least = int(losses.argmin())
        best = min(best, (float(losses[least]), width, float(ridges[least])))
    _, width, ridge = best
    kernel = torch.exp(-squares / (2 * width * scale))
    kernel.diagonal().add_(ridge)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(kernel))
    return values - (inverse @ (values - mean)) / inverse.diagonal()[:, None]


def left_out_labels(features: Tensor, truth: Tensor) -> Tensor:
    """Scores of classes ``[n, K]`` for each row from the labels ``[n, K]`` of the others."""
    return left_out(features, truth, (0.1, 0.3), torch.logspace(-4, 1, 11))


def left_out_outputs(features: Tensor, outputs: Tensor) -> Tensor:
    """The network's outputs ``[n, C]`` for each row from those at the others."""
    return left_out(features, outputs, (0.1, 0.3, 1.0), torch.logspace(-7, 1, 17))


def distinct(features: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the first of each set of equal rows, in their order, and the sums of their weights ``[n]``."""
    _, place = torch.unique(features, dim=0, return_inverse=True)
    first = torch.full((int(place.max()) + 1,), len(place), device=place.device)
    index = torch.arange(len(place), device=place.device)
    kept = first.scatter_reduce(0, place, index, "amin").sort().values
    return kept, torch.zeros_like(weights).index_add(0, place, weights)[place[kept]]


def rate_of_wrong(scores: Tensor, truth: Tensor) -> float:
    """The rate of labels ``truth [n, K]`` that are wrong, by the scores ``[n, K]`` of :func:`left_out_labels`.

    It is the error of the surest of them, since others err there only where the label does.
    """
    best, second = scores.topk(2).values.unbind(1)
    wrong = (scores.argmax(1) != truth.argmax(1))[(best - second).argsort(descending=True)].double()
    counts = [min(len(truth), max(10, int(share * len(truth)))) for share in SURE]
    return min(0.45, *((float(wrong[:count].sum()) + 0.5) / (count + 1) for count in counts))


def fresh_labels(scores: Tensor, truth: Tensor, rate: float) -> Tensor:
    """How a new label at each row is distributed, ``[n, K]``, where labels are wrong at a rate ρ.

    The scores of :func:`left_out_labels` become probabilities q by one factor, that of least loss. A wrong label is any
    other with equal odds. Bayes' rule joins a row's own label y with q cleared of wrong labels, and a new label is
    wrong with ρ again:

        p_c ∝ q'_c ((1 − ρ) y_c + ρ (1 − y_c)/(K − 1)),    t = (1 − ρ) p + ρ (1 − p)/(K − 1).
    """
    factors = torch.tensor([1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0], dtype=scores.dtype)
    losses = [float(-(truth * (factor * scores).log_softmax(1)).sum(1).mean()) for factor in factors.tolist()]
    q = (factors[losses.index(min(losses))] * scores).softmax(1).clamp_min(1e-4)
    other = rate / (truth.shape[1] - 1)
    cleared = ((q / q.sum(1, keepdim=True) - other) / (1 - rate - other)).clamp_min(1e-3)
    p = cleared * ((1 - rate) * truth + other * (1 - truth))
    p = p / p.sum(1, keepdim=True)
    return (1 - rate) * p + other * (1 - p)


Score = Callable[[Prediction], Tensor]


class Losses:
    """Mean losses ``[G + 1]`` at scales and of the network, which is the last one, from there to wider scales.

    Along scales losses have one minimum, and integrals of the link take longer for wide ones: those behind one that is
    ``worse`` than the least are infinite until they are asked for.
    """

    def __init__(self, loss: Callable[[int], float], count: int, worse: float = WORSE) -> None:
        self._loss, self.values = loss, torch.full((count,), math.inf, dtype=torch.float64)
        for place in reversed(range(count)):
            if self[place] > self.values.min() + worse:
                break

    def __getitem__(self, place: int) -> float:
        if self.values[place].isinf():
            self.values[place] = self._loss(place)
        return float(self.values[place])


@dataclass(frozen=True)
class Views:
    """Mean losses ``[G + 1]`` of a posterior at scales of its covariance, and of the network itself, in two views."""

    own: Tunable
    scales: tuple[float, ...]
    options: dict[str, Any]

    @property
    def has_network(self) -> bool:
        """Whether predictions can be the network's own; if not, the last scale stands for them."""
        return self.options["link"] is None and "network" in self.own.likelihood.links

    @property
    def most(self) -> int:
        """At how many points covariances are computed."""
        return min(POINTS, room(self.own))

    def choose(self, rows: Rows | None) -> tuple[int, bool, str, dict[str, Any]]:
        """The place of the scale that both views choose, or the network's; whether they tell; notes; findings."""
        at = between = rate = None
        notes, network = " Batches of these inputs cannot be cut into examples.", len(self.scales)
        if rows is not None:
            at, notes = self.at_data(rows), ""
            try:
                between, rate = self.between(rows)
            except Exception as failure:  # a network may refuse what lies between its inputs, in its own words
                notes = f" Midpoints were not compared: {str(failure).partition(chr(10))[0]}"
        pairs = [(1.0, at), (BETWEEN, between)]
        found = [(weight, losses) for weight, losses in pairs if losses is not None and math.isfinite(losses[network])]

        def total(place: int) -> float:
            return sum(weight * one[place] for weight, one in found) / sum(weight for weight, _ in found)

        place = common_scale([(weight, one.values) for weight, one in found], self.scales)
        place += bool(found) and place + 1 < network and total(network) - total(place) < LITTLE
        value, gain = (-total(place), total(network) - total(place)) if found else (math.nan, math.nan)
        views = {"losses": at and at.values, "between_losses": between and between.values, "wrong_labels": rate}
        return place, bool(found), notes, {"value": value, "expected_gain": gain, **views}

    def at_data(self, rows: Rows) -> Losses | None:
        """At the data, under their own targets, with the network's outputs told by others; None if they tell little."""
        likelihood, index = self.own.likelihood, rows.chosen(ROWS)
        if len(index) < LEAST_ROWS:
            return None
        parts, place = rows.around(index)
        features = unlearned_features(self.own.network, parts)[place]
        kept, weights = distinct(features, rows.weights[index])
        index, outputs = index[kept], rows.outputs[index[kept]]
        masked = (outputs < MASKED) & likelihood.is_classifier
        outputs = torch.where(masked, unmasked(outputs), outputs)
        if likelihood.is_classifier and likelihood.couples_outputs:  # softmax takes their mean away
            outputs = outputs - outputs.mean(1, keepdim=True)
        told = left_out_outputs(features[kept], outputs)
        missed = (told - outputs).square().sum() / (outputs - outputs.mean(0)).square().sum()
        if len(kept) < LEAST_ROWS or not float(missed) <= 1 - TOLD_OUTPUTS:  # or NaN: outputs are all alike
            return None
        told, some = told.masked_fill(masked, 2 * MASKED), evenly(len(index), self.most, index.device)
        targets, weights = batches.cut(rows.targets, index[some]), weights[some]
        score: Score = lambda found: -(weights * found.log_prob(targets)).sum() / weights.sum()  # noqa: E731
        return self.losses_at(*rows.around(index[some]), told[some], score)

    def between(self, rows: Rows) -> tuple[Losses | None, float | None]:
        """Between neighbouring data, under new labels there, and the rate of wrong ones; either end's label is as good.

        None for numbers, for inputs of other forms, and where labels tell little of each other.
        """
        likelihood, index = self.own.likelihood, rows.chosen(ROWS)
        if not likelihood.is_classifier or not rows.are_points:
            return None, None
        features = torch.cat(rows.around(index)[0]).flatten(1)
        kept, _ = distinct(features, rows.weights[index])
        features, index = features[kept], index[kept]
        if len(index) < LEAST_ROWS:
            return None, None
        own, truth, members = classes_of(likelihood, rows.outputs[index], rows.targets[index])
        scores = likelihood.class_probabilities(left_out_labels(features, members))
        right, told = ((values.argmax(1) == truth.argmax(1)).double().mean().item() for values in (own, scores))
        wrong = rate_of_wrong(scores, truth)
        rate = max(wrong - (1 - right), 0.0)  # of labels that the network learnt by heart
        if told < TOLD_LABELS * (1 - wrong):
            return None, rate
        fresh = fresh_labels(scores, truth, rate)
        some = evenly(len(index), self.most, index.device)
        points = midpoints(rows, index[some])
        fresh = fresh.view(len(index), -1, fresh.shape[1])[some].flatten(0, 1)
        score: Score = lambda found: -(fresh * _logs(likelihood, found)).sum() / len(some)  # noqa: E731
        return self.losses_at(list(points.split(rows.batch_size)), None, None, score), rate

    def losses_at(self, parts: list[Any], place: Tensor | None, outputs: Tensor | None, score: Score) -> Losses:
        """Losses at inputs, or at some of their rows with other outputs."""
        own, likelihood, seed = self.own, self.own.likelihood, self.options["seed"]
        link, n, size = self.options["link"] or likelihood.links[0], self.options["n_samples"], self.own.n_outputs
        generator = torch.Generator().manual_seed(0)  # for covariances that are estimated
        found = [own.functional_posterior(x, outputs=outputs_for(link, size), generator=generator) for x in parts]
        mean = torch.cat([one.mean.reshape(-1, size) for one in found])
        covariance = torch.cat([one.covariance.flatten(0, one.mean.ndim - 2) for one in found])
        if place is not None and outputs is not None:
            mean, covariance = outputs.to(mean), covariance[place]

        def loss(number: int) -> float:
            source = None if seed is None else torch.Generator(device=mean.device).manual_seed(seed)
            scaled = self.scales[min(number, len(self.scales) - 1)] * covariance
            kind = "network" if number == len(self.scales) and self.has_network else link
            return float(score(from_functional(likelihood, mean, scaled, link=kind, n_samples=n, generator=source)))

        return Losses(loss, len(self.scales) + 1)


def _logs(likelihood: Likelihood, found: Prediction) -> Tensor:
    """Logarithms of the classes' probabilities, ``[N, K]`` float64."""
    probabilities = likelihood.class_probabilities(found.mean).double()
    return probabilities.clamp_min(torch.finfo(found.mean.dtype).tiny).log()


def room(own: Tunable) -> int:
    """Of how many data covariances may be computed."""
    size = own.n_outputs
    return int(min(ENOUGH, max(1.0, ENTRIES / size**2), max(LEAST, PRODUCTS / (size * own.network.n_parameters))))


def common_scale(found: list[tuple[float, Tensor]], scales: tuple[float, ...]) -> int:
    """The place of the scale that weighed views choose together, or of the network: behind the last one."""
    places = [int(losses.argmin()) for _, losses in found]
    if len(set(places)) < 2:  # noqa: PLR2004
        return next(iter(places), len(scales))
    logs = [math.log(scales[min(place, len(scales) - 1)]) for place in places]
    mean = sum(weight * log for (weight, _), log in zip(found, logs, strict=True)) / sum(weight for weight, _ in found)
    return min(range(len(scales)), key=lambda place: abs(math.log(scales[place]) - mean))
