"""What Triton makes of the casts, compiled for compute capability 9.0 without a GPU: tiles change
threads as numbers of 16 bits, never as bytes, which ptxas 12.9 gets wrong
(triton-lang/triton issue 11111; the interpreter can't show it). And of searches for largest values:
they take the larger of two numbers by the instruction that keeps NaN.
"""

import re
import subprocess
import sys

import pytest

PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_lightning.layers.kernels import gated_silu_fp8
from megatron_lightning.precision.kernels import (
    choices,
    fp8,
    fp8_blocks,
    fp8_stacks,
    fp8_tiles,
    fp8_weights,
)

TILE = dict(height=choices.CAST.height, width=choices.CAST.width)
BOTH = dict(want_itself=True, want_transposed=True, bounded=True, **TILE)
ONLY = BOTH | dict(want_itself=False, bounded=False)
GATE = BOTH | dict(height=choices.GATE_CAST.height, width=choices.GATE_CAST.width)
SIZES = dict(rows="i32", columns="i32", padded_rows="i32", limit="fp32")
SCALES = dict(inverses="*fp32", turned_inverses="*fp32", step="i32", turned_step="i32")
SQUARES = dict(square=True, want_itself=True, want_transposed=True, block=128)
TABLE = dict(table="*i64", member_of="*i32", tile_of="*i32", found="*fp32", limit="fp32")


def code(kernel, types, constants, warps=choices.CAST.warps):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    wide = [(i,) for i, name in enumerate(names) if types.get(name, "fp32") != "fp32"]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        dict.fromkeys(wide, [["tt.divisibility", 16]]),
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps))
    print(made.asm["ttgir"])
    return made


for out in ("*fp8e4nv", "*fp8e5"):
    types = dict(x="*bf16", itself=out, transposed=out, scale="*fp32", **SIZES)
    gate = dict(grad="*bf16", inner="*bf16") | types
    code(fp8_tiles._cast_both, types, BOTH)
    code(fp8_tiles._cast_both, types, ONLY)
    code(gated_silu_fp8._cast_gradient, gate, GATE, choices.GATE_CAST.warps)
    blocks = dict(x="*bf16", itself=out, transposed=out) | SCALES | SIZES
    code(fp8_blocks._cast_blocks, blocks, SQUARES, 8)
    columns = dict(x="*bf16", out=out, amax="*fp32", inverses="*fp32", **SIZES)
    code(fp8_blocks._cast_columns, columns, dict(height=128, width=128), 8)
    stacks = dict(x="*bf16", out=out, inverses="*fp32", rows="i32", columns="i32", limit="fp32")
    tall = dict(height=fp8_stacks._HEIGHT, width=fp8_stacks._WIDTH)
    known = stacks | dict(amax="*fp32")
    code(fp8_stacks._cast_columns, known, dict(known=True, **tall), fp8_stacks._WARPS)
code(fp8_weights._cast_many, TABLE, dict(element=triton.language.bfloat16, **TILE))


def search(kernel, types, constants, warps):
    made = code(kernel, types, constants, warps)
    print("search", kernel.__name__, made.asm["ptx"], "end", sep="\\n")


for x in ("*bf16", "*fp32"):
    span, warps = choices.LARGEST.block, choices.LARGEST.warps
    search(fp8._largest, dict(x=x, parts="*fp32", count="i32"), dict(span=span), warps)
many = dict(table="*i64", member_of="*i32", chunk_of="*i32", found="*fp32", spans="i32")
of_many = dict(element=triton.language.bfloat16, span=fp8_weights._SPAN)
search(fp8_weights._largest_of_many, many, of_many, fp8_weights._WARPS)
gate = dict(grad="*bf16", inner="*bf16", parts="*fp32", width="i32", rows="i32")
gate |= dict(product="*bf16")
block = dict(block=gated_silu_fp8._BLOCK, places=1024)
search(gated_silu_fp8._largest_product, gate, block, gated_silu_fp8._WARPS)
spans = choices.GATE_LARGEST
search(gated_silu_fp8._largest_gradient, gate, dict(block=spans.block), spans.warps)
"""


@pytest.fixture(scope="module")
def told() -> str:
    """What the program prints."""
    pytest.importorskip("triton", reason="triton compiles the kernels")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tiles_never_change_threads_as_bytes(told: str) -> None:
    changed = re.findall(r"ttg\.convert_layout .*: tensor<[0-9x]*x(\w+), ", told)
    assert told.count("module attributes") == 18
    assert "bf16" in changed
    assert not [kind for kind in changed if kind.startswith("f8") or kind == "i8"]


def test_searches_keep_what_is_not_a_number(told: str) -> None:
    searches = re.findall(r"^search\n(\w+)\n(.*?)^end$", told, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in searches] == [
        *("_largest", "_largest", "_largest_of_many"),
        *("_largest_product", "_largest_gradient"),
    ]
    for name, code in searches:
        larger = set(re.findall(r"\bmax\.[\w.]*f(?:32|16|16x2)\b", code))
        assert larger, name
        assert all(".NaN" in each for each in larger), (name, larger)
