"""What Triton makes of the casts, compiled for compute capability 9.0 without a GPU: tiles change
threads as numbers of 16 bits or as words, never as bytes, which ptxas 12.9 gets wrong
(triton-lang/triton issue 11111; the interpreter can't show it).
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
    fp8_blocks,
    fp8_stacks,
    fp8_tiles,
    fp8_weights,
)

TILE = dict(by_columns=True, assembled=True, height=64, width=128)
BOTH = dict(want_itself=True, want_transposed=True, bounded=True, backwards=True, **TILE)
ONLY = BOTH | dict(want_itself=False, bounded=False)
GATE = BOTH | dict(breadth=64)
del GATE["width"]
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


for out in ("*fp8e4nv", "*fp8e5"):
    types = dict(x="*bf16", itself=out, transposed=out, scale="*fp32", **SIZES)
    gate = dict(grad="*bf16", inner="*bf16", width="i32") | types
    for words in (False, True):
        code(fp8_tiles._cast_both, types, BOTH | dict(words=words))
        code(fp8_tiles._cast_both, types, ONLY | dict(words=words))
        code(gated_silu_fp8._cast_gradient, gate, GATE | dict(words=words))
    blocks = dict(x="*bf16", itself=out, transposed=out) | SCALES | SIZES
    code(fp8_blocks._cast_blocks, blocks, SQUARES, 8)
    columns = dict(x="*bf16", out=out, amax="*fp32", inverses="*fp32", **SIZES)
    code(fp8_blocks._cast_columns, columns, dict(height=128, width=128), 8)
    stacks = dict(x="*bf16", out=out, inverses="*fp32", rows="i32", columns="i32", limit="fp32")
    tall = dict(height=fp8_stacks._HEIGHT, width=fp8_stacks._WIDTH)
    known = stacks | dict(amax="*fp32")
    code(fp8_stacks._cast_columns, known, dict(known=True, **tall), fp8_stacks._WARPS)
for words in (False, True):
    many = dict(element=triton.language.bfloat16, words=words, **TILE)
    code(fp8_weights._cast_many, TABLE, many)
"""


def test_tiles_never_change_threads_as_bytes() -> None:
    pytest.importorskip("triton", reason="triton compiles the kernels")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    changed = re.findall(r"ttg\.convert_layout .*: tensor<[0-9x]*x(\w+), ", done.stdout)
    assert done.stdout.count("module attributes") == 20
    assert {"bf16", "i32"} <= set(changed)
    assert not [kind for kind in changed if kind.startswith("f8") or kind == "i8"]
