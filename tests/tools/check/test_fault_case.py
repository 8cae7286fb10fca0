"""A run in which a worker dies, on an engine that is scripted.

Covers: lamina/tools/check/recorded_llm.py, lamina/tools/check/recording_executor.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_executor import FakeWire

from lamina.config.flat_options import make_config
from lamina.observe.failpoints import Failpoint
from lamina.request import CompletionOutput, RequestOutput, RequestTimes, SamplingParams
from lamina.tools.check.fault_case import FaultRunner, FaultVisibleError
from lamina.tools.check.fault_promises import COMPUTE
from lamina.tools.check.recorded_llm import Interruption


class LateReplica:
    """An LLM whose compute worker 0 dies at the first token. Another one joins at the look of number ``joins_at``."""

    def __init__(self, tripwire: Failpoint, joins_at: int) -> None:
        self._tripwire, self._joins_at, self._looks = tripwire, joins_at, 0
        self.pools = SimpleNamespace(pids={"compute-0": 10, "compute-1": 11})
        config = make_config({"start_timeout_s": 0.5})
        self.engine = SimpleNamespace(config=config, interruptions=[], check_workers=self.check_workers)

    def check_workers(self) -> None:
        self._looks += 1
        if self._looks == self._joins_at:
            self.pools.pids = {"compute-0": 20, "compute-1": 11}

    def stream(self, prompts: Any, params: SamplingParams) -> Any:
        outputs = [RequestOutput(i, None, [1], [CompletionOutput(0)], RequestTimes(0.0)) for i in range(len(prompts))]

        class Stream:
            request_ids = [o.request_id for o in outputs]  # noqa: RUF012

            def __iter__(stream) -> Any:  # noqa: N805
                yield from outputs
                self.pools.pids = {"compute-1": 11}
                self._tripwire.on_fired()
                self.engine.interruptions.append(Interruption([], 1, FakeWire().ready))

            def close(stream) -> None:  # noqa: N805
                return None

        return Stream()


def test_a_replica_that_is_still_loading_when_the_last_token_comes_is_waited_for(tmp_path: Path) -> None:
    tripwire = Failpoint(tmp_path / "tripwire")
    llm = LateReplica(tripwire, joins_at=3)
    run = FaultRunner(llm, tripwire, COMPUTE)  # type: ignore[arg-type]
    assert len(run.generate([[1], [2]], SamplingParams())) == 2
    assert llm.pools.pids == {"compute-0": 20, "compute-1": 11}


def test_a_replica_that_never_joins_is_a_breach(tmp_path: Path) -> None:
    tripwire = Failpoint(tmp_path / "tripwire")
    llm = LateReplica(tripwire, joins_at=-1)
    run = FaultRunner(llm, tripwire, COMPUTE)  # type: ignore[arg-type]
    with pytest.raises(FaultVisibleError, match="compute-0 died, and no process replaced it"):
        run.generate([[1]], SamplingParams())
