"""The simulated GPU for pytest: PYTHONPATH=.ci PYTEST_PLUGINS=simulated_gpu.plugin pytest -m
cuda"""

import sys

import simulated_gpu

if "torch" in sys.modules:
    raise RuntimeError("The simulated GPU has to be installed before torch is imported.")
simulated_gpu.install()


def pytest_terminal_summary(terminalreporter):
    ran = [r for key in ("passed", "failed") for r in terminalreporter.getreports(key)]
    there = simulated_gpu.absent or f"{len(ran)} tests ran on it"
    terminalreporter.write_line(f"The simulated GPU: {there}.")
