"""Run alone: pytest test/unit/utils/test_openmp.py"""

from __future__ import annotations

import subprocess
import sys

from sglang.srt.utils.openmp import SPIN_COUNT, spin_briefly


def test_a_users_own_setting_stands() -> None:
    for own in ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "passive"}):
        environ = dict(own)
        spin_briefly(environ)
        assert environ == own
    environ = {}
    spin_briefly(environ)
    assert environ == {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


def test_processes_that_compute_set_it_before_torch() -> None:
    """OpenMP reads its environment when it is loaded."""
    bench = (
        "import os, sys\n"
        "class Look:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            assert 'GOMP_SPINCOUNT' in os.environ, 'torch first'\n"
        "sys.meta_path.insert(0, Look())\n"
        "import sglang.bench_one_batch\n"
    )
    scheduler = (
        "import os, sys\n"
        "import sglang.srt.managers.scheduler_process as process\n"
        "def read_config():\n"
        "    assert 'torch' not in sys.modules and 'GOMP_SPINCOUNT' in os.environ\n"
        "    sys.exit(0)\n"
        "process.read_config = read_config\n"
        "process.main()\n"
    )
    for code in (bench, scheduler):
        environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
