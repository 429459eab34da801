"""The version of the package, in a module that imports nothing, so that the build can read it without torch."""

__version__ = "0.3.0"
