"""Thin products: the same numbers as torch's own, by another route."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lib.products import THIN, ThinLinear, product, thin
from tests.support import VOCAB, tiny_llama

SHAPES = ((1, 1), (7, 3), (64, 48), (33, 130), (576, 1536))  # (outputs, inputs)


def some(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", range(1, 21))
def test_product_is_linear_within_rounding(rows, shape):
    """1 to 20 rows, on both sides of every switch: fp32 results within fp32 rounding of the fp64 one."""
    weight, x = some(*shape), some(rows, shape[1], seed=1)
    ours, exact = product(x, weight), F.linear(x.double(), weight.double())
    assert ours.shape == (rows, shape[0]) and ours.dtype == torch.float32
    # Each of the `inputs` additions rounds once, relative to sums of this size.
    bound = torch.finfo(torch.float32).eps * shape[1] * (x.abs().double() @ weight.abs().double().T)
    assert ((ours - exact).abs() <= bound).all()


def test_rows_do_not_see_each_other():
    """Padding and neighbours leave no trace: a row alone is the row in any company."""
    weight, x = some(40, 32), some(THIN + 4, 32, seed=1)
    alone = torch.cat([product(row[None], weight) for row in x])
    for n in range(2, THIN + 4):
        torch.testing.assert_close(product(x[:n], weight), alone[:n], rtol=1e-5, atol=1e-5)


def test_no_rows_and_slices():
    """An empty product is empty; columns of a wider weight, as `fc` uses them, are multiplied in place."""
    weight = some(8, 12)
    assert product(some(0, 12), weight).shape == (0, 8)
    torch.testing.assert_close(product(some(3, 4), weight[:, 4:8]), some(3, 4) @ weight[:, 4:8].T)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 12, 40])
def test_other_dtypes_are_torchs_own(dtype, rows):
    """Only fp32 on the CPU takes another route; the rest is F.linear, bit for bit."""
    weight, x = some(24, 32, dtype=dtype), some(rows, 32, seed=1, dtype=dtype)
    assert torch.equal(product(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("rows", [THIN + 1, 40, 500])
def test_many_rows_are_torchs_own(rows):
    """Above the limit torch's own product is the faster one."""
    weight, x = some(24, 32), some(rows, 32, seed=1)
    assert torch.equal(product(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("shape", [(12,), (1, 12), (2, 3, 12), (1, 1, 12), (4, 20, 12), (2, 0, 12), (0, 12)])
def test_thin_linear_takes_the_shapes_of_linear(shape):
    """Any leading axes, none and empty ones included."""
    plain = nn.Linear(12, 5, bias=False)
    thinned = thin(nn.Sequential(nn.Linear(12, 5, bias=False)))[0]
    thinned.weight = plain.weight
    x = some(*shape)
    torch.testing.assert_close(thinned(x), plain(x))


class Scaled(nn.Linear):
    """Somebody's subclass with a forward of its own."""

    def forward(self, x):
        return 3 * super().forward(x)


def test_thin_keeps_biases_and_subclasses():
    """A bias is added as before, another class keeps its forward, weights stay the same objects."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, bias=False), Scaled(6, 4, bias=False))
    weights, x = dict(model.named_parameters()), some(3, 6)
    expected = model(x)
    assert thin(model) is model
    torch.testing.assert_close(model(x), expected)
    assert torch.equal(model[0](x), F.linear(x, model[0].weight, model[0].bias))
    assert [type(m) for m in model] == [ThinLinear, ThinLinear, Scaled]
    assert all(after is weights[name] for name, after in model.named_parameters())
    assert [type(m) for m in thin(model)] == [ThinLinear, ThinLinear, Scaled], "twice is once"


@torch.inference_mode()
def test_thin_leaves_a_llamas_results():
    """Every length from one token to past the limit, with and without a cache: the same logits."""
    model, thinned = tiny_llama(), thin(tiny_llama())
    assert all(type(m) is not nn.Linear for m in thinned.modules())
    for length in (1, 2, 8, 9, THIN, THIN + 1, 30):
        ids = torch.arange(length)[None] % VOCAB
        torch.testing.assert_close(thinned(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    batch = torch.arange(12).view(3, 4)
    torch.testing.assert_close(thinned(batch).logits, model(batch).logits, rtol=1e-4, atol=1e-4)


def test_thin_models_can_still_be_trained():
    """Gradients of a thin product are those of the plain one."""
    plain, x = nn.Linear(12, 5, bias=False), some(4, 12)
    thinned = thin(nn.Sequential(nn.Linear(12, 5, bias=False)))[0]
    thinned.load_state_dict(plain.state_dict())
    for layer in (plain, thinned):
        layer(x).pow(2).sum().backward()
    torch.testing.assert_close(thinned.weight.grad, plain.weight.grad)
