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
# name -> what it is for. A flag of the same meaning wins.
VARIABLES = {
    KEY: "the key that processes of a cluster share, hexadecimal, 16 bytes or more; default: a new one for each run",
    KEY_FILE: "a file with that key; Lamina refuses it if other users can read or write it",
    "LAMINA_API_KEY": "API keys of the server, separated by commas; a client must send one of them (`--api-key`)",
    "LAMINA_ADMIN_KEY": "the admin key, for `lamina-launch scale`, `drain` and `cordon` (`--admin-key`)",
    "LAMINA_TRACE": "write a trace of the run to this file (`--trace`)",
    TRANSPORTS: "additional transports, such as those of tests: NAME=MODULE,...; the modules must be in PYTHONPATH",
    "LAMINA_EMULATE": 'times of emulated devices, such as `{"slice_s": [0.01]}`; see `lamina.utils.emulated_device`',
    "LAMINA_MEDIA": "additional KV storage, such as that of tests: NAME=MODULE,...; the modules must be in PYTHONPATH",
    "LAMINA_RDMA_DEVICE": "this host's RDMA device; `--rdma-device` sets one name for all hosts",
    "LAMINA_RDMA_TRAFFIC_CLASS": "the traffic class of RoCE packets, 0 to 255: DSCP * 4 + ECN; default: 0",
    "LAMINA_RDMA_SERVICE_LEVEL": "InfiniBand packets' service level, 0 to 15, or RoCE's priority, 0 to 7; default: 0",
    "LAMINA_RDMA_PARTITION": "the key of an InfiniBand partition, such as 0x8001; default: the port's first partition",
    "LAMINA_RDMA_TIMEOUT": "n: an unanswered packet is sent again after 4.096 us * 2^n; default: 14 (67 ms)",
    "LAMINA_CUDA_DEVICE": "the number of the GPU that transports cuda and mlx5 use; default: the worker's GPU, or 0",
    "LAMINA_LIBCUDA": "file of the CUDA driver's library, instead of `libcuda.so.1`",
    "LAMINA_LIBCRYPTO": "file of OpenSSL's libcrypto, which encrypts messages of hosts, instead of the installed one",
    "LAMINA_LIBNCCL": "file of NCCL, `DIR/lib/libnccl.so`, instead of the installed one; headers: `DIR/include`",
    "LAMINA_NVCC": "nvcc, which compiles kernels with NCCL's headers, instead of the installed one",
    "LAMINA_LIBNVRTC": "file of NVRTC, which compiles CUDA kernels, instead of the installed one",
    LOG_JSON: "1: commands and the processes that Lamina starts log JSON, as with `serve --log-json`",
    "LAMINA_CACHE": (
        "folder of traced models and compiled kernels (default: `lamina` in `$XDG_CACHE_HOME` or `~/.cache`); an empty "
        "value or a relative path turns caching off"
    ),
    LEASE_BYTES: "set by `lend` for its memory workers: the most KV memory that one worker may take",
    LEASE_METER: "set by `lend` for its memory workers: a file descriptor to which they report what they read",
    PACKED: "set by a launcher for its workers: a file in memory with packed weights that workers of a host share",
    "LAMINA_TRIPWIRE": "set by `drill` and `check` for workers: a file that makes a worker exit at a given event",
    "LAMINA_BENCH_LIFE_LINE": "set by `bench` for its servers: a file descriptor that closes when `bench` ends",
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
