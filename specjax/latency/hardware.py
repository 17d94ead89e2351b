"""What chips can do at most, in bfloat16, as their makers state it.  `calibrate.measure_device` measures the one at hand.

Nothing reaches these peaks: a pass gets 50 to 80 % of them, and `_replace` lowers them where that is known.  NVIDIA's
tensor-core numbers are those without sparsity, half of what data sheets print in large type.  `link` is what a chip can
send, all its links together, which is half of the "bidirectional" figure; a collective along one axis of a TPU's torus uses
a part of them.
"""

from __future__ import annotations

from typing import NamedTuple


class Hardware(NamedTuple):
    """One chip."""

    name: str
    flops: float  # bfloat16 FLOP/s, dense
    bandwidth: float  # memory, bytes/s
    memory: float  # bytes
    link: float  # bytes/s it can send to other chips


GB, TB, GIB = 1e9, 1e12, float(1 << 30)

HARDWARE: dict[str, Hardware] = {
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOPS, 2,039 GB/s, NVLink 600 GB/s.
    "a100": Hardware("NVIDIA A100 SXM 80GB", 312e12, 2.039 * TB, 80 * GB, 300 * GB),
    # NVIDIA H100 SXM data sheet: 1,979 TFLOPS with sparsity, 3.35 TB/s, NVLink 900 GB/s.
    "h100": Hardware("NVIDIA H100 SXM", 989.5e12, 3.35 * TB, 80 * GB, 450 * GB),
    # NVIDIA H200 SXM data sheet: as the H100, with 141 GB at 4.8 TB/s.
    "h200": Hardware("NVIDIA H200 SXM", 989.5e12, 4.8 * TB, 141 * GB, 450 * GB),
    # NVIDIA HGX/DGX B200 data sheets, an eighth of the system: 36 PFLOPS with sparsity, 1,440 GB, 64 TB/s; NVLink 1.8 TB/s.
    "b200": Hardware("NVIDIA B200", 2250e12, 8.0 * TB, 180 * GB, 900 * GB),
    # docs.cloud.google.com/tpu/docs/v4: 275 TFLOPS, 32 GiB, 1,200 GB/s; six links of 50 GB/s each way (arXiv 2304.01433).
    "tpu-v4": Hardware("TPU v4", 275e12, 1.2 * TB, 32 * GIB, 300 * GB),
    # docs.cloud.google.com/tpu/docs/v5e: 197 TFLOPS, 16 GB, 819 GB/s, 400 GB/s both ways.
    "tpu-v5e": Hardware("TPU v5e", 197e12, 0.819 * TB, 16 * GB, 200 * GB),
    # docs.cloud.google.com/tpu/docs/v5p: 459 TFLOPS, 95 GiB, 2,765 GB/s, 1,200 GB/s both ways.
    "tpu-v5p": Hardware("TPU v5p", 459e12, 2.765 * TB, 95 * GIB, 600 * GB),
    # docs.cloud.google.com/tpu/docs/v6e: 918 TFLOPS, 32 GB, 1,638 GB/s, 800 GB/s both ways.
    "tpu-v6e": Hardware("TPU v6e", 918e12, 1.638 * TB, 32 * GB, 400 * GB),
    # docs.cloud.google.com/tpu/docs/tpu7x: 2,307 TFLOPS, 192 GiB; 7.37 TB/s and 1.2 TB/s both ways by Google's announcement.
    "tpu-v7": Hardware("TPU v7 (Ironwood)", 2307e12, 7.37 * TB, 192 * GIB, 600 * GB),
}


def find_hardware(name: str) -> Hardware:
    """The chip of that name.

    Raises:
      ValueError: none has it; the message lists those that are known.
    """
    if name.lower() not in HARDWARE:
        raise ValueError(f"hardware {name!r} is not in the table: choose {', '.join(HARDWARE)}")
    return HARDWARE[name.lower()]
