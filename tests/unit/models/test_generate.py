"""Choice of tokens and the generation loop."""

import pytest
import torch

from megatron_lightning.models import GPTNetwork, Sampling, generate, preset_config
from megatron_lightning.models.generate import keep_top_k, keep_top_p, next_tokens

LOGITS = torch.log(torch.tensor([[0.4, 0.1, 0.2, 0.3], [0.05, 0.9, 0.03, 0.02]]))


def successor(tokens):
    """Logits that always prefer the last token's successor; ids from 10 on are padding and
    loudest.
    """
    logits = torch.zeros(tokens.shape[0], 16)
    logits[:, 10:] = 100.0
    return logits.scatter(1, (tokens[:, -1:] + 1) % 10, 5.0)


def kept(logits):
    """Ids that may still be drawn, by row."""
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def test_top_k():
    assert kept(keep_top_k(LOGITS, 2)) == [[0, 3], [0, 1]]
    assert kept(keep_top_k(LOGITS, 0)) == kept(keep_top_k(LOGITS, 9)) == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.3, [[0], [1]]),
        (0.5, [[0, 3], [1]]),
        (0.8, [[0, 2, 3], [1]]),
        (0.92, [[0, 1, 2, 3], [0, 1]]),
        (1.0, [[0, 1, 2, 3], [0, 1, 2, 3]]),
    ],
)
def test_top_p_is_the_smallest_set_that_reaches_p(p, expected):
    assert kept(keep_top_p(LOGITS, p)) == expected


def test_greedy_takes_the_most_likely():
    assert next_tokens(LOGITS, Sampling()).tolist() == [0, 1]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_sampling_frequencies_follow_the_distribution(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = LOGITS[:1].expand(20000, 4)
    drawn = next_tokens(logits, Sampling(temperature=temperature), generator)
    frequency = torch.bincount(drawn, minlength=4) / 20000
    expected = (LOGITS[0] / temperature).softmax(0)
    torch.testing.assert_close(frequency, expected, rtol=0, atol=0.02)


def test_top_k_comes_before_top_p():
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(temperature=1.0, top_k=2, top_p=0.5)
    drawn = next_tokens(LOGITS[:1].expand(500, 4), sampling, generator)
    assert set(drawn.tolist()) == {0}


def test_generation_never_returns_padding():
    for sampling in (Sampling(), Sampling(temperature=5.0)):
        found = generate(
            successor,
            torch.tensor([[3], [8]]),
            max_new_tokens=50,
            vocab_size=10,
            sampling=sampling,
            generator=torch.Generator().manual_seed(0),
        )
        assert found.shape == (2, 51)
        assert found.max() < 10


def test_greedy_continuation():
    found = generate(successor, torch.tensor([[3], [8]]), max_new_tokens=4, vocab_size=10)
    assert found.tolist() == [[3, 4, 5, 6, 7], [8, 9, 0, 1, 2]]


def test_rows_end_on_their_own_and_then_repeat_the_end_token():
    start = torch.tensor([[3], [0]])
    found = generate(successor, start, max_new_tokens=9, vocab_size=10, end_token=5)
    assert found.tolist() == [[3, 4, 5, 5, 5, 5], [0, 1, 2, 3, 4, 5]]


def test_the_same_seed_gives_the_same_text():
    runs = [
        generate(
            lambda tokens: torch.zeros(1, 10),
            torch.tensor([[1]]),
            max_new_tokens=20,
            vocab_size=10,
            sampling=Sampling(temperature=1.0),
            generator=torch.Generator().manual_seed(7),
        )
        for _ in range(2)
    ]
    assert torch.equal(*runs)


def test_wrong_arguments_are_all_named():
    with pytest.raises(ValueError, match=r"top_p=0.0 must be in") as error:
        generate(
            successor,
            torch.zeros(2, 0, dtype=torch.int64),
            max_new_tokens=-1,
            vocab_size=10,
            sampling=Sampling(temperature=-1.0, top_k=-2, top_p=0.0),
        )
    for word in ("temperature=-1.0", "top_k=-2", "(2, 0)", "max_new_tokens=-1"):
        assert word in str(error.value)


def test_with_a_network():
    network = GPTNetwork(preset_config("tiny", num_layers=1)).eval()
    torch.manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    prompt = torch.tensor([[5, 6, 7]])
    found = generate(lambda t: network(t)[-1], prompt, max_new_tokens=5, vocab_size=257)
    for end in range(3, 8):
        assert found[0, end] == network(found[:, :end])[-1, 0].argmax()
