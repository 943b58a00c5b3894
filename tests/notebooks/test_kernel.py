"""One notebook kernel through several runs: fit, validate, fit again, another layout, a fit that
raises, a good one; alone and with ranks forked from the kernel. Nothing is left behind.
"""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parents[2]

SETUP = """
import lightning as L, psutil, torch
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.strategies import MegatronStrategy
from tests.layout_runs import Batches, Run, tiny_config

run = Run(config=tiny_config(num_layers=2), steps=3)

class Fails(GPTModel):
    def training_step(self, batch, batch_idx):
        print(f"speaking from rank {self.trainer.global_rank}", flush=True)
        raise LookupError("this model is bad")

def trainer(devices, **layout):
    return L.Trainer(
        accelerator="cpu", devices=devices, max_steps=3, logger=False, val_check_interval=3,
        enable_checkpointing=False, enable_model_summary=False, num_sanity_val_steps=0,
        strategy=MegatronStrategy(**layout),
    )

def held():
    this = psutil.Process()
    listening = sum(c.status == "LISTEN" for c in this.net_connections("inet"))
    return len(this.children(recursive=True)), listening, torch.distributed.is_initialized()

before = held()
"""
RUNS = """
model = GPTModel(run.config)
first = trainer({devices}, **{layout})
first.fit(model, Batches(run))
fitted = float(first.callback_metrics["val_loss"])
validated = first.validate(model, Batches(run), verbose=False)[0]["val_loss"]
first.fit(model, Batches(run))
second = trainer({devices}, **{other})
second.fit(model, Batches(run))
better = float(second.callback_metrics["val_loss"])
"""
RAISES = """
third = trainer({devices})
third.fit(Fails(run.config), Batches(run))
"""
AFTER = """
third.fit(GPTModel(run.config), Batches(run))
print("RESULT", fitted, validated, better, third.state.finished, held() == before)
"""


@pytest.mark.slow
def test_c51_one_kernel_through_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it a kernel leaves alone what processes write
    cells = [nbformat.v4.new_code_cell(SETUP)]
    for devices, layout, other in (
        (1, dict(), dict(micro_batch_size=2)),
        (2, dict(tensor_parallel_size=2), dict(pipeline_parallel_size=2)),
    ):
        for text in (RUNS, RAISES, AFTER):
            source = text.format(devices=devices, layout=layout, other=other)
            tags = ["raises-exception"] if text is RAISES else []
            cells.append(nbformat.v4.new_code_cell(source, metadata={"tags": tags}))
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    ).execute()

    for raising, after in (
        (notebook.cells[2], notebook.cells[3]),
        (notebook.cells[5], notebook.cells[6]),
    ):
        (error,) = [out for out in raising.outputs if out.output_type == "error"]
        assert (error.ename, error.evalue) == ("LookupError", "this model is bad")
        found = re.search(r"RESULT (\S+) (\S+) (\S+) (\S+) (\S+)", written(after))
        assert found is not None, written(after)
        fitted, validated, better = (float(value) for value in found.groups()[:3])
        assert validated == pytest.approx(fitted, rel=1e-5)
        assert better < fitted
        assert found[4] == "True"
        assert found[5] == "True"
    assert "speaking from rank 0" in written(notebook.cells[5])
    assert "from fork" not in written(notebook.cells[5])  # what messages sent from forks say
    (error,) = [out for out in notebook.cells[5].outputs if out.output_type == "error"]
    forked = "".join(error.traceback)
    assert re.search(r"\[rank [01]\] LookupError: this model is bad", forked)


ADAPTED = """
from megatron_lightning.bridge import from_hf
from tests.lora_runs import DATA, Data, PlainAdamW

model = from_hf(DATA / "hf" / "llama", model_class=PlainAdamW).add_lora(rank=4)
data = Data(model.config.vocab_size, 3)
sums = []

def keep():
    named = model.built_network().named_parameters()
    sums.append(sum(float(p.detach().abs().sum()) for n, p in named if "lora_b" in n))

class NoData(Data):
    def train_dataloader(self):
        raise LookupError("these data are bad")

for layout in (dict(tensor_parallel_size=2), dict(pipeline_parallel_size=2)):
    trainer(2, **layout).fit(model, data)
    keep()
"""
RAISES_IN_DATA = """
trainer(2, tensor_parallel_size=2).fit(model, NoData(model.config.vocab_size, 3))
"""
AFTER_ADAPTED = """
keep()
trainer(1).fit(model, data)
keep()
frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
model.save_adapters("{folder}")
print("RESULT", *sums, len(frozen), held() == before)
"""


@pytest.mark.slow
def test_adapters_in_one_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fits over forked ranks go on from each other, an error changes nothing, and a fit in
    this process goes on from there.
    """
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    after = AFTER_ADAPTED.format(folder=tmp_path / "adapters")
    cells = [nbformat.v4.new_code_cell(text) for text in (SETUP, ADAPTED, RAISES_IN_DATA, after)]
    cells[2].metadata["tags"] = ["raises-exception"]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    ).execute()
    (error,) = [out for out in notebook.cells[2].outputs if out.output_type == "error"]
    assert (error.ename, error.evalue) == ("LookupError", "these data are bad")
    found = written(notebook.cells[3]).partition("RESULT ")[2].split()
    one, two, after_error, three = map(float, found[:4])
    assert 0 < one < two == after_error < three
    assert found[4:6] == ["15", "True"]
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()


def written(cell: "nbformat.NotebookNode") -> str:
    """What the cell printed."""
    return "".join(out.text for out in cell.outputs if out.output_type == "stream")
