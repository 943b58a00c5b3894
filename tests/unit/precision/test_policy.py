import pytest
import torch

from megatron_lightning.precision.policy import policy_for


def test_dtypes_of_each_precision() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    wanted = {
        "32-true": (fp32, fp32, fp32, False),
        "bf16-mixed": (bf16, fp32, fp32, True),
        "bf16-true": (bf16, bf16, fp32, False),
        "16-mixed": (torch.float16, fp32, fp32, True),
    }
    for name, (params, main_params, grads, has_masters) in wanted.items():
        policy = policy_for(name)
        assert policy.params_dtype is params
        assert policy.main_params_dtype is main_params
        assert policy.main_grads_dtype is policy.grad_reduce_dtype is grads
        assert policy.has_masters is has_masters


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("16-true", "float16"),
        ("transformer-engine", "FP8"),
        ("fp8", "FP8"),
        ("int4", "use one of"),
    ],
)
def test_others_are_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"precision='{name}'.*{reason}"):
        policy_for(name)
