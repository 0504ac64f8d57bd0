"""How fast weights of a rank come from files to a device: by one thread through the files' maps, and by ours.

    python benchmark/loading/load_speed.py --gb 4                  # on a GPU if there is one
    python benchmark/loading/load_speed.py --gb 1 --ranks 1 8 --threads 1 2

Files of int4 experts and one large matrix are written to ``--folder`` (a temporary one) and read once, so
that they are in the page cache: what is compared is the host's work, not a disk. ``maps``: safetensors'
slices of the mapped files, copied one after the other. Every tensor of both is compared once. GB/s are of
what a rank takes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

from sglang.srt.distributed.shares import Span
from sglang.srt.model_loader.reading import Readers
from sglang.srt.model_loader.weight_files import SafetensorsFile
from sglang.srt.model_loader.weight_source import Part

EXPERT: Final = {"up": (2048, 896), "down": (7168, 256)}  # words of 8 numbers: Kimi-K2.5's
MATRIX: Final = (16384, 7168)  # bfloat16
EXPERTS_A_FILE: Final = 64


def write_files(folder: Path, num_bytes: float) -> list[Path]:
    """Until there are so many bytes."""
    paths: list[Path] = []
    while sum(path.stat().st_size for path in paths) < num_bytes:
        tensors = {
            f"e{i}.{name}": torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int32)
            for i in range(EXPERTS_A_FILE)
            for name, size in EXPERT.items()
        }
        tensors["matrix"] = torch.randn(MATRIX).bfloat16()
        paths.append(folder / f"model-{len(paths)}.safetensors")
        save_file(tensors, paths[-1])
    for path in paths:
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    return paths


def part_of(name: str, size: Sequence[int], ranks: int) -> Part | None:
    """The second rank's: rows, of ``down`` columns."""
    if ranks == 1:
        return None
    dim = int(name.endswith("down"))
    each = size[dim] // ranks
    return Part(dim, Span(each, 2 * each))


def by_maps(paths: Sequence[Path], ranks: int, device: torch.device) -> dict[str, torch.Tensor]:
    found = {}
    for number, path in enumerate(paths):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                view = file.get_slice(name)
                part = part_of(name, view.get_shape(), ranks)
                taken = view[:] if part is None else view[part.index()]
                found[f"{number}.{name}"] = taken.to(device, copy=True).contiguous()
    return found


def by_readers(
    paths: Sequence[Path], ranks: int, device: torch.device, threads: int
) -> dict[str, torch.Tensor]:
    readers, found = Readers(device, threads), {}
    calls: list[Callable[[], None]] = []
    files = [SafetensorsFile(path) for path in paths]
    for number, file in enumerate(files):
        for name in file.names():
            part = part_of(name, file.shape(name), ranks)
            shape = file.shape(name) if part is None else part.shape(file.shape(name))
            out = torch.empty(shape, dtype=file.dtype(name), device=device)
            found[f"{number}.{name}"] = out
            call = partial(readers.fill, out, file.stored(name), part)
            if name == "matrix":
                call()  # alone, as a model takes it: its pieces are read side by side
            else:
                calls.append(call)
    readers.run(calls)
    readers.close()
    for file in files:
        file.close()
    return found


def measure(load: Callable[[], dict[str, torch.Tensor]], device: torch.device, repeats: int) -> float:
    """GB/s of the fastest."""
    best = 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        found = load()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
        best = max(best, sum(t.numel() * t.element_size() for t in found.values()) / seconds / 1e9)
        del found
    return best


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--gb", type=float, default=1.0, help="of files (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=4, help="the fastest counts")
    parser.add_argument("--folder", type=Path, help="for the files, which are removed again")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        paths = write_files(Path(folder), args.gb * 1e9)
        for ranks in args.ranks:
            expected = by_maps(paths, ranks, device)
            maps = measure(partial(by_maps, paths, ranks, device), device, args.repeats)
            for threads in args.threads:
                load = partial(by_readers, paths, ranks, device, threads)
                assert all(torch.equal(tensor, expected[name]) for name, tensor in load().items())
                ours = measure(load, device, args.repeats)
                record = {"ranks": ranks, "threads": threads, "maps GB/s": round(maps, 2)}
                record |= {"ours GB/s": round(ours, 2), "ratio": round(ours / maps, 2)}
                print(json.dumps(record), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
