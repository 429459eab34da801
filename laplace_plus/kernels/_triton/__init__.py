"""Triton kernels, each beside its plain-torch reference in :mod:`laplace_plus.kernels`.

These modules can be imported without triton, but only run with it. Each holds raw kernels and a launcher that takes a
configuration; :mod:`laplace_plus.kernels.selection` says where they run. (Triton's own ``autotune`` would time them on
the accumulators themselves, and does not work in the interpreter.)
"""
