"""Values that `fit` refuses before any class is built."""

from pathlib import Path

import pytest
import yaml

from megatron_lightning.cli import fit_values, trainer
from megatron_lightning.cli.errors import UserError

CONFIG = {
    "trainer": {"accelerator": "cpu", "devices": 1, "logger": False},
    "model": {"class_path": "megatron_lightning.cli.presets.gpt_preset"},
    "data": {"paths": "nowhere", "seq_length": 16, "micro_batch_size": 1, "global_batch_size": 1},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fit.yaml"
    model = CONFIG["model"] | {"init_args": {"preset": "tiny"}}
    path.write_text(yaml.safe_dump(CONFIG | {"model": model}))
    return path


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_numpy_does_not_take(seed: int, file: Path) -> None:
    with pytest.raises(UserError) as error:
        trainer.main(["fit", "--config", str(file), "--seed_everything", str(seed)])
    assert str(error.value) == f"--seed_everything={seed}: must be from 0 to 4294967295"


def test_cuda_graphs_on_the_cpu(file: Path) -> None:
    """Of a training run; the layout alone may be looked at there."""
    options = ["--config", str(file), "--trainer.strategy.runtime.cuda_graphs", "layers"]
    with pytest.raises(UserError) as error:
        trainer.main(["fit", *options])
    message = str(error.value)
    assert message.startswith("--trainer.strategy.runtime.cuda_graphs='layers' on the CPU")
    assert "set it to none, or trainer.accelerator to gpu" in message
    with pytest.raises(Exception, match="nowhere"):
        trainer.main(["validate", *options])


@pytest.mark.parametrize("precision", ["16", "16-mixed"])
@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_half_precision_on_the_cpu(
    precision: str,
    accelerator: str,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before the Trainer says that it takes bfloat16 instead."""
    monkeypatch.setattr(fit_values.CUDAAccelerator, "is_available", lambda: False)
    options = ["--trainer.precision", precision, "--trainer.accelerator", accelerator]
    for command in ("fit", "validate"):
        with pytest.raises(UserError) as error:
            trainer.main([command, "--config", str(file), *options])
        told = f"--trainer.precision={precision!r} on the CPU, which has no float16 training: use"
        assert str(error.value).startswith(told)
    assert not [warning for warning in recwarn if "bf16-mixed" in str(warning.message)]
    shown = capsys.readouterr()
    assert "Using" not in shown.out + shown.err
