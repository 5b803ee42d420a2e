"""What the system's files say of a machine, and what layers may take of its memory."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroups import memory_limit
from potluck.stage.capabilities import (
    _devices,
    _dropped,
    _read_speed,
    capabilities,
    default_threads,
    disk_speed,
    free_memory_bytes,
    memory_limits,
)
from potluck.stage.engines.llama_lib import library
from potluck.stage.machine_facts import (
    GB,
    MACHINE_SHARE,
    OWN_GROWTH_BYTES,
    BackendDevice,
    Container,
    Owner,
    backend_name,
    container,
    cpu_name,
    features_in,
    gpus_among,
    offered,
    threads_for,
)

CUDA = BackendDevice("CUDA0", "CUDA", "RTX 4060", 1, 8 * GB, 7 * GB)
VULKAN = BackendDevice("Vulkan0", "Vulkan", "RTX 4060", 1, 8 * GB + 300_000_000, 7 * GB)
METAL = BackendDevice("MTL0", "Metal", "Apple M4", 1, 12 * GB, 11 * GB)
INTEGRATED = BackendDevice("Vulkan1", "Vulkan", "Radeon 780M", 2, 16 * GB, 15 * GB)
CPU = BackendDevice("CPU", "CPU", "Ryzen", 0, 32 * GB, 30 * GB)
BLAS = BackendDevice("BLAS", "BLAS", "OpenBLAS", 3, 0, 0)


def reader(files: dict[str, str]):
    return files.get


def test_the_processor_s_name_is_found_on_pcs_and_boards():
    assert cpu_name("processor : 0\nmodel name\t: AMD  EPYC\n", None) == "AMD EPYC"
    assert cpu_name("processor : 0\nBogoMIPS : 108\n", "Raspberry Pi 5 Model B\0") == "Raspberry Pi 5 Model B"
    assert cpu_name("Hardware\t: BCM2711\n", None) == "BCM2711"
    assert cpu_name("", None) == ""


def test_only_instruction_sets_that_are_on_are_named():
    line = "CPU : SSE3 = 1 | AVX = 0 | AVX512_VNNI = 1 | OPENMP = 1 | "
    assert features_in(line) == ("SSE3", "AVX512_VNNI", "OPENMP")


def test_no_groups_mean_no_limits():
    assert container(reader({})) == Container()
    assert container(reader({"/proc/self/cgroup": "0::/user.slice\n"})) == Container()


def test_the_tightest_group_of_version_2_counts_whoever_is_in_it():
    files = {
        "/proc/self/cgroup": "0::/pod/app\n",
        "/sys/fs/cgroup/pod/app/memory.max": "max\n",
        "/sys/fs/cgroup/pod/app/memory.current": "50000000\n",
        "/sys/fs/cgroup/pod/memory.max": "500000000\n",
        "/sys/fs/cgroup/pod/memory.current": "300000000\n",
        "/sys/fs/cgroup/pod/memory.stat": "anon 200000000\ninactive_file 60000000\nactive_file 40000000\n",
        "/sys/fs/cgroup/pod/app/cpu.max": "max 100000\n",
        "/sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
    }
    assert container(reader(files)) == Container(500_000_000, 300_000_000, 1.5)


def test_the_smallest_limit_is_told_even_if_the_room_is_short_elsewhere():
    files = {
        "/proc/self/cgroup": "0::/pod/app\n",
        "/sys/fs/cgroup/pod/app/memory.max": "500000000\n",
        "/sys/fs/cgroup/pod/app/memory.current": "10000000\n",
        "/sys/fs/cgroup/pod/memory.max": "2000000000\n",
        "/sys/fs/cgroup/pod/memory.current": "1900000000\n",
    }
    assert container(reader(files)) == Container(500_000_000, 100_000_000)


def test_a_limit_above_which_everything_is_slowed_down_counts_like_one_that_kills():
    files = {
        "/proc/self/cgroup": "0::/app\n",
        "/sys/fs/cgroup/app/memory.max": "500000000\n",
        "/sys/fs/cgroup/app/memory.high": "400000000\n",
        "/sys/fs/cgroup/app/memory.current": "100000000\n",
    }
    assert container(reader(files)) == Container(400_000_000, 300_000_000)


def test_a_container_that_sees_its_own_group_as_the_root_finds_its_limit_there():
    second = {
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": "300000000\n",
        "/sys/fs/cgroup/memory.current": "100000000\n",
        "/sys/fs/cgroup/cpu.max": "200000 100000\n",
    }
    assert container(reader(second)) == Container(300_000_000, 200_000_000, 2.0)
    first = {  # the path is the host's, the files are the container's
        "/proc/self/cgroup": "4:memory:/docker/0123\n0::/\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "300000000\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "100000000\n",
    }
    assert container(reader(first)) == Container(300_000_000, 200_000_000)


def test_default_threads_leave_a_core_free_and_keep_to_the_quota():
    assert threads_for(16, 32, 0.0) == 15
    assert threads_for(16, 32, 2.0) == 2
    assert threads_for(16, 32, 2.9) == 2
    assert threads_for(16, 32, 0.3) == 1
    assert threads_for(16, 4, 0.0) == 4
    assert threads_for(1, 1, 0.0) == 1


def test_version_1_is_read_as_well_and_its_huge_number_is_no_limit():
    files = {
        "/proc/self/cgroup": "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n0::/\n",
        "/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "200000000\n",
        "/sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": "120000000\n",
        "/sys/fs/cgroup/memory/docker/x/memory.stat": "cache 1\ntotal_inactive_file 30000000\ntotal_active_file 0\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "120000000\n",
        "/sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "30000\n",
        "/sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "100000\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert container(reader(files)) == Container(200_000_000, 110_000_000, 0.3)


def test_the_limit_of_a_pod_around_a_container_counts_though_only_the_container_is_seen():
    files = {
        "/proc/self/cgroup": "4:memory:/kubepods/pod1/app\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "120000000\n",
        "/sys/fs/cgroup/memory/memory.stat": "hierarchical_memory_limit 300000000\ntotal_active_file 20000000\n",
    }
    assert container(reader(files)) == Container(300_000_000, 200_000_000)


@given(st.text(max_size=200), st.text(max_size=50))
def test_whatever_stands_in_those_files_nothing_breaks(cgroup: str, number: str):
    container(lambda path: cgroup if path == "/proc/self/cgroup" else number)


def test_gpus_are_told_from_what_computes_beside_them():
    assert gpus_among([CPU, BLAS]) == []
    assert gpus_among([CPU, BLAS, CUDA]) == [CUDA]
    assert gpus_among([CPU, METAL]) == [METAL]


def test_a_gpu_that_two_interfaces_list_counts_once():
    assert gpus_among([CUDA, VULKAN, CPU]) == [CUDA]
    one, other = (replace(CUDA, description=text, id="0000:01:00.0") for text in ("RTX 4060", "GeForce"))
    assert gpus_among([one, replace(other, backend="Vulkan")]) == [one]


def test_two_equal_gpus_are_two_on_either_interface():
    second = replace(CUDA, name="CUDA1")
    assert gpus_among([CUDA, second, VULKAN, replace(VULKAN, name="Vulkan1")]) == [CUDA, second]
    cards = [replace(CUDA, id="0000:01:00.0"), replace(second, id="0000:02:00.0")]
    assert gpus_among([*cards, *(replace(card, backend="Vulkan") for card in cards)]) == cards


def test_an_integrated_gpu_counts_only_where_llama_cpp_uses_it():
    assert gpus_among([CPU, INTEGRATED]) == [INTEGRATED]
    assert gpus_among([CUDA, INTEGRATED]) == [CUDA]
    assert gpus_among([INTEGRATED, replace(INTEGRATED, name="SYCL0", backend="SYCL")]) == [INTEGRATED]


def test_other_machines_and_gpus_of_unknown_memory_have_nothing_to_offer():
    assert gpus_among([replace(CUDA, backend="RPC"), replace(CUDA, memory_bytes=0)]) == []


def test_memory_is_shared_by_integrated_gpus_and_apple_s():
    assert INTEGRATED.shares_memory
    assert METAL.shares_memory
    assert not CUDA.shares_memory
    assert backend_name("MTL") == "Metal"
    assert backend_name("CUDA") == "CUDA"


def test_what_is_free_is_offered_but_for_a_share_of_the_machine_and_what_the_stage_will_need():
    memory, vram = offered(Owner(), 32 * GB, 20 * GB, 100_000_000, Container(), [])
    assert memory == 20 * GB - round(MACHINE_SHARE * 32 * GB) - OWN_GROWTH_BYTES
    assert vram == 0


def test_the_owner_s_limit_is_for_the_whole_program():
    memory, _ = offered(Owner(max_memory_gb=4), 32 * GB, 20 * GB, 100_000_000, Container(), [])
    assert memory == 4 * GB - 100_000_000 - OWN_GROWTH_BYTES


def test_a_container_s_limit_counts_and_not_its_machine():
    box = Container(200_000_000, 150_000_000)
    memory, _ = offered(Owner(), 32 * GB, 20 * GB, 100_000_000, box, [])
    assert memory == 150_000_000 - OWN_GROWTH_BYTES


def test_a_device_without_room_offers_next_to_nothing_and_not_nothing_known():
    memory, _ = offered(Owner(), 32 * GB, GB, 0, Container(), [])
    assert memory == 1


def test_gpu_memory_of_its_own_is_beside_the_main_memory_and_limited_by_its_owner():
    _, free = offered(Owner(), 32 * GB, 20 * GB, 0, Container(), [CUDA])
    assert free == round(7 * GB * 0.94)
    _, limited = offered(Owner(max_vram_gb=5), 32 * GB, 20 * GB, 0, Container(), [CUDA])
    assert limited == 5 * GB
    _, pooled = offered(Owner(max_vram_gb=5, vram_pool_gb=3), 32 * GB, 20 * GB, 0, Container(), [CUDA])
    assert pooled == 3 * GB


def test_a_gpu_in_the_main_memory_takes_its_part_from_there():
    whole, _ = offered(Owner(), 16 * GB, 12 * GB, 0, Container(), [])
    memory, vram = offered(Owner(max_vram_gb=6), 16 * GB, 12 * GB, 0, Container(), [METAL])
    assert vram == 6 * GB
    assert memory + vram == whole


@given(
    st.floats(0.01, 64),
    st.integers(0, 64 * GB),
    st.integers(0, 64 * GB),
    st.sampled_from([CUDA, METAL, INTEGRATED]),
)
def test_never_more_is_offered_than_there_is(limit: float, total: int, own: int, gpu: BackendDevice):
    memory, vram = offered(Owner(max_memory_gb=limit), total, total // 2, own, Container(), [gpu])
    assert memory >= 0
    assert vram >= 0
    if gpu.shares_memory:
        assert memory + vram <= max(1, min(total // 2, limit * GB))


def test_this_machine_says_what_it_has(smollm2_path: Path):
    can = capabilities(1, Owner(), [smollm2_path])
    assert can.cores >= 1
    assert can.memory_bytes >= can.free_memory_bytes > 0
    assert 0 < can.offered_bytes <= can.free_memory_bytes
    assert can.features
    assert can.llama
    assert can.system
    assert default_threads() >= 1


def test_a_file_that_is_not_there_or_tiny_has_no_disk_speed(tmp_path: Path):
    assert disk_speed(tmp_path / "none") == 0.0
    (tmp_path / "tiny").write_bytes(b"x")
    assert disk_speed(tmp_path / "tiny") == 0.0


def test_the_speed_of_a_disk_is_not_that_of_a_file_held_in_memory(smollm2_path: Path):
    with smollm2_path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as held:
        assert (
            sum(held[at] for at in range(0, len(held), mmap.PAGESIZE)) > 0
        )  # every page is in memory and mapped
        assert not _dropped(file.fileno(), 0, len(held))
        assert _read_speed(file.fileno(), dropping=True) == 0.0


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError, NotImplementedError])
def test_a_system_without_power_supplies_says_nothing_of_power(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    def sensors() -> None:
        raise error

    monkeypatch.setattr(psutil, "sensors_battery", sensors, raising=False)
    assert capabilities(1, Owner(), [], llama=False).power == ""


def test_llama_cpp_s_own_list_has_this_processor():
    found = [device for device in _devices(library().folder) if device.kind == 0]
    assert [device.backend for device in found] == ["CPU"]
    assert found[0].memory_bytes == psutil.virtual_memory().total


@pytest.mark.root
def test_a_real_memory_limit_of_this_process_is_seen():
    with memory_limit(900_000_000) as group:
        group.add(os.getpid())
        box = memory_limits()
        assert box.memory_bytes == pytest.approx(900_000_000, rel=0.01)
        assert 0 < box.free_bytes < box.memory_bytes
        assert free_memory_bytes() < box.memory_bytes
    assert memory_limits().memory_bytes != box.memory_bytes
