"""Matrix products of a few rows, as a decoding loop makes them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

THIN = 16  # rows; up to here weight @ x.T is the faster form (bench/thin_products.py)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T for x (n, i) and weight (o, i), the same numbers up to rounding whatever n.

    A product of few rows is little more than one reading of `weight`. torch's fp32 CPU library comes
    close to the memory bandwidth with weight @ x.T, but takes up to 4 times as long for x @ weight.T.
    """
    n = x.shape[0]
    if x.dtype != torch.float32 or x.device.type != "cpu" or not 0 < n <= THIN:
        return F.linear(x, weight)
    # One row would take the matrix-vector path, 9 to 15 rows an odd-sized one; both are slower.
    wanted = max(2, n) if n <= 8 else THIN
    # Contiguous rows: this function's own results are not, and the library is 4 times slower on those.
    padded = x.contiguous() if n == wanted else torch.cat((x, x.new_zeros(wanted - n, x.shape[1])))
    return (weight @ padded.T).T[:n]


class ThinLinear(nn.Linear):
    """nn.Linear whose small products go through `product`."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., i) -> (..., o)."""
        if self.bias is not None:
            return super().forward(x)
        return product(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.out_features)


def thin(model: nn.Module) -> nn.Module:
    """Let every plain linear layer of a model use `product`; weights and results stay the same."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = ThinLinear
    return model
