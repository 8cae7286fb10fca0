"""Every refusal of options has its one line: what was asked for -> that line, word for word."""

# ruff: noqa: E501 - lines are whole, as users read them

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lamina.cli.preflight import check
from lamina.config import make_config
from lamina.engine.tuning.alone import check_limits
from lamina.server.config import ServerConfig
from lamina.sim.clock import VirtualClock
from lamina.sim.lossless import SimulatedPool

MODEL = str(Path(__file__).resolve().parents[3] / "examples" / "tiny_lm" / "model")

OPTIONS_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"memory_workers": 0}, "--memory-workers must be at least 1, not 0"),
    ({"memory_workers": -1}, "--memory-workers must be at least 1, not -1"),
    ({"memory_workers": 1025}, "--memory-workers must be at most 1024, not 1025"),
    ({"memory_workers": "2"}, "--memory-workers must be of type int, not '2'"),
    ({"memory_workers": 2.0}, "--memory-workers must be of type int, not 2.0"),
    ({"memory_workers": True}, "--memory-workers must be of type int, not True"),
    ({"tensor_parallel_size": 0}, "--tensor-parallel-size must be at least 1, not 0"),
    ({"max_num_seqs": 0}, "--max-num-seqs must be at least 1, not 0"),
    ({"prefill_chunk": 0}, "--prefill-chunk must be at least 1, not 0"),
    ({"block_size": 0}, "--block-size must be at least 1, not 0"),
    ({"prefill_workers": -1}, "--prefill-workers must be at least 0, not -1"),
    ({"prefill_workers": 1025}, "--prefill-workers must be at most 1024, not 1025"),
    (
        {"prefill_kv_memory": "2GiB"},
        "--prefill-kv-memory 2GiB is of prefill workers: say how many by --prefill-workers, or leave it out",
    ),
    ({"prefill_kv_memory": "much"}, "--prefill-kv-memory must be a size such as 512MiB or 4GiB, not 'much'"),
    ({"max_model_len": -1}, "--max-model-len must be at least 0, not -1"),
    ({"memory_sms": -1}, "--memory-sms must be at least 0, not -1"),
    ({"compute_threads": -1}, "--compute-threads must be at least 0, not -1"),
    ({"compute_threads": 1025}, "--compute-threads must be at most 1024, not 1025"),
    ({"memory_threads": -1}, "--memory-threads must be at least 0, not -1"),
    ({"memory_threads": 1025}, "--memory-threads must be at most 1024, not 1025"),
    ({"seed": -1}, "--seed must be at least 0, not -1"),
    ({"start_timeout_s": 0}, "--start-timeout-s must be a positive number of seconds, not 0"),
    ({"start_timeout_s": float("inf")}, "--start-timeout-s must be a positive number of seconds, not inf"),
    ({"start_timeout_s": float("nan")}, "--start-timeout-s must be a positive number of seconds, not nan"),
    ({"step_timeout_s": -1.0}, "--step-timeout-s must be a positive number of seconds, not -1.0"),
    ({"step_timeout_s": "1"}, "--step-timeout-s must be of type float, not '1'"),
    ({"start_timeout_s": True}, "--start-timeout-s must be of type float, not True"),
    ({"overlap": 1}, "--overlap must be of type bool, not 1"),
    ({"overlap": "no"}, "--overlap must be of type bool, not 'no'"),
    ({"dtype": "int3"}, "--dtype must be one of auto, float32, bfloat16, float16, not 'int3'"),
    ({"dtype": None}, "--dtype must be one of auto, float32, bfloat16, float16, not 'None'"),
    ({"kv_cache_dtype": "fp4"}, "--kv-cache-dtype must be one of auto, int8, fp8, not 'fp4'"),
    ({"kv_cache_dtype": 8}, "--kv-cache-dtype must be of type str, not 8"),
    ({"block_size": 48}, "--block-size must divide 128, not 48: use 16, 32 or 64"),
    ({"block_size": 256}, "--block-size must divide 128, not 256: use 16, 32 or 64"),
    ({"kv_memory": "lots"}, "--kv-memory must be a size such as 512MiB or 4GiB, not 'lots'"),
    ({"kv_memory": "0"}, "--kv-memory must be a size such as 512MiB or 4GiB, not '0'"),
    ({"kv_memory": 1.5}, "--kv-memory must be of type str, not 1.5"),
    ({"kv_memory": "-1GiB"}, "--kv-memory must be a size such as 512MiB or 4GiB, not '-1GiB'"),
    ({"kv_memory": 0}, "--kv-memory must be a size such as 512MiB or 4GiB, not '0'"),
    ({"placement": "near"}, "--placement must be one of pack, spread, not 'near'"),
    ({"partition": "tea"}, "--partition must be one of head, token, request, spill, not 'tea'"),
    ({"collective": "ring"}, "--collective must be one of auto, mesh, gloo, nccl, not 'ring'"),
    ({"compute_device": "gpu"}, "--compute-device must be cpu, cuda, cuda:N or auto, not 'gpu'"),
    ({"memory_device": "cuda:x"}, "--memory-device must be cpu, cuda, cuda:N or auto, not 'cuda:x'"),
    ({"memory_device": "cuda:12345"}, "--memory-device must be cpu, cuda, cuda:N or auto, not 'cuda:12345'"),
    (
        {"compute_device": "cuda:1", "tensor_parallel_size": 2},
        "--compute-device cuda:1 is one GPU, and --tensor-parallel-size 2 takes one for each rank: use --compute-device cuda",
    ),
    (
        {"rdma_device": "mlx5_0"},
        "--rdma-device mlx5_0 is for --transport verbs, mlx5, auto: leave it out with --transport shm",
    ),
    (
        {"rdma_device": "mlx5_0", "transport": "gin"},
        "--rdma-device mlx5_0 is for --transport verbs, mlx5, auto: leave it out with --transport gin",
    ),
    (
        {"rdma_device": "mlx5_0:x", "transport": "verbs"},
        "--rdma-device or LAMINA_RDMA_DEVICE is NAME, NAME:PORT or NAME:PORT:GID_INDEX, as in mlx5_0:1:3, not 'mlx5_0:x'",
    ),
    ({"memory_sms": 8}, "--memory-sms 8 is for memory workers on a GPU: leave it out with --memory-device cpu"),
    (
        {"memory_sms": 8, "memory_device": "cpu"},
        "--memory-sms 8 is for memory workers on a GPU: leave it out with --memory-device cpu",
    ),
    ({"pipeline": 0}, "--pipeline must be at least 1, not 0"),
    ({"pipeline": "fast"}, "--pipeline must be a number of batches, not fast"),
    ({"pipeline": "2"}, "--pipeline must be a number of batches, not 2"),
    ({"pipeline": 1026}, "--pipeline must be at most 1025, not 1026"),
    ({"pipeline": 2.5}, "--pipeline must be of type int | str, not 2.5"),
    ({"pipeline": -3}, "--pipeline must be at least 1, not -3"),
    ({"cores": "none"}, "--cores: 'none' is no list of cores; write one for each worker, such as 0-3,8/4-7"),
    ({"cores": "3-1"}, "--cores: '3-1' is no list of cores; write one for each worker, such as 0-3,8/4-7"),
    ({"cores": "0/"}, "--cores: '' is no list of cores; write one for each worker, such as 0-3,8/4-7"),
    ({"cores": "0-3/x,2"}, "--cores: 'x,2' is no list of cores; write one for each worker, such as 0-3,8/4-7"),
    (
        {"memory_weights": "0,0"},
        "--memory-weights must be positive numbers by comma, such as 0.7,0.3, or measured, not '0'",
    ),
    (
        {"memory_weights": "measure"},
        "--memory-weights must be positive numbers by comma, such as 0.7,0.3, or measured, not 'measure'",
    ),
    (
        {"memory_weights": "1,-1"},
        "--memory-weights must be positive numbers by comma, such as 0.7,0.3, or measured, not '-1'",
    ),
    (
        {"memory_weights": "1,inf"},
        "--memory-weights must be positive numbers by comma, such as 0.7,0.3, or measured, not 'inf'",
    ),
    (
        {"memory_weights": "1,nan"},
        "--memory-weights must be positive numbers by comma, such as 0.7,0.3, or measured, not 'nan'",
    ),
    (
        {"memory_weights": "1,,1"},
        "--memory-weights must be positive numbers by comma, such as 0.7,0.3, or measured, not ''",
    ),
    ({"memory_weights": "1,1,1"}, "--memory-weights names 3 weights for --memory-workers 2"),
    (
        {"memory_weights": [1, 0]},
        "--memory-weights must be positive numbers by comma, such as 0.7,0.3, or measured, not '0'",
    ),
    (
        {"memory_weights": [1, "x"]},
        "--memory-weights must be positive numbers by comma, such as 0.7,0.3, or measured, not 'x'",
    ),
    ({"memory_weights": [1.0]}, "--memory-weights names 1 weights for --memory-workers 2"),
    ({"kv_parity": 2}, "--kv-parity must be at most 1, not 2"),
    ({"kv_parity": 1, "partition": "token"}, "--kv-parity 1 needs --partition head"),
    ({"kv_parity": 1, "memory_workers": 1}, "--kv-parity 1 needs --memory-workers 2 or more"),
    ({"kv_parity": 1, "tensor_parallel_size": 2}, "--kv-parity 1 needs --tensor-parallel-size 1"),
    ({"kv_parity": 1, "memory_weights": [1.0, 2.0]}, "--kv-parity 1 needs equal --memory-weights"),
    ({"kv_parity": 1, "kv_cache_dtype": "int8"}, "--kv-parity 1 needs --kv-cache-dtype auto"),
    ({"kv_parity": 1, "kv_offloading_size": "1GiB"}, "--kv-parity 1 needs all KV in the pool"),
    (
        {"kv_parity": 1, "transport": "loopback"},
        "--kv-parity 1 needs --transport shm or tcp, as no thread is replaced",
    ),
    ({"memory_weights": [2, 1, 1], "memory_workers": 2}, "--memory-weights names 3 weights for --memory-workers 2"),
    ({"memory_addresses": "127.0.0.1:0"}, "--memory-addresses names 1 places for --memory-workers 2"),
    ({"memory_addresses": "a:1,b:2,c:3"}, "--memory-addresses names 3 places for --memory-workers 2"),
    (
        {"memory_addresses": "h:7,h:7"},
        "--memory-addresses names h:7 twice: each memory worker needs a place of its own",
    ),
    (
        {"memory_addresses": ["h:7", "h:7"]},
        "--memory-addresses names h:7 twice: each memory worker needs a place of its own",
    ),
    ({"memory_addresses": ["h:7"]}, "--memory-addresses names 1 places for --memory-workers 2"),
    (
        {"tensor_parallel_size": 2, "memory_workers": 3},
        "--tensor-parallel-size 2: each rank has memory workers of its own, as many as the others: use --memory-workers 2 or 4, not 3",
    ),
    (
        {"tensor_parallel_size": 3},
        "--tensor-parallel-size 3: each rank has memory workers of its own, as many as the others: use --memory-workers 3 or 6, not 2",
    ),
    (
        {"tensor_parallel_size": 2, "prefill_workers": 1},
        "--prefill-workers have all weights: use 0 with --tensor-parallel-size > 1",
    ),
    (
        {"tensor_parallel_size": 2, "memory_weights": "2,1"},
        "--memory-weights 2,1: memory worker w is rank w mod 2's (--tensor-parallel-size), and every rank must have the same weights in the same order",
    ),
    (
        {"tensor_parallel_size": 2, "memory_workers": 4, "memory_weights": [2.0, 1.0, 2.0, 1.0]},
        "--memory-weights 2,1,2,1: memory worker w is rank w mod 2's (--tensor-parallel-size), and every rank must have the same weights in the same order",
    ),
    (
        {"ray_address": "auto", "transport": "loopback"},
        "--transport: loopback stays in one process: choose another transport for workers on other hosts",
    ),
    (
        {"ray_address": "auto", "transport": "emulate+loopback?latency_ms=1"},
        "--transport: loopback stays in one process: choose another transport for workers on other hosts",
    ),
    (
        {"ray_address": "auto", "memory_addresses": "h:1,h:2"},
        "--memory-addresses are for this machine: over --ray-address hosts have theirs from Ray",
    ),
    ({"ray_address": "auto", "memory_addresses": "h:1"}, "--memory-addresses names 1 places for --memory-workers 2"),
    (
        {"ray_address": "auto", "cores": "auto"},
        "--cores are of this machine: over --ray-address Ray gives workers theirs",
    ),
    (
        {"ray_address": "auto", "cores": "0/1/2"},
        "--cores are of this machine: over --ray-address Ray gives workers theirs",
    ),
    (
        {"ray_address": "auto", "compute_device": "auto"},
        "--compute-device auto is for this machine: over --ray-address say cuda, of which Ray reserves one for each worker, or cpu",
    ),
    (
        {"ray_address": "auto", "memory_device": "auto"},
        "--memory-device auto is for this machine: over --ray-address say cuda, of which Ray reserves one for each worker, or cpu",
    ),
    ({"launcher": "slurm"}, "--launcher must be one of auto, local, ray, static, not 'slurm'"),
    (
        {"launcher": "ray"},
        "--launcher ray needs --ray-address: auto, HOST:PORT, or the YAML of `lamina-launch cluster`",
    ),
    (
        {"launcher": "static", "ray_address": "auto"},
        "--ray-address is for --launcher ray: leave it out with --launcher static",
    ),
    (
        {"launcher": "local", "ray_address": "auto"},
        "--ray-address is for --launcher ray: leave it out with --launcher local",
    ),
    ({"ray_wait_s": 3.0}, "--ray-wait-s is for --launcher ray: leave it out with --launcher auto"),
    ({"ray_address": "auto", "ray_wait_s": -1.0}, "--ray-wait-s must be a number of seconds, not -1.0"),
    ({"ray_address": "auto", "ray_wait_s": float("inf")}, "--ray-wait-s must be a number of seconds, not inf"),
    ({"hosts": "h.yaml"}, "--hosts is for --launcher static: leave it out with --launcher auto"),
    (
        {"ray_address": "auto", "driver_address": "10.0.0.1:7000"},
        "--driver-address is for --launcher static: leave it out with --launcher auto",
    ),
    *(
        (
            {"launcher": "static", "driver_address": bad},
            f"--driver-address must be HOST:PORT, such as 10.0.0.1:7000, not {bad!r}",
        )
        for bad in ("", "10.0.0.1", ":7000", "10.0.0.1:", "10.0.0.1:70000", "10.0.0.1:-1", "::1:7000", "10.0.0.1:x")
    ),
    (
        {"launcher": "static", "transport": "loopback"},
        "--transport: loopback stays in one process: choose another transport for workers on other hosts",
    ),
    (
        {"launcher": "static", "cores": "auto"},
        "--cores are of this machine: start workers elsewhere under taskset",
    ),
    ({"memroy_workers": 2}, "unknown option 'memroy_workers'; did you mean memory_workers?"),
    ({"memory_worker": 2}, "unknown option 'memory_worker'; did you mean memory_workers?"),
    ({"block_sise": 16}, "unknown option 'block_sise'; did you mean block_size?"),
    ({"kv_cache_dtpye": "int8"}, "unknown option 'kv_cache_dtpye'; did you mean kv_cache_dtype?"),
]
MODEL_REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"transport": "pigeon"},
        "--transport: unknown transport 'pigeon'; choose one of loopback, shm, tcp, cuda, mlx5, gin, nic-model, nic-model-proxy, verbs, auto, emulate",
    ),
    (
        {"transport": "emulate+mlx5-proxy?latency_ms=1"},
        "--transport: transport 'mlx5-proxy' is called 'nic-model-proxy' now: a software NIC, for tests; with a ConnectX choose mlx5 or verbs",
    ),
    (
        {"transport": "shm+tcp"},
        "--transport: unknown transport 'shm+tcp'; choose one of loopback, shm, tcp, cuda, mlx5, gin, nic-model, nic-model-proxy, verbs, auto, emulate",
    ),
    (
        {"transport": "emulate+pigeon"},
        "--transport: unknown transport 'pigeon'; choose one of loopback, shm, tcp, cuda, mlx5, gin, nic-model, nic-model-proxy, verbs, auto, emulate",
    ),
    (
        {"attention": "magic"},
        "--attention must be one of auto, native, numba, cuda, flashinfer, reference, emulate, not 'magic'",
    ),
    ({"gemm": "magic"}, "--gemm must be one of auto, native, torch, not 'magic'"),
    (
        {"attention": "flashinfer", "kv_cache_dtype": "int8"},
        "--kv-cache-dtype int8: attention backend 'flashinfer' stores K and V as --dtype alone; use --attention native, numba, cuda, reference or auto",
    ),
    (
        {"trace": "/no/such/dir/x"},
        "--trace /no/such/dir/x cannot be written: No such file or directory; name a file in a folder that exists",
    ),
    ({"max_model_len": 99999}, "--max-model-len 99999 exceeds the model's own limit of 2048 tokens"),
    (
        {"tensor_parallel_size": 3, "memory_workers": 3},
        "--tensor-parallel-size 3 does not divide the model's 4 KV heads: use 1 or 2 or 4",
    ),
    (
        {"kv_parity": 1, "memory_workers": 3},
        "--kv-parity 1: the model's 4 KV heads make no equal parts for --memory-workers 3: use a number that divides them, or leave it out",
    ),
    (
        {"memory_weights": "1,1000"},
        "memory worker 0 of 2 would get nothing of 4 KV heads: use fewer --memory-workers, or weights that differ less",
    ),
    (
        {"kv_memory": "1KiB"},
        "--kv-memory 1KiB on 2 memory workers cannot hold one sequence of 2048 tokens, which takes 2097152 bytes at least: raise it, or lower --max-model-len",
    ),
    (
        {"kv_memory": "1KiB", "memory_workers": 1},
        "--kv-memory 1KiB on 1 memory worker cannot hold one sequence of 2048 tokens, which takes 2097152 bytes at least: raise it, or lower --max-model-len",
    ),
    ({"cores": "0", "transport": "loopback"}, "--cores: with --transport loopback workers are threads of this process"),
    ({"cores": "0/0"}, "--cores lists cores for 2 workers, there are 1 compute + 2 memory workers"),
    ({"cores": "0/0/0/0"}, "--cores lists cores for 4 workers, there are 1 compute + 2 memory workers"),
    ({"cores": "0/0/9999"}, "--cores: core 9999 is not there; this process may use "),
    (
        {"cores": "0/0/9999", "prefill_workers": 1},
        "--cores lists cores for 3 workers, there are 1 compute + 2 memory + 1 prefill workers",
    ),
    (
        {"collective": "nccl", "tensor_parallel_size": 2},
        "--collective nccl is for GPUs, and ranks compute on cpu: use --compute-device cuda, or --collective auto",
    ),
]
# Of an engine that has started, whose steps take 12 ms.
PROMISES_REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"slo_ttft": "10ms"},
        "--slo-ttft 10ms is below what the first token of a prompt of 1 token takes alone, 12ms, the best of 5: raise it",
    ),
    (
        {"slo_ttft": "2s", "slo_tbt": "11ms"},
        "--slo-tbt 11ms is below what a step of one completion takes alone, 12ms, the best of 5: raise it",
    ),
    (
        {"slo_ttft": "1us", "slo_tbt": "1us"},
        "--slo-ttft 0.001ms is below what the first token of a prompt of 1 token takes alone, 12ms, the best of 5: raise it",
    ),
]


@pytest.mark.parametrize(("options", "line"), OPTIONS_REFUSED, ids=str)
def test_options_are_refused_where_they_are_made(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as refused:
        make_config(options)
    assert str(refused.value) == line


@pytest.mark.parametrize(("options", "line"), MODEL_REFUSED, ids=str)
def test_what_the_model_or_the_host_lacks_is_refused_before_a_start(options: dict[str, Any], line: str) -> None:
    with pytest.raises((ValueError, OSError)) as refused:
        check(MODEL, make_config(options))
    assert str(refused.value).startswith(line) if line.endswith("use ") else str(refused.value) == line


@pytest.mark.parametrize(("promised", "line"), PROMISES_REFUSED, ids=str)
def test_what_a_request_alone_does_not_keep_is_not_promised(promised: dict[str, Any], line: str) -> None:
    clock = VirtualClock()
    engine, _ = SimulatedPool(1, 64, 16, 64, 4, chunk=16).engine(clock, lambda load: 0.012)
    with pytest.raises(ValueError) as refused:
        check_limits(engine, ServerConfig(**promised).rules.limits, lambda stage, done, total: None, clock)
    assert str(refused.value) == line
