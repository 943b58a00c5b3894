"""The tolerance table: its limits bite, and AdamW behaves as the table's reasons say."""

import pytest
import torch

from tests import tolerances


def adamw_run(
    gradients: list[torch.Tensor], noise: float, betas: tuple[float, float] = (0.9, 0.95)
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(noise * 1e9))
    weight = torch.zeros_like(gradients[0]).requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=1e-3, betas=betas, weight_decay=0.0)
    for gradient in gradients:
        error = torch.randn(gradient.shape, generator=generator) * noise * gradient.std()
        weight.grad = gradient + error
        optimizer.step()
    return weight.detach()


@pytest.fixture
def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(64, 512, generator=generator) for _ in range(10)]


def test_losses_and_norms() -> None:
    tolerances.assert_loss_close(5.00004, 5.0)
    tolerances.assert_gradient_norm_close(torch.tensor(1.000009), 1.0)
    with pytest.raises(AssertionError, match="loss at step 3: differs by 2e-05, allowed is 1e-05"):
        tolerances.assert_loss_close(5.0001, 5.0, step=3)
    with pytest.raises(AssertionError, match="gradient norm"):
        tolerances.assert_gradient_norm_close(1.0001, 1.0)
    with pytest.raises(AssertionError, match="nan"):
        tolerances.assert_loss_close(float("nan"), 5.0)
    tolerances.assert_loss_close(5.04, 5.0, dtype=torch.bfloat16)
    tolerances.assert_recorded_close(5.0004, 5.0)
    with pytest.raises(AssertionError, match="first loss"):
        tolerances.assert_recorded_close(5.001, 5.0, "first loss")


def test_gradients_are_tighter_at_the_first_step() -> None:
    want = torch.ones(10)
    tolerances.assert_gradient_close("w", want * (1 + 5e-5), want, 10.0, step=1)
    with pytest.raises(AssertionError, match="gradient of w at step 0"):
        tolerances.assert_gradient_close("w", want * (1 + 5e-5), want, 10.0, step=0)
    with pytest.raises(AssertionError, match="shape"):
        tolerances.assert_gradient_close("w", want[:1], want, 10.0)


def test_a_zero_gradient_is_compared_against_the_global_norm() -> None:
    rounding = torch.full((4,), 1e-7)
    tolerances.assert_gradient_close("key.bias", -rounding, rounding, 1.0)
    with pytest.raises(AssertionError, match="key.bias"):
        tolerances.assert_gradient_close("key.bias", torch.full((4,), 1e-4), rounding, 1.0)
    tolerances.assert_gradient_close("frozen", torch.zeros(4), torch.zeros(4), 0.0)


@pytest.mark.parametrize(("dtype", "noise"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_the_update_limit_follows_from_that_of_gradients(
    gradients: list[torch.Tensor], dtype: torch.dtype, noise: float
) -> None:
    want, got = adamw_run(gradients, 0.0), adamw_run(gradients, noise)
    rates = [1e-3] * 10
    tolerances.assert_update_close("w", got, want, torch.zeros_like(want), rates, dtype=dtype)
    half_reduced = adamw_run([g + torch.roll(g, 1) for g in gradients], 0.0)
    with pytest.raises(AssertionError, match="update of w"):
        tolerances.assert_update_close(
            "w", half_reduced, want, torch.zeros_like(want), rates, dtype=dtype
        )


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_no_adamw_step_exceeds_the_element_limit(betas: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(1)
    scales = 10.0 ** torch.randint(-6, 6, (10, 20000), generator=generator)
    signs = torch.randint(0, 2, (10, 20000), generator=generator) * 2.0 - 1
    moved = adamw_run(list(scales * signs), 0.0, betas).abs().max().item()
    assert moved <= tolerances.ELEMENT_LIMIT_PER_LR / 2 * 10 * 1e-3


def test_elements_without_a_gradient_have_only_the_element_limit() -> None:
    want = torch.tensor([1e-3, 1e-3])
    got = torch.tensor([1e-3, -1e-3])
    dead = torch.tensor([False, True])
    initial = torch.zeros(2)
    tolerances.assert_update_close("qkv.bias", got, want, initial, [1e-3], dead)
    with pytest.raises(AssertionError, match="update of"):
        tolerances.assert_update_close("qkv.bias", got, want, initial, [1e-3])
    with pytest.raises(AssertionError, match="largest difference"):
        tolerances.assert_update_close("qkv.bias", got * 2, want, initial, [1e-3], dead)
