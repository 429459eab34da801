"""Checkpoints: how they are written and read, and how a network is recognised."""

from laplace_plus.io.files import FORMAT, FORMAT_VERSION, HEADER_FILE, TENSORS_FILE, read, write
from laplace_plus.io.fingerprints import compare_fingerprint, digest, fingerprint

__all__ = ["FORMAT", "FORMAT_VERSION", "HEADER_FILE", "TENSORS_FILE", "read", "write"]
__all__ += ["compare_fingerprint", "digest", "fingerprint"]
