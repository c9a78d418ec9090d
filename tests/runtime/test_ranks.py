"""Many ranks: the same choices as one, the same nets on all, and an end when one is gone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fastbcd
from fastbcd.runs.directory import read_state
from fastbcd.runtime import ranks

CASES = Path(__file__).parents[1] / "helpers" / "rank_cases.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What two ranks, and one, found in every case of rank_cases.py."""
    command = [sys.executable, str(CASES), str(tmp_path_factory.mktemp("ranks"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_collectives(found) -> None:
    first, second = found["collectives"]
    for answer in (first, second):
        assert answer["sum"] == [3, 20]
        assert answer["bits"] == [True, False]
        assert (answer["scalar"], answer["half"]) == (0.0, [2.5])
        assert answer["text"] == ["größer 0", ""]
        assert answer["agreed"] == [[0.5, 1.0], 0, [[2.5]]]
        assert answer["on first"] == "from 0"
        assert answer["same"] == "no error"
        for what in ("other values", "other shape"):
            assert answer[what].startswith(
                "RuntimeError: ranks differ: the digest of the masks.m is "
            )
    assert first["failure"] == "KeyError: 'here'"
    assert second["failure"] == "RuntimeError: rank 0 failed: KeyError: 'here'"


def test_a_plain_loop_with_ddp(found) -> None:
    """Its buffers differ by rank; without DDP the weights do, and are refused by name."""
    for ddp, count, plain, left in found["ddp_loop"]:
        assert (ddp, count) == ("no error", 44)
        assert plain.startswith(
            "RuntimeError: ranks differ: the digest of the weights and masks.0."
        )
        assert plain.endswith("and train it in DistributedDataParallel")
        assert left == 144


def test_only_one_rank_shows_progress(found) -> None:
    first, second = found["progress"]
    assert first == second
    assert first[0] == 30


@pytest.mark.parametrize("case", ["scores", "choices", "untrained", "salient"])
def test_two_ranks_find_what_one_finds(found, case) -> None:
    first, second, alone = found[case]
    assert first == second == alone
    assert len(alone) > 3


def test_real_fine_tuning_leaves_the_ranks_equal(found) -> None:
    first, second, alone = found["trained"]
    assert first == second
    assert first["steps"] == alone["steps"] == 5
    # At the start, and after each of the five steps.
    assert first["compared"].count("the weights and masks") == 6


def test_ranks_refuse_a_large_dataset_alike(found) -> None:
    for said in found["large"]:
        assert "Pairs does not fit into half of the free memory" in said


def test_ranks_that_were_given_different_arguments(found) -> None:
    """Every rank names the first difference; none waits for another."""
    expected = {
        "weights": "the digest of the weights and masks.1.weight is ",
        "labels": "data.digest is ",
        "pixels": "data.digest is ",
        "normalisation": "data.mean is [0.0, 0.0, 0.0] on rank 0 and [0.5, 0.5, 0.5] on",
        "test": "test.digest is ",
        "no test": 'test is null on rank 0 and {"name": ',
        "budget": "settings.budget is 5 on rank 0 and 6 on rank 1",
        "finetune": 'settings.finetune is null on rank 0 and "function ',
        "run_dir": "run_dir is ",
        "engine": "engine is ",
    }
    first, second = found["different"]
    assert first["nothing saved"]
    for name, words in expected.items():
        assert words in first[name], name
        assert first[name] == second[name]


def test_a_rank_that_makes_another_call_is_not_waited_for_without_end(found) -> None:
    assert "rank 0 waited 1 s for the other ranks: they have not made the same" in found["late"][0]


def test_all_ranks_end_with_an_error_of_the_first(found) -> None:
    first, second = found["full_disk"]
    assert "No space left on device" in first
    assert second.startswith("RuntimeError: rank 0 failed: OSError")


def test_a_rank_that_dies_ends_the_run_which_then_resumes_on_one(found) -> None:
    first, second = found["dies"]
    assert second is None
    assert first.startswith(("RuntimeError", "DistBackendError"))
    assert "timed out" not in first.lower()  # it noticed, instead of waiting for rank 1
    assert (found["stood"], found["resumed"]) == (2, 5)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_torchrun_ends_the_others_and_the_run_resumes(tmp_path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    command += [str(CASES), str(tmp_path)]
    options = {"capture_output": True, "text": True, "timeout": 1800}
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    (tmp_path / "die").touch()
    done = subprocess.run(command, env=environment, **options)
    assert done.returncode != 0
    assert "exitcode: -9" in done.stderr, done.stderr
    assert len(read_state(tmp_path / "run").history) == 1
    (tmp_path / "die").unlink()
    done = subprocess.run(command, env=environment, **options)
    assert done.returncode == 0, done.stderr
    assert "resuming the run in" in done.stdout
    assert len(read_state(tmp_path / "run").history) == 5


# ------------------------------------------------------------------------------------ on GPUs


@pytest.mark.parametrize(
    ("device", "size", "backend", "current"),
    [
        ("cuda", 2, "cpu:gloo,cuda:nccl", 1),
        ("cpu", 2, "gloo", 0),
        ("cuda", 4, "gloo", 1),  # more ranks than GPUs
        ("cuda:0", 2, "gloo", 0),  # both on the same GPU
        ("cuda:1", 1, "cpu:gloo,cuda:nccl", 1),
    ],
)
@pytest.mark.filterwarnings("ignore:.*ranks share.*through the host")
def test_the_backend_follows_the_device(gpu, monkeypatch, device, size, backend, current) -> None:
    """Two GPUs; this is the last rank."""
    chosen = []
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: chosen.append(name))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    for name, value in (("RUN_ID", "x"), ("LOCAL_RANK", size - 1), ("LOCAL_WORLD_SIZE", size)):
        prefix = "TORCHELASTIC_" if name == "RUN_ID" else ""
        monkeypatch.setenv(prefix + name, str(value))
    with ranks.joined(device):
        assert chosen == [backend]
        assert torch.cuda.current_device() == current


def test_tensors_of_one_dtype_take_one_collective(gpu, monkeypatch) -> None:
    used = []
    monkeypatch.setattr(ranks, "world", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "all_reduce", lambda t: used.append((t.dtype, t.numel())))
    monkeypatch.setattr(dist, "broadcast", lambda t, src: used.append((t.dtype, t.numel())))
    net = fastbcd.models.resnet20(10, 8, width=4, blocks=1).cuda()
    ranks.agree(net.buffers())
    assert {dtype for dtype, _ in used} == {torch.float32, torch.uint8}
    assert len(used) == 3  # statistics; counters and masks, as bytes


@pytest.mark.parametrize("config", ["cpu:gloo,cuda:nccl", "cuda:nccl"])
def test_collectives_use_the_device_of_the_data(gpu, monkeypatch, config) -> None:
    used = []
    monkeypatch.setattr(ranks, "world", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    monkeypatch.setattr(dist, "all_reduce", lambda t: used.append(t.device))
    monkeypatch.setattr(dist, "broadcast", lambda t, src: used.append(t.device))
    here, there = torch.ones(3), torch.ones(3, device="cuda:1")
    gpu.reset()
    for collective in (ranks.all_sum, ranks.from_first):
        assert collective(there).device == there.device
    assert used == [there.device] * 2
    assert not gpu.counts["h2d"] + gpu.counts["d2h"]
    assert ranks.all_sum(here).device == here.device
    # NCCL alone reads GPU memory only: the tensor goes to the GPU of this rank, and back.
    assert used[2] == (here.device if config.startswith("cpu") else torch.device("cuda:0"))
