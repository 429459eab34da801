"""Adapters of other libraries; each is imported when it is first used, as these libraries take seconds to import."""

from importlib import import_module

from laplace_plus.curvature import Backend, register_backend

__all__: list[str] = []


def _load(name: str) -> type[Backend]:
    backend: type[Backend] = getattr(import_module(f"{__name__}.{name.lower()}"), name)
    return backend


register_backend("backpack", lambda: _load("BackPack"))
register_backend("curvlinops", lambda: _load("Curvlinops"))
