"""Triton kernels, each beside its plain-torch reference in :mod:`laplace_plus.kernels`.

These modules can be imported without triton, but only run with it. Each holds raw kernels and a launcher that takes a
configuration; which configuration runs is measured by :func:`laplace_plus.kernels.selection.choose`, on scratch memory.
(Triton's own ``autotune`` would time the kernels on the accumulators themselves, and does not work in the interpreter.)
"""
