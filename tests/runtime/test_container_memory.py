"""Limits of containers, from files as the kernel writes them, and of the process."""

import resource
from math import inf
from pathlib import Path

import pytest
import torch

from torch_lla_em.runtime import memory
from torch_lla_em.runtime.memory import container_room


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def second(folder, limit, used, cached=0):
    stat = f"anon 5\nfile 7\ninactive_file {cached}\n"
    write(folder, memory__max=f"{limit}\n", memory__current=f"{used}\n", memory__stat=stat)


@pytest.fixture
def groups(tmp_path):
    path = tmp_path / "cgroup"
    path.write_text("0::/pods/one\n")
    return path


def test_the_tightest_group_counts(tmp_path, groups):
    mount = tmp_path / "fs"
    assert container_room(groups, mount) == container_room(tmp_path / "no", tmp_path) == inf
    for folder, limit, used, cached, expected in (
        ("pods/one", 1000, 400, 100, 700),
        ("pods", 2000, 1500, 0, 500),
        ("pods", "max", 1500, 0, 700),
        (".", 300, 100, 0, 200),  # a group seen as the root
        ("pods/one", 100, 150, 0, 0),  # more than is allowed
    ):
        second(mount / folder, limit, used, cached)
        assert container_room(groups, mount) == expected


def test_the_first_version(tmp_path):
    groups, mount = tmp_path / "cgroup", tmp_path / "fs"
    groups.write_text("9:name=systemd:/\n4:hugetlb,memory:/job\n3:cpu:/job\n0::/\n")
    stat = "cache 1\ntotal_inactive_file 30\n"
    limits = {"memory__limit_in_bytes": "500\n", "memory__usage_in_bytes": "90\n"}
    write(mount / "memory" / "job", **limits, memory__stat=stat)
    assert container_room(groups, mount) == 440


def test_a_limit_makes_less_memory_free(monkeypatch):
    monkeypatch.setattr(memory, "container_room", lambda: 12345.0)
    assert memory.free_memory(torch.device("cpu")) == 12345.0


def test_a_limit_of_the_process_makes_less_memory_free():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    lines = Path("/proc/self/status").read_text().splitlines()
    held = dict(line.split(":", 1) for line in lines)["VmData"]
    limit = 1024 * int(held.split()[0]) + 10**8
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        assert 5e7 < memory.free_memory(torch.device("cpu")) < 1.5e8
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
