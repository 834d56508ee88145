"""What torch expects of its own clip functions, asked of fedclip's.

The expectations are those of torch's test_nn.py, written here anew. docs/developers/peers-tests.md
counts them.
"""

import math
from typing import Any

import pytest
from helpers import require

torch = require("torch")


from fedclip import FedclipWarning, NonFiniteError, NormClip  # noqa: E402
from fedclip.loops.torch import clip_, clip_grad_norm_  # noqa: E402

ORDERS = [0.5, 1.5, 2, 4, math.inf, "inf"]


def layer_with(*gradients):
    layer = torch.nn.Linear(10, 10)
    for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone().view_as(parameter)
    return layer


def norm_of(parameters, order):
    values = torch.cat([p.grad.reshape(-1) for p in parameters]).double()
    return float(torch.linalg.vector_norm(values, float(order)))


LARGE = torch.arange(1.0, 101).view(10, 10), torch.ones(10) / 1000
SMALL = torch.eye(10) / 10_000, torch.ones(10) / 500


@pytest.mark.parametrize("order", ORDERS)
def test_the_norm_of_any_order_is_returned_and_brought_to_the_limit(order):
    layer = layer_with(*LARGE)
    before = norm_of(layer.parameters(), order)
    found = clip_grad_norm_(layer.parameters(), 2.0, norm_type=order)
    assert float(found) == pytest.approx(before, rel=1e-6)
    assert norm_of(layer.parameters(), order) == pytest.approx(2.0, rel=1e-5)
    # Small gradients stay the same.
    layer = layer_with(*SMALL)
    clip_grad_norm_(layer.parameters(), 2.0 * norm_of(layer.parameters(), order), norm_type=order)
    for parameter, gradient in zip(layer.parameters(), SMALL, strict=True):
        assert torch.equal(parameter.grad, gradient.view_as(parameter))


def test_a_tensor_is_taken_and_parameters_without_a_gradient_are_left_out():
    alone = torch.nn.Parameter(torch.zeros(10, 10))
    alone.grad = LARGE[0].clone()
    clip_grad_norm_(alone, 1.0, foreach=True)
    layer = layer_with(LARGE[0], None)
    assert float(clip_grad_norm_(layer.parameters(), 1.0)) == pytest.approx(float(LARGE[0].norm()))
    assert layer.bias.grad is None
    assert torch.equal(alone.grad, layer.weight.grad)
    assert float(clip_grad_norm_(layer_with(None, None).parameters(), 1.0)) == 0.0


@pytest.mark.parametrize(
    ("order", "bad"),
    [(0.1, math.inf), (1, math.nan), (2, -math.inf), (2, math.nan), (math.inf, math.nan)],
)
def test_an_error_if_not_finite(order, bad):
    gradient = torch.ones(10)
    gradient[3] = bad
    parameter = torch.nn.Parameter(torch.ones(10))
    parameter.grad = gradient.clone()
    # As in torch, the gradient stays as it was.
    with pytest.raises(RuntimeError) as error:
        clip_grad_norm_(parameter, 1.0, norm_type=order, error_if_nonfinite=True)
    assert error.type is NonFiniteError
    torch.testing.assert_close(parameter.grad, gradient, equal_nan=True, rtol=0, atol=0)


def test_no_error_if_not_finite_skips_the_step():
    # torch: multiplies by 0 or NaN.
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([math.inf, 1.0])
    with pytest.warns(FedclipWarning, match="set to zero"):
        assert not math.isfinite(clip_grad_norm_(parameter, 1.0))
    assert parameter.grad is None


@pytest.mark.parametrize("order", [0, -1, -math.inf])
def test_orders_that_are_no_norms_are_refused(order):
    # torch: 0 counts what is not 0, and scaling does not change that.
    with pytest.raises(ValueError, match="ord must be a number > 0"):
        clip_grad_norm_(layer_with(*LARGE), 1.0, norm_type=order)


def test_an_iterator_that_is_used_up_warns_as_in_torch():
    layer = layer_with(*LARGE)
    for parameters in (layer.parameters(), layer.named_parameters(), iter([])):
        list(parameters)
        with pytest.warns(UserWarning, match="no gradient clipping will occur"):
            assert float(clip_grad_norm_(parameters, 1.0)) == 0.0
        with pytest.raises(ValueError, match="the second time"):
            clip_(parameters, NormClip(1.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_norm_has_the_dtype_of_the_gradient(dtype):
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    parameter.grad = torch.tensor([3.0, 4.0], dtype=dtype)
    norm = clip_grad_norm_(parameter, 1.0)
    # torch: float16 too, which ends at 65,504.
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert norm == 5.0
    assert 0.99 < norm_of([parameter], 2) <= 1.0
    parameter.grad = None
    assert clip_grad_norm_(parameter, 1.0).dtype == torch.float32


@pytest.mark.parametrize("limit", [True, [1.0], None, "1", (1.0,), {"max_norm": 1.0}])
def test_what_is_no_limit_is_refused_after_one_that_is_equal_to_it(limit: Any) -> None:
    layer = layer_with(*LARGE)
    clip_grad_norm_(layer.parameters(), 1.0)
    with pytest.raises(TypeError, match="max_norm must be a finite number > 0, got"):
        clip_grad_norm_(layer.parameters(), limit)
