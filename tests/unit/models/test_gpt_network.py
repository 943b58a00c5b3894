"""The GPT network: what it returns, what each token sees, and that it can be cut into stages."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron_lightning.config import GPTConfig
from megatron_lightning.models import GPTNetwork, gpt_plan
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.materialise import materialise
from megatron_lightning.parallel.tensor import apply_tensor_parallel

SIZES = {
    "vocab_size": 61,
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "max_position_embeddings": 24,
}
GPT2_LIKE = {
    "norm": "layernorm",
    "activation": "gelu",
    "gated_linear_unit": False,
    "add_bias_linear": True,
    "position_embedding": "learned",
    "tie_word_embeddings": True,
}


def built(std=0.2, **changes):
    """A network with random weights."""
    network = GPTNetwork(GPTConfig(**{**SIZES, **changes}))
    torch.manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return network


def sample(rows=2, length=12):
    """Random tokens and labels."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 61, (2, rows, length), generator=generator).unbind(0)


@pytest.mark.parametrize("changes", [{}, GPT2_LIKE, {"qk_layernorm": True, "add_qkv_bias": True}])
def test_losses_are_the_cross_entropy_of_the_logits(changes):
    network, (tokens, labels) = built(**changes), sample()
    logits = network(tokens)  # (S, B, V)
    assert logits.shape == (12, 2, 61)
    expected = F.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")
    torch.testing.assert_close(network(tokens, labels=labels), expected)


def test_masked_labels_and_label_smoothing():
    network, (tokens, labels) = built(label_smoothing=0.1), sample()
    labels[0, 3:7] = -100
    logits = network(tokens).permute(1, 2, 0)
    expected = F.cross_entropy(
        logits, labels, reduction="none", ignore_index=-100, label_smoothing=0.1
    )
    torch.testing.assert_close(network(tokens, labels=labels), expected)


@pytest.mark.parametrize("changes", [{}, GPT2_LIKE])
def test_a_token_does_not_see_later_ones(changes):
    network, (tokens, _) = built(**changes), sample()
    before = network(tokens)
    tokens[:, 7] = (tokens[:, 7] + 1) % 61
    after = network(tokens)
    assert torch.equal(before[:7], after[:7])
    assert (before[7:] - after[7:]).abs().amin(dim=-1).amax() > 0


def test_sliding_window_bounds_what_a_token_sees():
    """Three layers with a window of 3 reach 6 tokens back, and with one full layer all of them."""
    tokens, _ = sample(rows=1)
    other = tokens.clone()
    other[0, 0] = (tokens[0, 0] + 1) % 61
    windows = built(window_size=3)
    difference = (windows(tokens) - windows(other)).abs().amax(dim=(1, 2))
    assert (difference[:7] > 0).all()
    assert (difference[7:] == 0).all()
    mixed = built(window_size=3, window_pattern="SF")
    assert (mixed(tokens) - mixed(other)).abs().amax(dim=(1, 2)).gt(0).all()


