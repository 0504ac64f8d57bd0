"""Packaging of the serving engine.

The distribution is named ``sglang-toggle``; the import package is ``sglang``, so it must not be installed
beside upstream's ``sglang`` distribution (starting the server refuses to run then).
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

# Ranges that were tested; the exact versions the Makefile installs are in requirements/.
INSTALL_REQUIRES = [
    "aiohttp>=3.10,<4",
    "fastapi>=0.115,<1",
    "dill>=0.4,<1",
    "gguf>=0.17,<1",
    "httptools>=0.6,<1",
    "jinja2>=3.1.5,<4",
    "llguidance>=1.7,<2",
    "msgspec>=0.19,<1",
    "numpy>=1.26,<2.4",
    "prometheus-client>=0.21,<1",
    "psutil>=6,<8",
    "pyyaml>=6,<7",
    "pyzmq>=26,<28",
    "regex>=2024.11.6",
    "safetensors>=0.5,<1",
    "tiktoken>=0.9,<1",
    "torch>=2.11,<2.14",
    "tqdm>=4.66,<5",
    "transformers>=5.17,<6",
    "uvicorn>=0.34,<1",
    "xgrammar>=0.2.9,<0.3",
]

TRACE = [
    "opentelemetry-exporter-otlp-proto-grpc>=1.30,<2",
    "opentelemetry-exporter-otlp-proto-http>=1.30,<2",
    "opentelemetry-sdk>=1.30,<2",
]

BENCH = ["aiohttp>=3.12,<4", "httpx>=0.28,<1", "matplotlib>=3.9,<4", "rich>=13,<16"]

EXTRAS_REQUIRE = {
    "cuda": [
        "flashinfer-python>=0.6.18,<0.7; sys_platform == 'linux'",
        "nvidia-nccl-cu13>=2.27; sys_platform == 'linux'",
        "torch>=2.11,<2.14",
        "triton>=3.6; sys_platform == 'linux'",
    ],
    "ray": ["ray>=2.50,<3"],
    "trace": TRACE,
    "bench": BENCH,
    "test": BENCH
    + TRACE
    + [
        "accelerate>=1.10,<2",
        "compressed-tensors>=0.12,<1",
        "hypothesis>=6.130,<7",
        "mypy>=1.15,<3",
        "pytest>=8,<10",
        "pytest-timeout>=2.3,<3",
        "pytest-xdist>=3.6,<4",
        "ruff>=0.11,<1",
    ],
}

setup(
    name="sglang-toggle",
    version="0.1.0",
    description="An LLM server that chooses speculative or plain decoding for every step",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    python_requires=">=3.11",
    package_dir={"": "python"},
    packages=find_packages(where="python"),
    package_data={
        "sglang.benchmark": ["data/*.jsonl", "data/README.md"],
        "sglang.srt.entrypoints": ["dashboard.html"],
        "sglang.embedded": [
            "smollm2-eagle3/config.json",
            "smollm2-eagle3/model.safetensors",
            "smollm2-eagle3/README.md",
        ],
    },
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
