"""The quantization kernels compile with no GPU present, and need no local memory."""

import json
import os
import struct
import subprocess
import sys

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from sage_cute.templates.quant.spec import QuantSpec  # noqa: E402

HEAD_DIMS = (16, 32, 40, 64, 72, 96, 128, 200, 256)
TOKENS = {"block_q": 1, "block_k": 1, "block_v": 1, "v_scale_form": "log2"}
BLOCKS = {"block_q": 128, "block_k": 64, "block_v": 64}
VARIANTS = {
    **{f"token-{d}": QuantSpec("bfloat16", d, **TOKENS) for d in HEAD_DIMS},
    **{f"block-{d}": QuantSpec("bfloat16", d, **BLOCKS) for d in HEAD_DIMS},
    **{f"fp16-{d}": QuantSpec("float16", d, **TOKENS) for d in HEAD_DIMS},
    "fp16-block": QuantSpec("float16", 128, **BLOCKS),
    "raw-k": QuantSpec("bfloat16", 128, **TOKENS, smooth_k=False),
    "only-qk": QuantSpec("bfloat16", 128, 1, 1, 0),
    "only-v": QuantSpec("bfloat16", 128, 0, 0, 1, smooth_k=False),
    "mixed": QuantSpec("bfloat16", 64, 16, 1, 32),
}

COMPILE = """
import dataclasses, glob, json, os, sys
from sage_cute.compile.quant_launch import compiled_quantize
from sage_cute.templates.quant.spec import QuantSpec
for name, fields in json.load(sys.stdin).items():
    compiled_quantize(QuantSpec(**fields))
    for path in glob.glob("*.cubin"):
        os.rename(path, name + ".elf")
"""


@pytest.fixture(scope="module")
def cubins(tmp_path_factory):
    """Machine code of every variant, compiled for sm_90a in a process of its own."""
    folder = tmp_path_factory.mktemp("cubins")
    specs = {name: vars(spec) for name, spec in VARIANTS.items()}
    dump = {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": str(folder)}
    subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps(specs),
        env={**os.environ, **dump},
        cwd=folder,
        check=True,
        text=True,
        timeout=600,
    )
    return {name: (folder / f"{name}.elf").read_bytes() for name in VARIANTS}


def frame_sizes(elf: bytes) -> list[int]:
    """Bytes of local memory a thread, one number a function (EIATTR_FRAME_SIZE of .nv.info)."""
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * size) for i in range(count)]
    strings = sections[names][4]
    values = []
    for section in sections:
        start = strings + section[0]
        if elf[start : elf.index(b"\0", start)] != b".nv.info":
            continue
        at, end = section[4], section[4] + section[5]
        while at < end:
            form, kind, length = struct.unpack_from("<BBH", elf, at)
            if form == 4 and kind == 0x11:
                values.append(struct.unpack_from("<II", elf, at + 4)[1])
            at += 4 + (length if form == 4 else 0)
    return values


@pytest.mark.parametrize("name", VARIANTS)
def test_compiles_without_local_memory(cubins, name):
    frames = frame_sizes(cubins[name])
    assert len(frames) >= 1 + 2 * VARIANTS[name].smooth_k  # kernels, and what they call
    assert frames == [0] * len(frames), f"{name} spills to local memory: {frames} bytes a thread"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 84}, "head_dim 84"),
        ({"block_q": 48}, "block_q=48"),
        ({"block_q": 0}, "together"),
        ({"block_q": 0, "block_k": 0, "block_v": 0}, "nothing to quantize"),
        ({"block_q": 0, "block_k": 0, "smooth_k": True}, "smooth_k"),
        ({"block_v": 64, "v_scale_form": "log2"}, "log2"),
    ],
)
def test_unsupported_says_why(change, reason):
    fields = {"dtype": "bfloat16", "head_dim": 128, **TOKENS, **change}
    assert reason in QuantSpec(**fields).why_not()


def test_supported_says_nothing():
    assert [spec.why_not() for spec in VARIANTS.values()] == [None] * len(VARIANTS)
