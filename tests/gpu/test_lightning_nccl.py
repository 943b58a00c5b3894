"""What of Lightning needs GPUs to be tried: synchronised batch norms."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.lightning_cases import Case, Net, assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices"),
]


class Normed(Net):
    """With a batch norm, whose statistics are those of the global batch."""

    def __init__(self) -> None:
        super().__init__()
        self.network.insert(1, nn.BatchNorm1d(8))


def batch_norms(case: Case) -> dict[str, Any]:
    module = Normed()
    facts = case.fit(module=module, accelerator="gpu", sync_batchnorm=True, max_epochs=2)
    assert type(module.network[1]) is not nn.SyncBatchNorm  # put back at the end
    facts["mean"] = module.network[1].running_mean.cpu()
    facts["weights"] = {name: (*box[:3], box[3].cpu()) for name, box in facts["weights"].items()}
    return facts


def test_batch_norms_are_synchronised() -> None:
    assert torch.cuda.is_available()
    assert_same(batch_norms, "dp", [batch_norms])