def test_rotation_is_relative_and_learned_positions_are_not():
    tokens, _ = sample()
    moved = torch.arange(12).expand(2, 12) + 9
    rotary, learned = built(), built(position_embedding="learned")
    torch.testing.assert_close(rotary(tokens), rotary(tokens, moved), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(learned(tokens), learned(tokens, moved), atol=1e-2)
    assert torch.equal(learned(tokens), learned(tokens, torch.arange(12).expand(2, 12)))


def test_positions_may_differ_between_rows():
    network, (tokens, _) = built(position_embedding="learned"), sample()
    positions = torch.stack((torch.arange(12), torch.arange(12) + 5))
    both = network(tokens, positions)
    for row in range(2):
        alone = network(tokens[row : row + 1], positions[row : row + 1])
        torch.testing.assert_close(both[:, row], alone[:, 0])


def test_one_layer_without_positions_does_not_see_the_order():
    tokens, _ = sample(rows=1)
    swapped = tokens.clone()
    swapped[0, [2, 5]] = tokens[0, [5, 2]]
    blind, rotary = (built(position_embedding=p, num_layers=1) for p in ("none", "rope"))
    torch.testing.assert_close(blind(tokens)[-1], blind(swapped)[-1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(rotary(tokens)[-1], rotary(swapped)[-1], rtol=1e-3, atol=1e-3)


def test_tied_head_is_the_embedding():
    network, (tokens, labels) = built(tie_word_embeddings=True), sample()
    assert network.output_layer.weight is network.embedding.word_embeddings.weight
    assert "output_layer.weight" not in dict(network.named_parameters())
    network(tokens, labels=labels).sum().backward()
    tied = network.output_layer.weight.grad
    untied = built()
    untied.load_state_dict(network.state_dict())
    untied(tokens, labels=labels).sum().backward()
    both = untied.output_layer.weight.grad + untied.embedding.word_embeddings.weight.grad
    torch.testing.assert_close(tied, both)


def stages_of(network, cut):
    """Two copies of the network, each with the modules of its stage only."""
    parts = []
    for stage in range(2):
        part = GPTNetwork(network.config)
        part.load_state_dict(network.state_dict())
        for name in list(part.decoder.layers):
            if (int(name) < cut) != (stage == 0):
                del part.decoder.layers[name]
        if stage == 0:
            part.decoder.final_layernorm = part.output_layer = None
        else:
            part.embedding = None
        parts.append(part)
    return parts


@pytest.mark.parametrize("changes", [{}, GPT2_LIKE])
@pytest.mark.parametrize("cut", [0, 2, 3])
def test_two_stages_equal_the_whole(changes, cut):
    network, (tokens, labels) = built(**changes), sample()
    first, last = stages_of(network, cut)
    names = [name for part in (first, last) for name, _ in part.named_layers()]
    assert names == ["0", "1", "2"]
    carried = first.begin(tokens, labels=labels)
    for part in (first, last):
        for name, layer in part.named_layers():
            carried = part.apply_layer(name, layer, carried, tokens, labels=labels)
    assert torch.equal(last.finish(carried, tokens, labels=labels), network(tokens, labels=labels))


def test_padded_vocabulary_is_never_seen():
    network, (tokens, labels) = built(), sample()
    logits, losses = network(tokens), network(tokens, labels=labels)
    apply_tensor_parallel(network, gpt_plan(network.config), MeshAxis(name="tp"))
    assert network.output_layer.weight.shape[0] == 128
    torch.testing.assert_close(network(tokens), logits)
    torch.testing.assert_close(network(tokens, labels=labels), losses)


def test_initial_values_from_the_meta_device():
    config = GPTConfig(**{**SIZES, **GPT2_LIKE, "init_method_std": 0.04})
    network = GPTNetwork(config, device="meta")
    table = apply_tensor_parallel(network, gpt_plan(config), MeshAxis(name="tp"))
    materialise(network, table, seed=1, device="cpu")
    for name, parameter in network.named_parameters():
        values, ends_branch = parameter.detach(), "linear_proj" in name or "linear_fc2" in name
        if "layernorm.weight" in name:
            assert (values == 1).all(), name
        elif name.endswith("bias"):
            assert (values == 0).all(), name
        else:
            values = values[:61] if "word_embeddings" in name else values
            std = 0.04 / math.sqrt(6) if ends_branch else 0.04
            assert values.std().item() == pytest.approx(std, rel=0.1), name
    assert network.output_layer.weight is network.embedding.word_embeddings.weight
    tokens, labels = sample()
    losses = network(tokens, labels=labels)
    assert losses.mean().item() == pytest.approx(math.log(61), rel=0.05)


def test_bfloat16_training_step():
    network, (tokens, labels) = built(qk_layernorm=True, std=0.1), sample()
    exact = network(tokens, labels=labels).mean()
    low = network.bfloat16()
    loss = low(tokens, labels=labels).mean()
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    assert all(p.grad.dtype == torch.bfloat16 for p in low.parameters())


def test_validation_before_training_in_one_process():
    network, (tokens, labels) = built(), sample()
    with torch.inference_mode():
        validated = network(tokens, labels=labels)
    loss = network(tokens, labels=labels)
    loss.sum().backward()
    assert torch.equal(validated, loss)


def test_wrong_configs_are_refused_with_all_reasons():
    with pytest.raises(ValueError, match=r"num_query_groups=3 does not divide") as error:
        GPTNetwork(GPTConfig(**{**SIZES, "num_query_groups": 3, "hidden_dropout": -1.0}))
    assert "hidden_dropout=-1.0" in str(error.value)


def test_hidden_dropout_acts_on_the_embedding_too():
    network, (tokens, _) = built(hidden_dropout=0.5, num_layers=1), sample()
    embedded = network.embedding(tokens)
    assert (embedded == 0).float().mean().item() == pytest.approx(0.5, abs=0.1)
    assert (network.eval().embedding(tokens) != 0).all()
