"""Each host has a directory of pages of its own. What a host has not comes from another one that has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]
SOON_S = 90.0
DRIVER = """
import json
from lamina import LLM, SamplingParams
options = {"memory_workers": 2, "kv_memory": "16MiB", "dtype": "float32", "deterministic": True, "prefill_chunk": 64}
options |= {"launcher": "static", "driver_address": "127.0.0.1:0", "kv_store_dir": "~/kv", "kv_store_size": "1GiB"}
with LLM("examples/tiny_lm/model", **options) as llm:
    prompt = [(7 * i + 3) % 90 + 5 for i in range(300)]
    (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1))
    llm.engine.finish_in_flight()
    logprobs = [[x.logprob for x in each.values()] for each in output.outputs[0].logprobs]
    moved = sum(each.get("kv_peer_bytes", 0.0) for each in llm.stats().values())
    print(json.dumps([output.num_cached_tokens, moved, [output.outputs[0].token_ids, logprobs]]))
"""


def start(environment: dict[str, str], driver_home: Path, homes: list[Path]) -> tuple[int, float, object]:
    """The cached tokens of a start whose memory workers run on the hosts of ``homes``, bytes of KV that came from
    another host, and the answer.
    """
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], cwd=ROOT, env={**environment, "HOME": str(driver_home)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    workers = list[subprocess.Popen[bytes]]()
    try:
        assert driver.stderr is not None
        while len(workers) < 3:
            line = driver.stderr.readline()
            assert line, "the driver has ended"
            if " lamina-launch worker " in line:
                role, number = line.split(" lamina-launch worker ")[1].split()[0].split("-")
                home = homes[int(number)] if role == "memory" else driver_home
                workers.append(subprocess.Popen(line, shell=True, cwd=ROOT, env={**environment, "HOME": str(home)}))
        out, log = driver.communicate(timeout=SOON_S)
        assert driver.returncode == 0, log
        assert [worker.wait(SOON_S) for worker in workers] == [0, 0, 0]
        cached, moved, told = json.loads(out)
        return cached, moved, told
    finally:
        for process in (driver, *workers):
            process.kill()
            process.wait()


def test_what_a_host_has_not_comes_from_another_one(tmp_path: Path) -> None:
    """Two memory workers have two heads each. On hosts that have changed places all of it comes from the other one, on
    the old ones nothing does; and everybody gets the same bits.
    """
    homes = [tmp_path / name for name in ("driver", "one", "other")]
    for home in homes:
        home.mkdir()
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1"}
    environment["LAMINA_CLUSTER_KEY_FILE"] = str(key)
    environment.pop("LAMINA_CLUSTER_KEY", None)
    there, other = homes[1:], homes[:0:-1]
    runs = [start(environment, homes[0], places) for places in (there, other, there)]
    assert [cached for cached, _, _ in runs] == [0, 256, 256]
    assert [moved > 0 for _, moved, _ in runs] == [False, True, False]
    assert all(told == runs[0][2] for _, _, told in runs)
    assert all(any((home / "kv").glob("segment-*")) for home in homes[1:])
    assert not any((homes[0] / "kv").glob("segment-*")), "no memory worker runs there"
    assert (homes[0] / "kv" / "secret").exists()
    assert not any((home / "kv" / "secret").exists() for home in homes[1:])
