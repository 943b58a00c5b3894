"""Recorded training runs of Megatron-Core, reproduced in one process by a plain torch loop."""

import pytest
import torch
from safetensors.torch import load_file

from megatron_lightning.layers import TorchBackend
from megatron_lightning.models import GPTNetwork
from tests.parity.mcore_cases import NAMES, load_case, our_state


def built(case, attention="fused"):
    """Network with the case's initial weights."""
    network = GPTNetwork(case.config, TorchBackend(attention=attention))
    network.load_state_dict(case.state)
    return network


def difference(found, expected):
    """Norm of the difference over norm."""
    return ((found - expected).norm() / expected.norm()).item()


def backward_of_step(network, case, step):
    """Accumulate the gradients of one step; each micro-batch counts equally. Returns the losses."""
    losses = []
    for tokens, labels, mask in zip(
        case.tokens[step], case.labels[step], case.loss_mask[step], strict=True
    ):
        loss = (network(tokens, labels=labels) * mask).sum() / mask.sum()
        (loss / len(case.tokens[step])).backward()
        losses.append(loss.item())
    return losses


def trained(network, case):
    """Run all steps. Returns per step (micro-batch losses, gradient norm)."""
    matrices = [p for n, p in network.named_parameters() if p.dim() > 1 and not n.endswith(".bias")]
    others = [p for n, p in network.named_parameters() if p.dim() == 1 or n.endswith(".bias")]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": case.optimizer["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    history = []
    for step, lr in enumerate(case.expected["lr"]):
        optimizer.zero_grad()
        losses = backward_of_step(network, case, step)
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), case.optimizer["clip_grad"])
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        history.append((losses, norm.item()))
    return history


@pytest.mark.parametrize("attention", ["fused", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_token_losses(name, attention):
    case = load_case(name)
    network = built(case, attention)
    tokens, labels = case.tokens[0, 0], case.labels[0, 0]
    assert difference(network(tokens).transpose(0, 1), case.logits) < 1e-5
    assert difference(network(tokens, labels=labels), case.token_losses) < 1e-5


def check_first_gradients(case):
    """Compare step 0's gradients with those that are recorded."""
    network = built(case)
    backward_of_step(network, case, 0)
    found = {name: p.grad for name, p in network.named_parameters()}
    total = torch.stack([g.norm() for g in found.values()]).norm()
    assert total.item() == pytest.approx(case.expected["grad_norm"][0], rel=1e-5)
    for name, expected in case.gradients.items():
        # The true gradient of key biases is zero, so that part is held against the global norm.
        error = (found[name] - expected).norm()
        scale = total if "linear_qkv.bias" in name else expected.norm()
        assert error / scale < 1e-5, name


@pytest.mark.parametrize("name", NAMES)
def test_first_gradients(name):
    case = load_case(name)
    assert len(case.gradients) > case.config.num_layers
    check_first_gradients(case)


@pytest.mark.parametrize("name", NAMES)
def test_training_run(name):
    case = load_case(name)
    history = trained(built(case), case)
    for step, (losses, norm) in enumerate(history):
        mean = sum(losses) / len(losses)
        assert losses == pytest.approx(case.expected["microbatch_loss"][step], rel=1e-4), step
        assert mean == pytest.approx(case.expected["loss"][step], rel=1e-4), step
        assert norm == pytest.approx(case.expected["grad_norm"][step], rel=1e-4), step


@pytest.mark.parametrize("name", NAMES)
def test_all_gradients_and_final_weights(golden, name):
    folder = golden / "models" / "mcore"
    case = load_case(name, folder)
    assert len(case.gradients) == len(list(built(case).parameters()))
    check_first_gradients(case)
    network = built(case)
    trained(network, case)
    final = our_state(case.config, load_file(folder / name / "final.safetensors"))
    for name, found in network.state_dict().items():
        if "linear_qkv.bias" in name:
            # Adam follows mere rounding of key biases, by at most the sum of the learning rates.
            assert (found - final[name]).abs().max() < 1e-2
        else:
            assert difference(found, final[name]) < 1e-4, name
