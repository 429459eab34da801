"""Functions that may move, drop, merge or mix a batch's rows by their data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _functions(names: str) -> frozenset[Callable[..., Any]]:
    owners = (torch, Tensor, torch._C._VariableFunctions)
    return frozenset(getattr(owner, name) for owner in owners for name in names.split() if hasattr(owner, name))


UNSEEN = _functions("tolist numpy __array__ __float__")
"""Functions behind which values are computed with elsewhere."""

TELLING = _functions("item __bool__ __int__ __index__ __contains__ equal allclose is_nonzero")
"""Functions whose results tell Python code which way to go."""

FEW = 8
"""So many results of those are a kind of batch; more of them are those of a loop over examples."""

ORDERING = _functions(
    "sort msort topk masked_select unique unique_consecutive repeat_interleave _pack_padded_sequence"
    " _pad_packed_sequence"
) | {torch.unique, torch.unique_consecutive, torch._unique2}
"""Functions whose results depend on the data in order, number or place of rows."""

INDEXING = _functions(
    "__getitem__ __setitem__ gather scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ take"
    " take_along_dim index_select index_add index_add_ index_copy index_copy_ index_fill index_fill_ index_put"
    " index_put_ index_reduce index_reduce_ masked_scatter masked_scatter_ put put_"
)
"""Functions that move rows by integers or masks among their further arguments."""

ALONG = _functions(
    "flip roll sum mean nanmean nansum prod std var norm amax amin max min median logsumexp softmax log_softmax cumsum"
    " cumprod cummax cummin logcumsumexp diff"
) | {F.softmax, F.log_softmax}
"""Functions that move or mix rows if they go along the first axis: by how much, numbers of zero and one may decide."""

MIXING = _functions("matmul __matmul__ __rmatmul__ mm mv addmm einsum inner") | {
    F.linear,
    torch.einsum,
    torch.tensordot,
    torch.sparse.mm,
}
"""Functions that move or mix rows by a matrix, such as one of a permutation."""
