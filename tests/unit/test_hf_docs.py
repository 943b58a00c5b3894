"""`docs/huggingface.md` says what the tests show."""

from megatron_lightning.bridge.hf import FAMILIES
from tests.hf_models import LOCAL, LOCAL_NAMES
from tests.hf_page import PAGE, TITLES, between, render


def test_the_page_is_up_to_date() -> None:
    """Else: python -m tests.hf_page."""
    assert between(PAGE.read_text())[1] == render()


def test_every_family_has_a_reference_model() -> None:
    assert set(FAMILIES) == set(LOCAL_NAMES) == set(TITLES)
    assert all((LOCAL / name / "golden.npz").is_file() for name in FAMILIES)
