"""Recurrent layers and cells written out in steps, so that their weights are used in linear maps like any other.

``torch.lstm`` and its like are single functions that hide what their weights multiply. Here the inputs of all steps
meet ``W_ih`` in one product, and the states before the steps are one tensor of what meets ``W_hh``. In each direction a
layer makes these two calls, shared over time, and a third one for the projection of an LSTM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _lstm(x: Tensor, y: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = y.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(x: Tensor, y: Tensor, h: Tensor, c: None) -> tuple[Tensor, None]:
    (r, z, n), (r_h, z_h, n_h) = x.chunk(3, -1), y.chunk(3, -1)
    n = torch.tanh(n + torch.sigmoid(r + r_h) * n_h)
    return n + torch.sigmoid(z + z_h) * (h - n), c


_KINDS: dict[str, tuple[bool, Callable[..., Any]]] = {
    "lstm": (False, _lstm),
    "gru": (True, _gru),
    "rnn_tanh": (False, lambda x, y, h, c: (y.tanh(), c)),
    "rnn_relu": (False, lambda x, y, h, c: (y.relu(), c)),
}
"""Whether ``x = W_ih x_t + b_ih`` and ``y = W_hh h + b_hh`` come apart, or as their sum; and a step."""

_LAYERS = {getattr(torch, name): kind for name, kind in _KINDS.items()}
_CELLS = {getattr(torch, f"{name}_cell"): kind for name, kind in _KINDS.items()}

RECURRENT = frozenset({*_LAYERS, *_CELLS})
"""The functions that can be written out."""


def written_out(func: Any, args: Sequence[Any], note: Callable[..., None]) -> Any:
    """What a recurrent function returns; None in transforms of torch.func, and with dropout.

    ``note`` is called for each linear map with a tensor ``[B, T, o]`` that has its output's gradient, its input
    ``[B, T, i]``, weight and bias, and whether sequences end before T. A weight holds all gates: their covariances are
    worth a tenth of a prediction's time.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(args[0]):
        return None
    if func in _CELLS:
        x, state, *weights = args
        state = state if func is torch.lstm_cell else (state, None)
        _, (h, c) = _direction(_CELLS[func], x[:, None], state, weights, note)
        return h if c is None else (h, c)
    lengths = None
    if isinstance(args[3], (list, tuple)):  # packed sequences
        data, sizes, state, weights, biased, n_layers, dropout, train, two_ways = args
        x, lengths = torch._VF._pad_packed_sequence(data, sizes, True, 0.0, len(sizes))
    else:
        x, state, weights, biased, n_layers, dropout, train, two_ways, batch_first = args
        x = x if batch_first else x.transpose(0, 1)
    if train and dropout:
        return None
    hs, cs = state if func is torch.lstm else (state, [None] * len(state))
    each, ends = len(weights) // len(hs), list[Any]()
    for _ in range(n_layers):
        outputs = []
        for way in range(1 + two_ways):
            n = len(ends)
            own = [*weights[n * each : (n + 1) * each]]
            own[2:2] = () if biased else (None, None)
            out, end = _direction(_LAYERS[func], x, (hs[n], cs[n]), own, note, bool(way), lengths)
            outputs.append(out)
            ends.append(end)
        x = torch.cat(outputs, -1)
    if lengths is not None:
        x = torch._VF._pack_padded_sequence(x, lengths, True)[0]
    elif not batch_first:
        x = x.transpose(0, 1)
    return x, *(torch.stack(last) for last in zip(*ends, strict=True) if last[0] is not None)


def _direction(
    kind: tuple[bool, Callable[..., Any]],
    x: Tensor,
    state: tuple[Tensor, Any],
    weights: Sequence[Any],
    note: Callable[..., None],
    backwards: bool = False,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Outputs ``[B, T, H]`` of one layer in one direction for inputs ``[B, T, i]``, and its last state."""
    (apart, step), (h, c) = kind, state
    w_ih, w_hh, b_ih, b_hh, w_hr = [*weights, None, None, None][:5]
    n, length = x.shape[:2]
    rows, ends = torch.arange(n, device=x.device), None if lengths is None else lengths.to(x.device)
    order = (length if ends is None else ends[:, None]) - 1 - torch.arange(length, device=x.device).expand(n, -1)

    def turned(values: Tensor) -> Tensor:  # from the order of time to that of the steps, and back; padding stays behind
        return values[rows[:, None], order % length] if backwards else values

    from_x = F.linear(x, w_ih, b_ih if apart or b_hh is None else b_ih + b_hh)
    from_h = torch.zeros_like(from_x) + (0.0 if b_hh is None else b_hh) if apart else from_x
    projected = from_x.new_zeros(n, length, 0 if w_hr is None else len(w_hr))
    for noted in (from_x, from_h, projected):
        noted.requires_grad_(True)
    w_hh_t, hidden, inner, cells = w_hh.T, [h.to(from_x.dtype)], list[Tensor](), list[Any]()
    for own_x, own_h, own_p in zip(*(turned(own).unbind(1) for own in (from_x, from_h, projected)), strict=True):
        h, c = step(own_x, torch.addmm(own_h, hidden[-1], w_hh_t), hidden[-1], c)
        inner.append(h)
        hidden.append(h if w_hr is None else torch.addmm(own_p, h, w_hr.T))
        cells.append(c)
    outputs = torch.stack(hidden[1:], 1)
    note(from_x, x, w_ih, b_ih, ends is not None)
    note(from_h, turned(torch.stack(hidden[:-1], 1)), w_hh, b_hh, ends is not None)
    if w_hr is not None:
        note(projected, turned(torch.stack(inner, 1)), w_hr, None, ends is not None)
    if ends is None:
        return turned(outputs), (hidden[-1], c)
    c = c if c is None else torch.stack(cells, 1)[rows, ends - 1]
    return turned(outputs), (outputs[rows, ends - 1], c)
