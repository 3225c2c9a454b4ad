"""A pytest plugin that runs LMCache's own tests without the 5 GiB allocator of their conftest.

None of the tests that test_contract.py runs uses that allocator. LMCache's conftest skips it for
tests with the mark `no_shared_allocator`. test_contract.py copies this file beside the suite.
"""

import resource

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker("no_shared_allocator")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    terminalreporter.write_line(f"peak memory: {peak_kib >> 10} MiB")
