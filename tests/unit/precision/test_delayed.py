import torch

from megatron_lightning.precision.delayed import ROLES, DelayedScaling
from megatron_lightning.precision.formats import FP8_MAX


def store(layers: int, margin: int = 0) -> DelayedScaling:
    names = [f"layer{i}" for i in range(layers)]
    return DelayedScaling(
        names, gradient="e5m2", length=4, margin=margin, device=torch.device("cpu")
    )


def test_scales_of_products_lie_at_addresses_that_cublas_takes() -> None:
    """Multiples of 16 bytes; products refuse others (CUBLAS_STATUS_NOT_SUPPORTED)."""
    delayed = store(3)
    for _ in range(2):  # before and after a window
        seen = set()
        for name in delayed.names:
            for role in ROLES:
                _, _, inverse = delayed.recipe(name).place(role)
                assert inverse.shape == ()
                assert inverse.data_ptr() % 16 == 0
                seen.add(inverse.data_ptr())
        assert len(seen) == len(delayed.names) * len(ROLES)
        delayed.amax.fill_(3.0)
        delayed.finish_window(lambda amax: amax)


def test_scales_follow_the_largest_of_the_history() -> None:
    delayed = store(2, margin=1)
    for amax in (5.0, 40.0, torch.inf, 7.0):  # an overflow is left out
        delayed.amax[1] = amax
        delayed.finish_window(lambda amax: amax)
    for role in ROLES:
        limit = FP8_MAX["e5m2" if role == "gradient" else "e4m3"]
        _, scale, inverse = delayed.recipe("layer1").place(role)
        assert limit / 4 < 40.0 * float(scale) <= limit / 2
        assert float(scale) * float(inverse) == 1.0
        _, scale, inverse = delayed.recipe("layer0").place(role)
        assert float(scale) == float(inverse) == 1.0
    for _ in range(2):  # 40 leaves the history of four
        delayed.finish_window(lambda amax: amax)
    _, scale, _ = delayed.recipe("layer1").place("input")
    assert FP8_MAX["e4m3"] / 4 < 7.0 * float(scale) <= FP8_MAX["e4m3"] / 2
