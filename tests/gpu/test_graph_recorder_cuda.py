"""What a recorded function draws: the numbers that it would draw without a graph.

pytest tests/gpu/test_graph_recorder_cuda.py -m gpu -s
"""

import pytest
import torch

from megatron_lightning.runtime.graph_recorder import CudaRecorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device"),
]

TENTH_OF_A_SECOND = 200_000_000
"""Clock cycles of a busy wait on the device."""


@pytest.mark.parametrize("own", [False, True], ids=["default", "own"])
def test_the_first_replay_draws_what_is_drawn_without_a_graph(own: bool) -> None:
    """The recorder's stream is kept busy until after the replay has begun: what recording does to
    the generator must not come in the midst of it.
    """
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.manual_seed(5)
    generator = torch.Generator(device).manual_seed(7) if own else None

    def draw() -> torch.Tensor:
        torch.cuda._sleep(2 * TENTH_OF_A_SECOND)
        return torch.rand(1024, device=device, generator=generator)

    state = generator or torch.cuda.default_generators[0]
    draw()  # an offset other than the one that recording begins with
    recorder = CudaRecorder(device)
    recorder._stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(recorder._stream):
        torch.cuda._sleep(TENTH_OF_A_SECOND)
    before = state.get_state()
    replay, drawn = recorder.record(draw, [generator] if generator is not None else [])
    found = []
    for _ in range(3):
        replay()
        found.append(drawn.clone())
    after = state.get_state()
    state.set_state(before)
    wanted = [draw() for _ in range(3)]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert torch.equal(after, state.get_state())
    recorder.close()
