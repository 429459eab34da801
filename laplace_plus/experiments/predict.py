"""`laplace-plus predict`: a saved posterior's predictions of a file or a folder of images."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.experiments.run import trained_model
from laplace_plus.experiments.settings import PredictSettings, load_object, make
from laplace_plus.posteriors import load

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")


def predict(settings: PredictSettings, *, progress: bool = False, say: Callable[[str], None]) -> None:
    """Predict, and write one row for each input.

    Columns are ``mean`` (probabilities of classes), ``std`` (with the noise; for classes ``epistemic``, the variance of
    the probabilities) and ``entropy`` in nats; for a folder its ``file``. ConfigurationError for inputs that cannot be
    read, UnsupportedError for images without Pillow.
    """
    output = Path(settings.output)
    checks.choice("type of the output file", output.suffix, (".csv", ".npz"))
    names, arrays = read(Path(settings.inputs))
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)  # as for `wrap`, where the function trains the network
        model = trained_model(settings)
    likelihood = None if settings.likelihood is None else make(settings.likelihood, {})
    posterior: Any = load(settings.posterior, model, likelihood=likelihood)
    dtype = next(own.dtype for own in model.parameters())
    transform = load_object(settings.transform) if settings.transform else lambda batch: batch
    generator = torch.Generator(settings.device).manual_seed(settings.seed)
    spread, found = "epistemic" if posterior.likelihood.is_classifier else "std", []
    for inputs in _batches(arrays, settings.batch_size, dtype):
        prediction = posterior.predictive(transform(inputs), generator=generator)
        columns = prediction.mean, getattr(prediction, spread), prediction.entropy()
        found.append([part.detach().cpu().numpy() for part in columns])
    table: dict[str, Any] = {"file": np.array(names)} if names else {}
    table |= dict(zip(("mean", spread, "entropy"), map(np.concatenate, zip(*found, strict=True)), strict=True))
    if output.suffix == ".npz":
        np.savez(output, **table)
    else:
        _write_csv(output, table)
    say(f"{len(next(iter(table.values())))} predictions; written to {output}")


def read(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Names of files, where there are any, and arrays by name; ConfigurationError for what cannot be read."""
    try:
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix.lower() in IMAGES)
            return [file.name for file in files], {"images": np.stack([_image(file) for file in files])}
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return [], dict(archive)
        text = path.read_text(encoding="utf-8").splitlines()
        named = any(character.isalpha() and character not in "eE" for character in text[0].replace("nan", ""))
        return [], {"rows": np.loadtxt(text[int(named) :], delimiter=",", ndmin=2)}
    except (OSError, ValueError, IndexError) as error:
        expected = "a .npz file of arrays, a CSV file of numbers, or a folder of images of one size"
        raise ConfigurationError("The inputs cannot be read.", expected=expected, got=f"{path}: {error}") from error


def _image(file: Path) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UnsupportedError("Pillow is not installed.", fix="pip install pillow") from error
    with Image.open(file) as image:
        pixels = np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"), dtype=np.float64) / 255
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)  # noqa: PLR2004


def _batches(arrays: dict[str, Any], size: int, dtype: torch.dtype) -> Iterator[Any]:
    """The one array as a tensor, several as mappings; numbers that are not whole have the network's type."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    tensors = {name: own.to(dtype) if own.is_floating_point() else own for name, own in tensors.items()}
    for parts in zip(*(own.split(size) for own in tensors.values()), strict=True):
        yield parts[0] if len(parts) == 1 else dict(zip(tensors, parts, strict=True))


def _write_csv(output: Path, table: dict[str, Any]) -> None:
    if any(part.ndim > 2 for part in table.values()):  # noqa: PLR2004
        raise ConfigurationError("Predictions of tokens or pixels are no rows of a CSV file.", fix="Write a .npz file.")
    columns: dict[str, Any] = {}
    for name, part in table.items():
        columns |= {name: part} if part.ndim == 1 else {f"{name}_{k}": part[:, k] for k in range(part.shape[1])}
    rows = zip(*(part.tolist() for part in columns.values()), strict=True)
    with output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
