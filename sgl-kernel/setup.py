"""Packaging of ``sgl_kernel``, the kernels of the serving engine. Pure Python: Triton compiles them."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

setup(
    name="sgl-kernel-toggle",
    version="0.1.0",
    description="Kernels for decoding and speculation: Triton, each with a plain PyTorch reference",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    package_dir={"": "python"},
    packages=find_packages(where="python"),
    # Without Triton the references serve; with it, CUDA tensors take the kernels.
    install_requires=["numpy>=1.26,<2.4", "torch>=2.11,<2.14"],
    extras_require={"cuda": ["triton>=3.6,<4; sys_platform == 'linux'"]},
)
