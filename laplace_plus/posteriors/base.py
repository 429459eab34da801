"""The abstract posterior: what every method gives and what it gets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from inspect import Parameter, signature
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from laplace_plus import io
from laplace_plus.distributed import Distributed, Group, resolve_group
from laplace_plus.errors import EmptyDataError, UnsupportedError, tried
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network.batches import Batch, can_be_cut, cut, iterate, output_tensor
from laplace_plus.posteriors.calls import Called
from laplace_plus.posteriors.configuration import Summary, full_precision
from laplace_plus.posteriors.probing import check_deterministic
from laplace_plus.posteriors.training_data import TrainingData
from laplace_plus.priors import LAYERWISE, Groups
from laplace_plus.tuning.base import Tuner, TuningResult, resolve_tuner

_GOLDEN = 0x9E3779B97F4A7C15
"""The step between the seeds of neighbouring ranks: 2⁶⁴ divided by the golden ratio."""


class Posterior(Called):
    """A posterior over (some of) the parameters of a trained network.

    A subclass must give :meth:`fit_batches` and :meth:`sample`. It may give :meth:`functional_posterior` where it knows
    better than Monte Carlo, and :meth:`options`, :meth:`state` and :meth:`restore` to be saved. The network itself is
    never changed. See ``docs/extending.md``.

    Calls from several threads, to this and other posteriors of the network, come one after the other. The user's own
    threads must not run or train the network meanwhile, because other weights take the place of its own.

    Args:
        model: The trained ``nn.Module``.
        likelihood: ``"classification"``, ``"regression"``, ``"binary"``, a :class:`~laplace_plus.Likelihood`, or a
            callable ``(outputs, targets) -> log densities``.
        parameters: ``"all"`` (that require gradients), ``"last_layer"`` (on the path to the outputs; of a tied weight
            its use there), names or globs of parameters or modules, a predicate ``(name, parameter) -> bool``, a mask.
        prior_precision: Inverse prior variance: a scalar, one for each layer, or one for each entry.
        prior_mean: A scalar or one for each entry.
        temperature: Divides the log-likelihood, and with it the curvature.
        backend: ``"native"``, ``"backpack"``, ``"curvlinops"``, or an instance with options.
        memory_budget: Bytes, or a text such as ``"2 GiB"``, that intermediate results may take on top of the network,
            the data and what is returned. Work is cut into chunks accordingly. The default is a quarter of the memory
            that is free on the network's device.

    Attributes:
        network: The model as a function of the selected parameters.
        n_data: Number of examples seen; :meth:`fit_batches` sets it.
        n_outputs: C, or 0 where the method does not say; :meth:`fit_batches` sets it.
        group: The ranks that shared the last fit; None for one process.
        training_data: The loaders of the fit, for methods that pass over the data again.

    Raises:
        ConfigurationError: An argument that is not of these kinds.
        SelectionError: No such parameters.
        UnsupportedError: A network that cannot be treated as a function of single examples.
    """

    over_ranks: bool = False
    """Whether :meth:`fit_batches` sums over the ranks in ``group``; a class that does not is refused several."""

    tuners: ClassVar[Mapping[str, type[Tuner]]] = {}
    """Classes of the tuners that this class supports, by shorthand; the first of them is ``"auto"``."""

    tuning: TuningResult | None = None
    """The result of the last tuning."""

    training_data: TrainingData = TrainingData()

    earlier: Any = None
    """The sums of earlier tasks' data, to which :meth:`fit` adds; see ``lp.continue_on``."""

    # -- what a method gives -------------------------------------------------------------------------------------------

    @abstractmethod
    def fit_batches(
        self, data: Iterable[Any], *, update: bool, progress: bool, generator: torch.Generator | None
    ) -> None:
        """One method's own work, from streamed batches; if it fails, attributes become what they were.

        It sets ``n_data``, usually ``n_outputs``, and :attr:`mean` where that is not the network's weights.
        :meth:`batches` iterates over the data. Of the keywords a method may take those that it needs. Without
        ``update`` it can only be fitted anew.
        """

    # -- what it gets --------------------------------------------------------------------------------------------------

    @full_precision
    def fit(
        self,
        data: Iterable[Any],
        *,
        progress: bool = False,
        generator: torch.Generator | None = None,
        distributed: Distributed = None,
    ) -> Self:
        """Fit to data in one pass (or what the method needs), forgetting any earlier fit.

        Args:
            data: An iterable of batches: ``(x, y)`` tuples, nested tuples, or mappings with labels.
            progress: Whether to show a progress bar.
            generator: Source of randomness, for methods that use any; of several ranks, that of rank 0 counts.
            distributed: Which ranks of ``torch.distributed`` share the data, each with a loader of its own: None for
                all there are, False for this process alone, or a process group. Every one of them makes the same call.

        Raises:
            DistributedError: Another rank failed, or disagrees on the network or on settings.
            EmptyDataError: No data came.
            DataError: A batch of a form that cannot be used.
            LabelError: Targets that do not fit the likelihood, or that repeat ``"input_ids"`` unshifted.
            OutputError: Network outputs that do not fit it, such as probabilities in place of logits.
            NonFiniteError: NaN or Inf in parameters or outputs.
            SelectionError: The selected parameters have no influence on the likelihood of the data.
            UnsupportedError: A curvature that the backend cannot compute.
        """
        is_alone = distributed is None and not (dist.is_available() and dist.is_initialized())
        group = None if is_alone else resolve_group(distributed)
        with nullcontext() if group is None else group.together():
            if self.network.sharded is not None:
                self.network.refresh()
            self.network.check_finite()
            self.run_fit(data, group, progress=progress, generator=generator)
        return self

    @full_precision
    def update(
        self,
        data: Iterable[Any],
        *,
        progress: bool = False,
        generator: torch.Generator | None = None,
        distributed: Distributed = None,
    ) -> Self:
        """Add data without forgetting; arguments and errors as for :meth:`fit`.

        Unlike that of :meth:`fit`, the loader is not kept alive. A method that passes over the training data again
        needs all of them: keep the loaders (lists are never kept), or pass ``data=`` there.
        """
        options: Any = {"progress": progress, "generator": generator}
        if self._vector is None:
            return self.fit(data, distributed=distributed, **options)
        group = resolve_group(distributed)
        with nullcontext() if group is None else group.together():
            self.require_fit()
            self.run_fit(data, group, update=True, **options)
        return self

    def run_fit(
        self,
        data: Iterable[Any],
        group: Group | None,
        *,
        update: bool = False,
        progress: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        """What :meth:`fit` and :meth:`update` do within a session of the ranks; a failure changes nothing."""
        taken = signature(self.fit_batches).parameters
        if update and "update" not in taken:
            what = f"{type(self).__name__} cannot be updated."
            raise UnsupportedError(what, expected="fit() on all the data", got="update()")
        network, before, vector = self.network, dict(vars(self)), self._vector
        learnt, self.group = dict(network.example_axes), group
        try:
            if group is not None:
                generator = self._agree(group, generator, update=update)
                progress = progress and group.rank == 0
            options: dict[str, Any] = {"update": update, "progress": progress, "generator": generator}
            if list(taken.values())[-1].kind is not Parameter.VAR_KEYWORD:
                for name in options.keys() - taken.keys():
                    del options[name]
            if not update:
                self._function = self._example = None
                network.example_axes.clear()
                network.reached.clear()
            self.remember_weights()
            self.fit_batches(data, **options)
            if self._vector is None or (self._vector is vector and not update):
                self._vector = self.network.vector()
            network.kept.pop("mark", None)
            if network.mark() != self._mark:  # the forward pass writes to the weights
                self.require_fit()
        except BaseException:
            self.__dict__ = before
            network.example_axes.clear()
            network.example_axes.update(learnt)
            raise
        if update:
            self.training_data = self.training_data.plus(data)
        else:
            gone = isinstance(data, Iterator) or self.earlier is not None
            self.training_data = TrainingData(None if gone else data)

    def _agree(self, group: Group, generator: torch.Generator | None, *, update: bool) -> torch.Generator | None:
        """Check that all ranks have the same posterior; returns this rank's generator."""
        if not self.over_ranks:
            what, got = f"{type(self).__name__} cannot be fitted over several ranks.", f"{group.size} of them"
            fix = "Pass distributed=False, and all the data, to fit on this rank alone."
            raise UnsupportedError(what, expected="one process", got=got, fix=fix)
        call = f"update() after {self.n_data} examples" if update else "fit()"
        weights = {
            f"the {entry['kind']} {entry['name']!r}": f"{entry['dtype']} {entry['shape']} of {entry['sha256'][:16]}"
            for entry in io.fingerprint(self.network.model)["tensors"]
        }
        settings = {name: str(value) for name, value in self.settings().items()}
        group.check_agreement({"the call": call, **settings, **weights})
        if self.backend.kind != "ggn_mc":
            return generator
        seeds = group.exchange("the seed", draw_seed(torch.default_generator if generator is None else generator))
        device = self.network.device if generator is None else generator.device
        # The examples of different ranks draw independent labels.
        return torch.Generator(device).manual_seed((seeds[0] + _GOLDEN * group.rank) % 2**63)

    @full_precision
    def fit_prior_precision(
        self,
        tuner: Tuner | str = "auto",
        structure: str | Groups | None = None,
        *,
        data: Iterable[Any] | None = None,
        tune_noise: bool | None = None,
        progress: bool = False,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> Self:
        """Tune the prior precision and, where the likelihood has one, the noise level with it.

        Args:
            tuner: A tuner, such as ``lp.MarginalLikelihood(structure="layerwise")``, or a shorthand among
                :attr:`tuners`: for Gaussian posteriors ``"marginal_likelihood"``, ``"mackay"``, ``"em"``,
                ``"tangent"``, ``"validation"``, ``"leave_one_out"`` or ``"auto"``, :class:`~laplace_plus.Auto`. Of
                other classes ``"auto"`` is the first. An option that only the marginal likelihood has asks for it.
            structure: With a shorthand, the tuner's ``structure``: ``"scalar"``, ``"layerwise"``,
                ``"normalized_groups"``, ``"diagonal"`` or :class:`~laplace_plus.Groups`.
            data: With a shorthand, the tuner's ``data``: held-out batches for ``"auto"`` and ``"validation"``. Others
                take the training data, by default the loaders that :meth:`fit` saw.
            tune_noise: With a shorthand, whether to tune Gaussian noise; by default whenever there is any.
            progress: Whether to show a progress bar.
            generator: Source of randomness, for tuners that draw samples.
            **options: Further arguments of the tuner that a shorthand stands for. ``evidence="tangent"`` makes
                ``lp.Tangent`` of the three by marginal likelihood.

        Returns:
            The posterior, with ``prior_precision``, ``prior_groups``, ``noise_std`` and :attr:`tuning` set.

        Raises:
            NotFittedError: Before :meth:`fit`.
            UnsupportedError: A tuner that this class does not support, or a prior that its structure does not take.
            ConfigurationError: An unknown shorthand or option.
            DataError: The training data are needed, and not at hand; or all held-out targets are ignored.
            NonFiniteError: A loss that is not finite.

        Warns:
            ConvergenceWarning: The tuning ended before it met its tolerance, or at the end of its grid.
        """
        self.require_fit()
        options = {"structure": structure, "data": data, "tune_noise": tune_noise, **options}
        chosen = resolve_tuner(type(self).__name__, self.tuners, tuner, options)
        result = self.run_tuner(chosen, progress=progress, generator=generator)
        before = dict(vars(self))
        try:
            self.apply_tuning(result)
        except BaseException:
            self.__dict__ = before
            raise
        return self

    def run_tuner(self, tuner: Tuner, *, progress: bool, generator: torch.Generator | None) -> TuningResult:
        """What a tuner finds; a class with its own way to go about a tuner replaces this."""
        return tuner.tune(self, progress=progress, generator=generator)

    def apply_tuning(self, result: TuningResult) -> None:
        """Set the hyperparameters that a tuner found; a class that has more of them adds to this."""
        if result.groups is not None:
            index = result.groups.index
            layers = result.groups.name == LAYERWISE and torch.equal(index, self.network.layer_index())
            self._prior_groups = None if layers else result.groups
        self._prior_precision = result.prior_precision
        if result.noise_std is not None:
            self.noise_std = result.noise_std
        self.tuning, self.link, self.covariance_scale = result, result.link, result.covariance_scale
        self.tangent_mean = result.vector if result.predictive_mean == "tangent" else None
        for name, value in result.settings.items():
            setattr(self, name, value)

    def summary(self) -> Summary:
        """Which parameter is treated how; NotFittedError: before :meth:`fit`."""
        self.require_fit()
        rows = tuple((item.name, item.size, item.layer, type(self).__name__) for item in self.network.selected)
        return Summary(repr(self), rows, self.describe_groups())

    def batches(self, data: Iterable[Any], *, progress: bool = False, description: str = "") -> Iterator[Batch]:
        """A loader's batches on the network's device; EmptyDataError for none, unless other ranks may have any."""
        random_state = torch.cuda.get_rng_state if self.network.device.type == "cuda" else torch.get_rng_state
        try:
            for batch in iterate(data, device=self.network.device, progress=progress, description=description):
                yield batch
                if self._example is None:
                    size, before = len(batch.target), random_state()
                    self._example = cut(batch.inputs, [0, size - 1]) if can_be_cut(batch.inputs, size) else batch.inputs
                    look = partial(self.network.raw_each, self._example, [{}])
                    with torch.no_grad():
                        found = [*(tried(look)[0] or ()), *(tried(look)[0] or ())]
                    same = found and torch.equal(*map(output_tensor, found)) and torch.equal(before, random_state())
                    if not same:  # or a network for batches of one size
                        check_deterministic(self.network, batch.inputs)
        except EmptyDataError:
            if self.group is None:
                raise

    def __repr__(self) -> str:
        state = f"fitted to {self.n_data} examples" if self.is_fitted else "not fitted"
        return f"{type(self).__name__}({self.likelihood!r}, P={self.n_parameters:,}, {state})"
