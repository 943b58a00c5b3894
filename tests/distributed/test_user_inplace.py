"""Networks that write to what their layers give, as ordinary torch code does, train like those that
don't, whatever stands in the layers' places.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config import PipelineConfig, QuantizationConfig, RuntimeConfig
from tests.harness import run_ranks_fresh
from tests.layout_runs import assemble
from tests.user_modules import Block, Decoder, OwnTransformer, decoder_plan
from tests.user_runs import LAYOUTS, fit_module, user_run


class Apart(Block):
    """A block without operations in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x) * 2.0) * 0.5
        return x + self.down(torch.relu(self.up(self.norm2(x) * 2.0))) * 0.5


class InPlace(Block):
    """The same with them."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x).mul_(2.0)).mul_(0.5)
        return x + self.down(torch.relu_(self.up(self.norm2(x).mul_(2.0)))).mul_(0.5)


class Network(Decoder):
    def __init__(self, block: type[Block]) -> None:
        super().__init__(4)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.writes = block is InPlace

    def begin(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if not self.writes:
            return super().begin(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        share_of_even = (tokens % 2 == 0).float().mean(1, keepdim=True)[:, None]
        gate = self.gate(share_of_even.to(self.gate.weight.dtype)).sigmoid_()
        x = self.words(tokens)
        x += self.positions(places)
        return x, gate

    def finish(self, carried: Any, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(carried[0]))
        return logits.mul_(0.5) if self.writes else logits * 0.5


MAKERS = [
    functools.partial(OwnTransformer, functools.partial(Network, block))
    for block in (Apart, InPlace)
]
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    **LAYOUTS,
    "zero_bubble": (2, LAYOUTS["pp2"][1] | dict(pipeline=PipelineConfig(schedule="zb-h1"))),
    "fp8": (1, dict(quantization=QuantizationConfig(recipe="fp8_tensorwise", simulate=True))),
    "compiled": (2, LAYOUTS["tp2"][1] | dict(runtime=RuntimeConfig(compile_layers=True))),
}
SLOW = ("compiled", "tp2_sp_pp2")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if c in SLOW else ()) for c in CASES]
)
def test_layers_give_what_may_be_written_to(case: str) -> None:
    size, layout = CASES[case]
    run = user_run(layout=layout | dict(plan=decoder_plan()), steps=2)
    apart, in_place = (run_ranks_fresh(fit_module, size, make, run) for make in MAKERS)
    for want, got in zip(apart, in_place, strict=True):
        assert got["losses"] == want["losses"]
    whole = assemble([rank["final"] for rank in apart])
    for name, value in assemble([rank["final"] for rank in in_place]).items():
        assert torch.equal(value, whole[name]), name
