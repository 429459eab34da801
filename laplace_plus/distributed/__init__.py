"""Work over the ranks of ``torch.distributed``: agreement, sums, shared decompositions, sharded models.

Knows tensors, modules and process groups, and nothing of posteriors. A fit over several ranks is a *session*
(:meth:`Group.together`) of local work between *meetings* (:meth:`Group.exchange`), at which every rank says that it is
well or what its error is. Collective operations on tensors only follow a meeting that all ranks left well. An error on
one rank thus becomes an error on all of them rather than a wait.
"""

from laplace_plus.distributed.factors import OwnedSum, assign, balanced_eigen, gathered
from laplace_plus.distributed.group import Distributed, Group, Ranks, resolve_group
from laplace_plus.distributed.messages import broadcast_, sum_
from laplace_plus.distributed.models import is_sharded, plain_module, refresh_, sharded_source
from laplace_plus.distributed.operators import SummedOperator

__all__ = [
    "Distributed",
    "Group",
    "OwnedSum",
    "Ranks",
    "SummedOperator",
    "assign",
    "balanced_eigen",
    "broadcast_",
    "gathered",
    "is_sharded",
    "plain_module",
    "refresh_",
    "resolve_group",
    "sharded_source",
    "sum_",
]
