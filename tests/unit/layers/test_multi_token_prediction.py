"""Further predictions against a plain loop, and what they are trained on."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.config import GPTConfig, MultiTokenPredictionConfig
from megatron_lightning.layers import SequenceInfo
from megatron_lightning.layers.multi_token_prediction import FurtherLosses
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel.token_shift import TokenShift

DEPTHS = 2


def model(**arguments: object) -> GPTModel:
    config = GPTConfig(
        vocab_size=19,
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        make_vocab_size_divisible_by=1,
        multi_token_prediction=MultiTokenPredictionConfig(num_layers=DEPTHS),
    )
    torch.manual_seed(3)
    made = GPTModel(config, **arguments)
    for parameter in made.built_network().parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return made


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 19, (2, 9), generator=generator)
    mask = (torch.rand(2, 8, generator=generator) < 0.7).float()
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}


def test_each_depth_predicts_one_token_further() -> None:
    """By a loop over the depths that cuts sequences shorter instead of filling them up."""
    made, data = model(), batch()
    network = made.built_network()
    losses, further = network(**data)
    assert torch.equal(losses, network(data["tokens"], labels=data["labels"]))
    seen = []
    network.decoder.final_layernorm.register_forward_hook(lambda _, __, out: seen.append(out))
    network(data["tokens"])
    hidden = seen[0]
    for depth in range(1, DEPTHS + 1):
        layer = network.mtp.layers[str(depth - 1)]
        length = 8 - depth
        embedded = network.embedding(data["tokens"][:, depth:])
        tables = network.rotary(length, None, torch.device("cpu"))
        hidden = layer(hidden[:length], embedded, tables)
        logits = network.output_layer(hidden).transpose(0, 1)
        expected = F.cross_entropy(
            logits.flatten(0, 1), data["labels"][:, depth:].flatten(), reduction="none"
        )
        found = further.losses[depth - 1]
        torch.testing.assert_close(found[:, :length], expected.view(2, -1))
        assert found[:, length:].eq(0).all()
        assert torch.equal(further.masks[depth - 1][:, :length], data["loss_mask"][:, depth:])
        assert further.masks[depth - 1][:, length:].eq(0).all()


def test_what_joins_the_loss() -> None:
    further = FurtherLosses(
        losses=torch.tensor([[[1.0, 2.0, 3.0, 9.0]], [[4.0, 6.0, 9.0, 9.0]]]),
        masks=torch.tensor([[[1.0, 0.0, 1.0, 0.0]], [[1.0, 1.0, 0.0, 0.0]]]),
        counts=torch.tensor([4.0, 2.0, 2.0]),
    )
    num_tokens = torch.tensor(4.0)
    assert further.means(num_tokens).tolist() == [2.0, 5.0]
    assert further.shares(num_tokens).tolist() == [1.0, 2.5]


@pytest.mark.parametrize("normalization", ["token", "micro_batch"])
def test_the_loss_of_a_step(normalization: str) -> None:
    made, data = model(loss_normalization=normalization), batch()
    logged: dict[str, float] = {}
    made.log = lambda name, value, **_: logged.update({name: float(value.detach())})  # type: ignore[method-assign]
    result = made.training_step(data, 0)
    loss = result["loss"] if normalization == "token" else result
    losses, further = made.built_network()(**data)
    mask = data["loss_mask"]
    main = (losses * mask).sum() / mask.sum()
    sums = (further.losses * further.masks).sum(dim=(1, 2))
    own = sums / further.masks.sum(dim=(1, 2))
    added = sums / mask.sum() if normalization == "token" else own
    assert float(loss) == pytest.approx(float(main + 0.1 * added.mean()), rel=1e-6)
    assert logged["train_loss"] == pytest.approx(float(main), rel=1e-6)
    assert [logged[f"mtp_{k}_loss"] for k in (1, 2)] == pytest.approx(own.tolist(), rel=1e-6)


def test_embedding_and_head_are_shared() -> None:
    made, data = model(), batch()
    network = made.built_network()
    names = [name for name, _ in network.named_parameters()]
    assert "mtp.embedding.word_embeddings.weight" not in names
    _, further = network(**data)
    further.losses.sum().backward()
    for weight in (network.embedding.word_embeddings.weight, network.output_layer.weight):
        assert weight.grad is not None
        assert weight.grad.abs().sum() > 0


def test_shifts_stay_within_documents() -> None:
    x = torch.arange(1, 13).view(2, 6)
    shift = TokenShift()
    (once, twice), sums = shift(x, SequenceInfo(((2, 4), (6,))), 2, -1)
    assert once.tolist() == [[2, -1, 4, 5, 6, -1], [8, 9, 10, 11, 12, -1]]
    assert twice.tolist() == [[-1, -1, 5, 6, -1, -1], [9, 10, 11, 12, -1, -1]]
    assert sums.tolist() == [x.sum(), once.sum(), twice.sum()]
    (plain, *_, far), _ = shift(x, None, 7, 0)
    assert plain.tolist() == [[2, 3, 4, 5, 6, 0], [8, 9, 10, 11, 12, 0]]
    assert far.eq(0).all()


def test_validation_and_generation_go_without() -> None:
    made, data = model(), batch()
    mean, num_tokens = made.token_losses(data)
    assert num_tokens == data["loss_mask"].sum()
    assert mean.dim() == 0
    assert made.generate([1, 2, 3], 2).shape == (1, 5)
