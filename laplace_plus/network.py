"""The trained module as a pure function ``f(θ, x)`` of its parameters and inputs.

The user's model is never touched: it runs through ``torch.func.functional_call`` in evaluation mode, on detached views
of its parameters and on copies of its buffers, and every mode is put back, also when the network fails.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from laplace_plus import batches
from laplace_plus.differentiability import checkpointing_refused, differentiable_kernels
from laplace_plus.distributed import plain_module, refresh_, sharded_source
from laplace_plus.errors import ConfigurationError, InputError, NonFiniteError, UnsupportedError
from laplace_plus.kernels import all_finite, checksums
from laplace_plus.modes import eager, evaluation_mode, turn
from laplace_plus.selection import Selected, Selection, select


class _ReferencePath(TorchFunctionMode):
    """Keeps modules off their fused inference kernels, which have no derivatives.

    Transformer modules look for exactly this: whether some function mode is active.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def exact_arithmetic(network: Network) -> Iterator[None]:
    """Linear algebra and derivatives as they should be, whatever the caller's context.

    Autocast is put aside, for everything but the network's own forward pass, and so is inference mode, under which
    nothing can be differentiated. Checkpointed activations, which only fail deep inside of torch, are refused. Other
    threads wait for their turn; see :mod:`laplace_plus.modes`.
    """
    with turn(network.model):
        if network.ambient_autocast is not None:  # inside of another call, of this thread as it is its turn
            yield
            return
        kind = network.device.type
        network.ambient_autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        try:
            with torch.inference_mode(False), torch.autocast(kind, enabled=False), checkpointing_refused():
                yield
        finally:
            network.ambient_autocast = network._dtype = None
            network._looked = False


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside of ``torch.compile`` and data-parallel wrappers, which hide or scatter its operations.

    Of a model whose parameters are sharded over ranks it is a copy with whole ones.
    """
    wrapper = "module" if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else "_orig_mod"
    inner = getattr(model, wrapper, None)
    return unwrap(inner) if isinstance(inner, nn.Module) else plain_module(model)


class Network:
    """A trained network, seen as a function of some of its parameters.

    Args:
        model: The trained module; it stays as it is.
        parameters: Which parameters; see :mod:`laplace_plus.selection`.
        arrange: Puts the network's raw output into the shape ``[B, *, C]``, usually a likelihood's ``arrange``.

    Raises:
        ConfigurationError: ``model`` is not an ``nn.Module``.
        UnsupportedError: The module cannot run as a pure function (TorchScript), or an example's output depends on
            the other examples of its batch (batch statistics in evaluation mode).
        SelectionError: See :func:`laplace_plus.selection.select`.
    """

    def __init__(self, model: nn.Module, parameters: Selection, arrange: Callable[[Any], Tensor]):
        if not isinstance(model, nn.Module):
            raise ConfigurationError(
                "The model is not a module.", expected="a trained torch.nn.Module", got=type(model).__name__
            )
        # A compiled module hides its operations; what it wraps is the same function of the same parameters.
        self.model: nn.Module = unwrap(model)
        self._sharded = sharded_source(model)
        self.selection = parameters
        self.arrange = arrange
        with turn(self.model):
            _refuse_unsuitable(self.model)
            self._select(None)
        # What curvature.gradients learns about the network: the axis of each call that runs over examples, and where
        # each block lies in the parameter vector.
        self.example_axes: dict[str, Any] = {}
        self.layouts: dict[Any, Any] = {}
        # Whether a gradient of the outputs reaches a parameter, where autograd had to be asked.
        self.reached: dict[str, bool] = {}
        # What one example's forward pass and one direction's gradients take; None before any were seen.
        self.bytes_per_example: int | None = None
        # Whether a batch's examples may be run apart from each other; None before anybody looked.
        self.can_cut: bool | None = None
        # By the form of a batch: of how many examples the pieces were that gave its outputs, and the memory for them.
        self.apart: dict[Any, tuple[int, int]] = {}
        # The caller's autocast, while a public method runs; None outside.
        self.ambient_autocast: tuple[bool, torch.dtype] | None = None
        self._known: tuple[Any, ...] = ()
        # Whether the public method that is running has found the weights unchanged.
        self._looked = False

    def _select(self, last_layer: str | None) -> None:
        self.selected: tuple[Selected, ...] = select(self.model, self.selection, last_layer=last_layer)
        self._layer_index: Tensor | None = None
        self._dtype: torch.dtype | None = None

    def select_last_layer(self, layer: str) -> None:
        """Correct the ``"last_layer"`` selection, once execution order has shown which layer is last."""
        self._select(layer)
        self.example_axes.clear()
        self.layouts.clear()

    def twin(self) -> Network:
        """Another view of the same model, which remembers its weights by itself."""
        other = copy.copy(self)
        other.ambient_autocast, other._looked = None, False
        return other

    # -- the parameter vector ------------------------------------------------------------------------------------------

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the selected parameters, in the order in which they fill the parameter vector."""
        return tuple(item.name for item in self.selected)

    @property
    def n_parameters(self) -> int:
        """P, the number of selected entries."""
        return sum(item.size for item in self.selected)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the modules that own selected parameters, in order; one precision each in a layer-wise prior."""
        return tuple(dict.fromkeys(item.layer for item in self.selected))

    def offsets(self) -> dict[str, int]:
        """Where each selected parameter starts in the parameter vector."""
        result, position = {}, 0
        for item in self.selected:
            result[item.name] = position
            position += item.size
        return result

    def layer_index(self) -> Tensor:
        """For each entry of the parameter vector, the number of its layer: ``[P]`` integers."""
        if self._layer_index is None:
            number = {layer: i for i, layer in enumerate(self.layers)}
            self._layer_index = torch.cat([torch.full((item.size,), number[item.layer]) for item in self.selected])
        return self._layer_index

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Detached views of all parameters, selected or not."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def vector(self) -> Tensor:
        """The selected entries as they are in the network, ``[P]``, in at least float32."""
        parameters = self.parameters
        pieces = [_masked(parameters[item.name].flatten(), item.mask) for item in self.selected]
        return torch.cat([piece.to(self.dtype) for piece in pieces])

    def substitute(self, vector: Tensor) -> dict[str, Tensor]:
        """Parameter tensors with the selected entries taken from ``vector [P]``; differentiable."""
        parameters, result = self.parameters, {}
        for item, piece in zip(self.selected, vector.split([item.size for item in self.selected]), strict=True):
            original = parameters[item.name]
            piece = piece.to(original.dtype)
            if item.mask is not None:
                index = item.mask.to(original.device).nonzero().squeeze(-1)
                piece = original.flatten().index_copy(0, index, piece)
            result[item.name] = piece.view(item.shape)
        return result

    @property
    def dtype(self) -> torch.dtype:
        """The type that factorisations use: that of the selected parameters, at least float32."""
        if self._dtype is not None:
            return self._dtype
        parameters = dict(self.model.named_parameters())
        dtype = torch.float32
        for item in self.selected:
            dtype = torch.promote_types(dtype, parameters[item.name].dtype)
        if self.ambient_autocast is not None:  # nothing changes the model while a public method runs
            self._dtype = dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where the first selected parameter lives; batches are moved there."""
        return dict(self.model.named_parameters())[self.selected[0].name].device

    @contextmanager
    def learning(self, *, afresh: bool) -> Iterator[None]:
        """What is learnt about the network meanwhile is kept unless something fails."""
        known = dict(self.example_axes)
        if afresh:
            self.example_axes.clear()
            self.apart.clear()
            self.reached.clear()
        try:
            yield
        except BaseException:
            self.example_axes.clear()
            self.example_axes.update(known)
            raise

    def receive(self, inputs: Any) -> Any:
        """Inputs moved to the network's device."""
        return batches.to_device(inputs, self.device)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def raw(self, inputs: Any, parameters: Mapping[str, Tensor] | None = None) -> Any:
        """What the model returns, with some parameters substituted."""
        with evaluation_mode(self.model), eager:
            return self._run(inputs, dict(parameters or {}))

    def _run(self, inputs: Any, parameters: dict[str, Tensor]) -> Any:
        arguments, keywords = batches.bind(self.model, inputs)
        # Buffers are handed over as copies: some modules write to them even in evaluation mode.
        state = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        state |= self.parameters | parameters
        enabled, dtype = self.ambient_autocast or (False, torch.bfloat16)
        autocast = torch.autocast(self.device.type, dtype=dtype) if enabled else nullcontext()
        with autocast:
            try:
                return functional_call(self.model, self._everywhere(state), arguments, keywords, tie_weights=False)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise InputError(
                    f"The network failed on a batch: {error}.",
                    expected="inputs that model(inputs) takes",
                    got=batches.describe(inputs),
                    fix="Look at the error above this one, and call the model on such a batch yourself.",
                ) from error

    def _everywhere(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values under one name for each tensor, as values for each place where a module object holds it.

        torch's own ``tie_weights=True`` looks for places by name. A module object that the model holds twice has two
        names for the same place; torch then replaces it twice, and puts the first replacement back for the original.
        """
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        values = {id(tensor): state[name] for name, tensor in named if name in state}
        places: dict[str, Tensor] = {}
        for prefix, module in self.model.named_modules():  # each object once
            own = [  # under all of its names
                *module.named_parameters(recurse=False, remove_duplicate=False),
                *module.named_buffers(recurse=False, remove_duplicate=False),
            ]
            for name, tensor in own:
                if id(tensor) in values:
                    places[f"{prefix}.{name}" if prefix else name] = values[id(tensor)]
        return places

    def __call__(self, inputs: Any, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """Outputs ``[B, *, C]`` at the network's own parameters, or with some substituted."""
        with _ReferencePath():
            return self.arrange(batches.output_tensor(self.raw(inputs, parameters)))

    def forward(self, inputs: Any) -> Tensor:
        """Outputs ``[B, *, C]`` without derivatives."""
        with torch.no_grad():
            return self.arrange(batches.output_tensor(self.raw(inputs)))

    def tangent(self, inputs: Any, direction: Tensor) -> Tensor:
        """``J(x) v`` for a direction ``v [P]`` in parameter space, ``[B, *, C]``."""
        vector = self.vector()
        # Two backward passes, since many operations (fused attention, recurrent layers) have no forward derivative.
        with torch.enable_grad(), differentiable_kernels(self.model):
            point = vector.requires_grad_()
            outputs = self(inputs, self.substitute(point))
            dummy = torch.zeros_like(outputs, requires_grad=True)
            (pulled,) = torch.autograd.grad(outputs, point, dummy, create_graph=True)
            (pushed,) = torch.autograd.grad(pulled, dummy, direction.to(pulled))
        return pushed.detach()

    def per_example_gradients(self, inputs: Any, names: tuple[str, ...], cotangents: Tensor) -> dict[str, Tensor]:
        """Vector-Jacobian products of each example on its own: ``[V, B, *shape]`` for each named parameter.

        The general path for parameters whose use in the network no rule describes. It maps over examples where the
        network's operations allow it and loops over them otherwise (recurrent layers). Neither is trusted blindly:
        batching rules can be wrong, and a batch cannot always be cut into examples (graphs that share one table of
        nodes, time as the leading axis, a ``squeeze`` in the network). Both must therefore reproduce a random
        combination of the gradients that one backward pass of the whole batch gives; else each example's output is
        differentiated within the whole batch.

        Args:
            inputs: A batch's inputs.
            names: Parameters to differentiate in.
            cotangents: ``[V, B, *, C]``.
        """
        chosen = {name: self.parameters[name] for name in names}
        differentiable = torch.is_grad_enabled() and _requires_grad(inputs)
        with torch.enable_grad():
            leaves = {name: p.clone().requires_grad_() for name, p in chosen.items()}
            together = self(inputs, leaves)
        # Fixed, and of different size for every direction and example.
        weights = [torch.linspace(0.5, 1.5, n, device=cotangents.device) for n in cotangents.shape[:2]]
        combination = torch.outer(*weights).to(cotangents.dtype)  # [V, B]
        combined = torch.einsum("vb,vb...->b...", combination, cotangents)
        expected = _gradients(together, leaves, combined, retain_graph=True)
        for attempt in (self._mapped_gradients, self._looped_gradients):
            try:
                result = attempt(inputs, chosen, cotangents)
            except Exception:  # noqa: BLE001, S112  -- whatever goes wrong with single examples, the batch went through
                continue
            if _agree(result, combination, expected):
                return result
        result = {name: p.new_zeros(*cotangents.shape[:2], *p.shape) for name, p in chosen.items()}
        with torch.enable_grad():
            separate = together.unbind()
        for n, value in enumerate(separate):
            for v in range(len(cotangents)):
                one = _gradients(value, leaves, cotangents[v, n], retain_graph=True, create_graph=differentiable)
                for name, gradient in one.items():
                    result[name][v, n] = gradient
        return result

    def _single_outputs(
        self, inputs: Any, size: int
    ) -> tuple[Callable[[dict[str, Tensor], list[Tensor]], Tensor], list[Tensor]]:
        """The network as a function of parameters and one example, and the leaves that hold one entry per example."""
        leaves, rebuild = batches.flatten(inputs)
        mapped = [isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == size for leaf in leaves]

        def outputs(parameters: dict[str, Tensor], example: list[Tensor]) -> Tensor:
            rows = iter(example)
            full = [next(rows)[None] if use else leaf for leaf, use in zip(leaves, mapped, strict=True)]
            return self(rebuild(full), parameters)[0]

        return outputs, [leaf for leaf, use in zip(leaves, mapped, strict=True) if use]

    def _mapped_gradients(self, inputs: Any, chosen: dict[str, Tensor], cotangents: Tensor) -> dict[str, Tensor]:
        outputs, examples = self._single_outputs(inputs, cotangents.shape[1])

        def pullback(parameters: dict[str, Tensor], example: list[Tensor], cotangent: Tensor) -> dict[str, Tensor]:
            value, vjp = torch.func.vjp(lambda p: outputs(p, example), parameters)  # type: ignore[misc]
            return torch.func.vmap(lambda c: vjp(c.to(value.dtype))[0])(cotangent)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return torch.func.vmap(pullback, in_dims=(None, 0, 1), out_dims=1)(chosen, examples, cotangents)

    def _looped_gradients(self, inputs: Any, chosen: dict[str, Tensor], cotangents: Tensor) -> dict[str, Tensor]:
        n_directions, size = cotangents.shape[:2]
        outputs, examples = self._single_outputs(inputs, size)
        differentiable = torch.is_grad_enabled() and _requires_grad(inputs)
        result = {name: p.new_zeros(n_directions, size, *p.shape) for name, p in chosen.items()}
        for n in range(size):
            with torch.enable_grad():
                leaves = {name: p.clone().requires_grad_() for name, p in chosen.items()}
                value = outputs(leaves, [example[n] for example in examples])
            for v in range(n_directions):
                one = _gradients(value, leaves, cotangents[v, n], retain_graph=True, create_graph=differentiable)
                for name, gradient in one.items():
                    result[name][v, n] = gradient
        return result

    def refresh(self) -> None:
        """Take up the present weights of a model that is sharded over ranks; to be called on all of them."""
        refresh_(self.model, self._sharded)

    # -- guards --------------------------------------------------------------------------------------------------------

    def check_finite(self) -> None:
        """Raise :class:`NonFiniteError` if any parameter, selected or not, is NaN or infinite."""
        for name, parameter in self.parameters.items():
            if not all_finite(parameter):
                raise NonFiniteError(
                    f"Parameter {name!r} is not finite.",
                    expected="a trained network with finite weights",
                    got=f"{int((~torch.isfinite(parameter)).sum())} NaN or Inf among {parameter.numel()} entries",
                    fix="The training diverged; train again, e.g. with a smaller learning rate.",
                )

    def remember(self) -> None:
        """Note the state of all weights and buffers, for :meth:`has_changed`."""
        with turn(self.model):
            self._known = self._state()

    def has_changed(self, *, once: bool = False) -> bool:
        """Whether weights or buffers may differ from those at the last :meth:`remember`.

        Costs one pass over them, a small part of a forward pass: what writes through ``.data``, NumPy or a kernel of
        one's own leaves no other trace. A different device or number of threads may also show, by rounding.

        Args:
            once: Whether one look is enough for the public method that is running, which changes nothing itself.
        """
        with turn(self.model):
            if once and self._looked:
                return False
            changed = self._state() != self._known
            self._looked = not changed and self.ambient_autocast is not None
            return changed

    def _state(self) -> tuple[Any, ...]:
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return [(name, id(tensor)) for name, tensor in tensors.items()], checksums(list(tensors.values()))


def _requires_grad(inputs: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in batches.flatten(inputs)[0])


def _gradients(value: Tensor, leaves: dict[str, Tensor], cotangent: Tensor, **options: bool) -> dict[str, Tensor]:
    """One vector-Jacobian product; zeros where the value does not depend on a leaf."""
    if not value.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    gradients = torch.autograd.grad(
        value, list(leaves.values()), cotangent.to(value.dtype), allow_unused=True, materialize_grads=True, **options
    )
    return dict(zip(leaves, gradients, strict=True))


def _agree(result: dict[str, Tensor], combination: Tensor, expected: dict[str, Tensor]) -> bool:
    """Whether per-example gradients ``[V, B, *shape]`` combine to the expected ones, up to rounding.

    The tolerance leaves room for networks that compute in a lower precision than their parameters have.
    """
    for name, wanted in expected.items():
        terms = result[name].detach().reshape(*combination.shape, -1) * combination[..., None].to(result[name].dtype)
        scale = terms.abs().sum((0, 1)).max()
        error = (terms.sum((0, 1)) - wanted.flatten()).abs().max()
        if not bool(error <= max(1e-3, torch.finfo(wanted.dtype).eps ** 0.5) * scale):
            return False
    return True


def _masked(flat: Tensor, mask: Tensor | None) -> Tensor:
    return flat if mask is None else flat[mask.to(flat.device)]


def _refuse_unsuitable(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError(
            "A TorchScript module hides its operations.",
            expected="a plain nn.Module",
            got="a torch.jit.ScriptModule",
            fix="Pass the module that was scripted.",
        )
    for name, module in model.named_modules():
        if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters(recurse=False)):
            raise ConfigurationError(
                f"Lazy module {name!r} is not initialised.", fix="Run the model once on a batch before wrapping it."
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise UnsupportedError(
                f"Module {name!r} normalises by the statistics of the batch, so examples depend on each other.",
                expected="batch normalisation with running statistics",
                got="track_running_stats=False",
                fix="Train with track_running_stats=True, or replace it by group or layer normalisation.",
            )
