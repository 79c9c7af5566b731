"""The pretended card for pytest: PYTHONPATH=tests PYTEST_PLUGINS=pretended_card.plugin pytest -m cuda"""

import sys

import pretended_card

if "torch" in sys.modules:
    raise RuntimeError("The pretended card has to be there before torch is imported.")
pretended_card.install()


def pytest_terminal_summary(terminalreporter):
    ran = [r for key in ("passed", "failed") for r in terminalreporter.getreports(key)]
    there = pretended_card.absent or f"{len(ran)} tests ran on it"
    terminalreporter.write_line(f"The pretended card: {there}.")
