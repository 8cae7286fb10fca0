"""Every environment variable that Lamina reads."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from lamina.netstack.contract.cluster_key import KEY, KEY_FILE
from lamina.netstack.contract.cluster_key import cluster_key as given_key
from lamina.netstack.schemes import PLUGINS as TRANSPORTS

LEASE_BYTES = "LAMINA_LEASE_BYTES"
LEASE_METER = "LAMINA_LEASE_METER"
LOG_JSON = "LAMINA_LOG_JSON"
PACKED = "LAMINA_PACKED_WEIGHTS"
# name -> what it is for; where a flag says the same, the flag wins
VARIABLES = {
    KEY: "the key that peers of a cluster share, hexadecimal, 16 bytes or more; default: a fresh one for each run",
    KEY_FILE: "a file with that key; it is refused if others than its owner may touch it",
    "LAMINA_API_KEY": "keys of the server, separated by commas, one of which a client must send (`--api-key`)",
    "LAMINA_ADMIN_KEY": "the admin key, for `lamina-launch scale`, `drain` and `cordon` (`--admin-key`)",
    "LAMINA_TRACE": "write a trace of the run to this file (`--trace`)",
    TRANSPORTS: "more transports, such as those of tests: NAME=MODULE,..., modules in PYTHONPATH",
    "LAMINA_EMULATE": 'times of emulated devices, such as `{"slice_s": [0.01]}`; see `lamina.utils.emulated_device`',
    "LAMINA_MEDIA": "more KV storage, such as that of tests: NAME=MODULE,..., modules in PYTHONPATH",
    "LAMINA_RDMA_DEVICE": "this host's RDMA device; `--rdma-device` names the same one for all hosts",
    "LAMINA_RDMA_TRAFFIC_CLASS": "the traffic class of RoCE packets, 0 to 255: DSCP * 4 + ECN; default: 0",
    "LAMINA_RDMA_SERVICE_LEVEL": "InfiniBand packets' service level, 0 to 15, or RoCE's priority, 0 to 7; default: 0",
    "LAMINA_RDMA_PARTITION": "the key of an InfiniBand partition, such as 0x8001; default: the first of the port",
    "LAMINA_RDMA_TIMEOUT": "n: without an answer a packet is sent again after 4.096 us * 2^n; default: 14, 67 ms",
    "LAMINA_CUDA_DEVICE": "the number of the GPU that transports cuda and mlx5 use; default: the worker's own, or 0",
    "LAMINA_LIBCUDA": "the CUDA driver's library, where it is not found by its name; tests put another in its place",
    "LAMINA_LIBCRYPTO": "OpenSSL's libcrypto, which encrypts what leaves a host, where it is not found by its name",
    "LAMINA_LIBNCCL": "NCCL's file `DIR/lib/libnccl.so`, where it is not found by its name; headers: `DIR/include`",
    "LAMINA_NVCC": "nvcc, which compiles kernels with NCCL's headers, where it is not found by its name",
    "LAMINA_LIBNVRTC": "the library that compiles CUDA kernels, where it is not found by its name",
    LOG_JSON: "1: commands and the processes that Lamina starts log JSON, as with `serve --log-json`",
    "LAMINA_CACHE": (
        "folder of traced models and kernels, where an empty value or a relative path turns caching off; "
        "default: `~/.cache/lamina`"
    ),
    LEASE_BYTES: "set by `lend` for the memory workers that it starts: the most KV memory that one may take",
    LEASE_METER: "set by `lend` for memory workers on loan: the descriptor by which one reports how much it has read",
    PACKED: "set by a launcher for its workers: the memory file in which those of one host share packed weights",
    "LAMINA_TRIPWIRE": "set by `drill` and `check` for workers: a file that makes a worker exit at a given message",
    "LAMINA_BENCH_LIFE_LINE": "set by `bench` for its servers: a descriptor that closes when `bench` ends",
}


def lease_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """The KV memory that was lent to this process, in bytes; 0: none was."""
    return int(environ.get(LEASE_BYTES, 0))


def lease_meter(environ: Mapping[str, str] = os.environ) -> int | None:
    """The descriptor to which this process reports how much it has read; None: no memory was lent to it."""
    return int(environ[LEASE_METER]) if LEASE_METER in environ else None


def cluster_key(environ: Mapping[str, str] = os.environ) -> bytes:
    """The key of the environment or its file, else 32 fresh random bytes. Raises ValueError for an unusable one."""
    return given_key(environ) or secrets.token_bytes(32)
