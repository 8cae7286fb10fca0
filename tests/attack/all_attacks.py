"""The table of attacks. SECURITY.md says what each of them must not achieve."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import clocks
import endless_bodies
import foreign_names
import full_disk
import local_user
import lying_debtors
import malformed_frames
import model_files
import ray_ports
import silent_connections
import wrong_keys
from by_tests import by_tests
from target import serving, weak
from verdict import Attack, Verdict


def _not_tried(why: str, folder: Path) -> Verdict:
    return Verdict(None, why)


ATTACKS = (
    *(
        Attack(each.__name__.replace("_", "-"), partial(each.attack, server=serving), partial(each.attack, server=weak))
        for each in (endless_bodies, silent_connections, malformed_frames, foreign_names, wrong_keys)
    ),
    Attack("model-files", model_files.attack, partial(model_files.attack, trusts=True)),
    Attack("local-user", local_user.attack, partial(local_user.attack, opened=True)),
    Attack("sockets-of-others", by_tests("tests/netstack/test_shm.py::test_another_user_is_refused")),
    Attack("full-disk", full_disk.attack, partial(full_disk.attack, keeps=False)),
    Attack("clocks", clocks.attack),
    Attack("strangers", by_tests("tests/netstack/bootstrap/test_listener.py")),
    Attack(
        "key-holders-that-lie",
        by_tests(
            "tests/netstack/bytes/test_tcp_flood.py",
            "tests/netstack/test_stalls.py",
            "tests/workers/memory/test_memory_refusals.py",
            "tests/cluster/test_static_agent.py::test_nonsense_from_a_key_holder_costs_one_link",
        ),
    ),
    Attack("lying-debtors", lying_debtors.attack, partial(lying_debtors.attack, cap=lying_debtors.BLOCKS)),
    Attack("lending", by_tests("tests/executor/lending/test_lending_services.py", "tests/lending/test_debt_ledger.py")),
    Attack("ray-ports", ray_ports.attack, partial(ray_ports.attack, auth="disabled")),
    Attack("ray", by_tests("tests/cluster/test_cluster_files.py::test_ray_is_never_joined_without_a_token")),
    Attack("late-verbs-writes", partial(_not_tried, "needs the guest: make test-vm-all")),
)
