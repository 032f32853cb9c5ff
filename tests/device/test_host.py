"""What the machine says of itself."""

import os

import psutil
import pytest
import torch

from sparkgap.device import host


def test_cores():
    assert 1 <= host.usable_cores() <= os.cpu_count()


def test_memory_is_about_what_psutil_says(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    available = psutil.virtual_memory().available
    assert host.available_memory_bytes(torch.device("cpu")) == pytest.approx(available, rel=0.2)


def test_memory_of_a_container(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    assert host.available_memory_bytes(torch.device("cpu")) == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert host.available_memory_bytes(torch.device("cpu")) > 5000


def test_memory_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(host, "_MEMINFO", tmp_path / "meminfo")
    assert 0 < host.available_memory_bytes(torch.device("cpu")) <= psutil.virtual_memory().total
