from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from laplace_plus.kernels import convolution_factor

SETTINGS = list(
    product(
        [(7, 7), (3, 8)],
        [(3, 3), (1, 1), (2, 4)],
        [1, (2, 1), 3],
        [0, 1, ((0, 2), (1, 0)), ((3, 3), (4, 2))],
        [1, (2, 1)],
        [1, 2],
    )
)


def patches(images: Tensor, kernel: tuple, stride: object, padding: object, dilation: object, groups: int) -> Tensor:
    """``[N, G, C/G·k, S]``."""
    pairs = [(padding, padding)] * 2 if isinstance(padding, int) else padding
    images = F.pad(images, (*pairs[1], *pairs[0]))
    return F.unfold(images, kernel, dilation=dilation, stride=stride).unflatten(1, (groups, -1))


def images(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("method", ["lags", "patches", None])
def test_equals_unfolded_patches(method: str | None) -> None:
    checked = 0
    for (height, width), kernel, stride, padding, dilation, groups in SETTINGS:
        x = images(2, 4, height, width)
        if method == "lags" and stride != 1:
            continue
        try:
            unfolded = patches(x, kernel, stride, padding, dilation, groups)
        except RuntimeError:  # no output position
            continue
        for bias in (False, True):
            rows = torch.cat([unfolded, torch.ones_like(unfolded[:, :, :1])], 2) if bias else unfolded
            options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "bias": bias}
            exact = torch.einsum("ngis,ngjs->gij", rows, rows)
            actual = convolution_factor(x, kernel, method=method, **options)
            assert (actual - exact).abs().max() <= 1e-10
            assert torch.equal(actual, actual.mT)
            checked += 1
    assert checked > (60 if method == "lags" else 200)


@pytest.mark.parametrize("method", ["lags", "patches"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-6), (torch.float16, 2e-6)])
def test_sums_are_of_float32_at_least(method: str, dtype: torch.dtype, tolerance: float) -> None:
    x = images(3, 16, 17, 16, dtype=dtype)
    exact = convolution_factor(x.double(), 3, padding=1, bias=True, method="patches")
    actual = convolution_factor(x, 3, padding=1, bias=True, method=method)
    assert actual.dtype == torch.float32
    assert (actual.double() - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.parametrize("method", ["lags", "patches", None])
def test_batches_add_up(method: str | None) -> None:
    x = images(6, 16, 18, 18)
    whole = convolution_factor(x, 3, padding=1, bias=True, method=method)
    total = torch.zeros_like(whole)
    for part in x.split([1, 0, 5]):
        returned = convolution_factor(part, 3, padding=1, bias=True, method=method, total=total)
        assert returned is total
    torch.testing.assert_close(total.tril(), whole.tril(), rtol=1e-12, atol=1e-10)


def test_one_and_three_axes_of_space() -> None:
    line = images(3, 4, 11)
    exact = convolution_factor(line.unsqueeze(2), (1, 3), stride=(1, 2), padding=(0, 1), groups=2)
    torch.testing.assert_close(convolution_factor(line, 3, stride=2, padding=1, groups=2), exact)
    exact = convolution_factor(line.unsqueeze(2), (1, 3), padding=(0, 1), method="patches")
    torch.testing.assert_close(convolution_factor(line, 3, padding=1, method="lags"), exact)

    volume = images(2, 2, 5, 4, 6)
    weight = images(3, 2, 2, 3, 2)
    factor = convolution_factor(volume, (2, 3, 2), stride=(1, 1, 2), padding=(1, 1, 0))[0]
    output = F.conv3d(volume, weight, stride=(1, 1, 2), padding=(1, 1, 0))
    # w A wᵀ is the sum of squares of the outputs
    squares = torch.einsum("noabc,npabc->op", output, output)
    torch.testing.assert_close(weight.flatten(1) @ factor @ weight.flatten(1).T, squares)


def test_nan_stays_visible() -> None:
    x = images(2, 16, 16, 16)
    x[1, 3, 8, 8] = float("nan")
    for method in ("lags", "patches"):
        factor = convolution_factor(x, 3, padding=1, method=method)
        assert torch.isnan(factor[0, 27:36]).all()


def test_empty_batch() -> None:
    assert not convolution_factor(torch.empty(0, 2, 5, 5), 3, bias=True).any()
