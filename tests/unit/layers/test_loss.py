"""Cross entropy of one process against torch's own; the split one is in tests/distributed."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.layers import loss as loss_module
from megatron_lightning.layers.loss import CrossEntropy, masked_mean, vocabulary_cross_entropy
from megatron_lightning.parallel.axes import MeshAxis

SINGLE = MeshAxis(name="tp")


def _inputs(columns: int = 17, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, 3, columns, generator=generator, dtype=torch.float64) * 4).to(dtype)
    return logits.requires_grad_(), torch.randint(17, (3, 5), generator=generator)


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("columns", [17, 24])
def test_equals_torch_on_the_true_vocabulary(smoothing: float, columns: int, cap: float) -> None:
    logits, labels = _inputs(columns)
    got = CrossEntropy(17, label_smoothing=smoothing, logit_cap=cap)(logits, labels)
    capped = cap * torch.tanh(logits / cap) if cap else logits
    want = F.cross_entropy(
        capped[..., :17].permute(1, 2, 0), labels, reduction="none", label_smoothing=smoothing
    )
    assert got.shape == (3, 5)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    weights = torch.rand(3, 5, dtype=torch.float64)
    got_grad, want_grad = (
        torch.autograd.grad((losses * weights).sum(), logits)[0] for losses in (got, want)
    )
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-13, atol=1e-13)
    assert not got_grad[..., 17:].any()


def test_padding_is_left_out_whatever_it_holds() -> None:
    logits, labels = _inputs(24)
    with torch.no_grad():
        logits[..., 17:] = torch.nan
    losses = CrossEntropy(17)(logits, labels)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logits.grad.isfinite().all()


def test_large_logits_are_stable() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    losses = vocabulary_cross_entropy(logits, torch.tensor([1]), axis=SINGLE, vocab_size=3)
    assert losses.item() == pytest.approx(2e4)
    losses.backward()
    assert torch.equal(logits.grad, torch.tensor([[1.0, -1.0, 0.0]]))


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits, labels = _inputs(dtype=torch.bfloat16)
    losses = CrossEntropy(17)(logits, labels)
    assert losses.dtype == torch.float32
    want = F.cross_entropy(logits.float().permute(1, 2, 0), labels, reduction="none")
    torch.testing.assert_close(losses, want, rtol=1e-6, atol=1e-6)
    got_grad = torch.autograd.grad(losses.sum(), logits)[0]
    want_grad = torch.autograd.grad(want.sum(), logits)[0]
    assert got_grad.dtype == torch.bfloat16
    torch.testing.assert_close(got_grad, want_grad, rtol=8e-3, atol=1e-4)


def test_only_the_logits_are_kept_in_their_size() -> None:
    logits, labels = _inputs(dtype=torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        CrossEntropy(17)(logits, labels)
    large = [t for t in kept if t.numel() >= logits.numel()]
    assert len(large) == 1
    assert large[0].dtype == torch.bfloat16


def test_slices_of_tokens_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = _inputs()
    results = []
    for elements in (1 << 25, 40, 1):
        monkeypatch.setattr(loss_module, "_SLICE_ELEMENTS", elements)
        losses = CrossEntropy(17, label_smoothing=0.1)(logits, labels)
        results.append((losses, torch.autograd.grad(losses.sum(), logits)[0]))
    for losses, gradient in results[1:]:
        assert torch.equal(losses, results[0][0])
        assert torch.equal(gradient, results[0][1])


def test_gradcheck() -> None:
    logits, labels = _inputs()
    small, targets = logits.detach()[:2, 0].requires_grad_(), labels[0, :2]

    def function(x: Tensor) -> Tensor:
        return vocabulary_cross_entropy(x, targets, axis=SINGLE, vocab_size=15, label_smoothing=0.2)

    targets.clamp_(max=14)
    assert torch.autograd.gradcheck(function, (small,))


def test_negative_labels_are_ignored_and_too_large_ones_are_loud() -> None:
    logits, labels = _inputs()
    labels[0, 0], labels[1, 2] = -100, 17
    losses = CrossEntropy(17, label_smoothing=0.1)(logits, labels)
    assert losses[0, 0] == 0
    assert losses[1, 2].isnan()
    torch.autograd.backward(losses[0].sum())
    assert not logits.grad[0, 0].any()
    assert logits.grad[1, 0].any()


def test_zero_weights_give_the_logarithm_of_the_true_vocabulary() -> None:
    losses = CrossEntropy(50257)(torch.zeros(2, 1, 50304), torch.tensor([[3, 50256]]))
    torch.testing.assert_close(losses, torch.full((1, 2), math.log(50257)))


def test_wrong_shapes_and_settings_are_explained() -> None:
    with pytest.raises(ValueError, match="label_smoothing=1.5"):
        CrossEntropy(17, label_smoothing=1.5)
    with pytest.raises(ValueError, match="fewer than vocab_size=18"):
        CrossEntropy(18)(*_inputs())
    with pytest.raises(ValueError, match="don't fit logits"):
        CrossEntropy(17)(_inputs()[0], torch.zeros(2, 5, dtype=torch.int64))


def test_masked_mean() -> None:
    losses = torch.tensor([[1.0, 2.0], [torch.inf, 6.0]], requires_grad=True)
    mean, tokens = masked_mean(losses, torch.tensor([[1, 1], [0, 1]]))
    assert mean.item() == 3.0
    assert tokens.item() == 3.0
    mean.backward()
    assert torch.equal(losses.grad, torch.tensor([[1 / 3, 1 / 3], [0.0, 1 / 3]]))


def test_masked_mean_of_nothing_is_zero_with_zero_gradient() -> None:
    """Case C05: no token counts, nothing becomes NaN."""
    losses = torch.tensor([1.0, torch.nan], requires_grad=True)
    mean, tokens = masked_mean(losses, torch.zeros(2))
    assert (mean.item(), tokens.item()) == (0.0, 0.0)
    mean.backward()
    assert not losses.grad.any()


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradients_over_the_logits_are_the_same(cap: float, smoothing: float) -> None:
    labels = torch.randint(0, 17, (3, 5))
    labels[0, 1] = -100
    start = torch.randn(5, 3, 24, dtype=torch.bfloat16)  # padded: 17 of 24
    loss = CrossEntropy(17, label_smoothing=smoothing, logit_cap=cap)
    found, kept = [], []
    for consume in (False, True):
        leaf = start.clone().requires_grad_()
        logits = leaf * 1  # as a product gives them
        loss(logits, labels, consume=consume).sum().backward()
        found.append(leaf.grad)
        kept.append(logits.detach())
    assert torch.equal(*found)
    assert torch.equal(kept[0], start)
    assert torch.equal(kept[1], found[0])  # no further memory


def test_a_retained_graph_keeps_the_logits() -> None:
    leaf = torch.randn(5, 3, 17, requires_grad=True)
    losses = CrossEntropy(17)(leaf * 1, torch.randint(0, 17, (3, 5)), consume=True)
    first, second = (
        torch.autograd.grad(losses.sum(), leaf, retain_graph=again)[0] for again in (True, False)
    )
    assert torch.equal(first, second)


def test_hooks_see_logits_that_stay() -> None:
    layer, loss = torch.nn.Linear(2, 2), CrossEntropy(2)
    assert not loss_module.is_observed(layer, loss)
    handle = layer.register_forward_hook(lambda *_: None)
    assert loss_module.is_observed(layer, loss)
    handle.remove()
    loss.register_forward_pre_hook(lambda *_: None)
    assert loss_module.is_observed(layer, loss)
