"""Options are structs: each is declared once, lists are read once, and what travels is what was asked for.

Covers: lamina/config/engine_config.py, lamina/config/flat_options.py, lamina/config/topology.py.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from lamina.cli.launch import main
from lamina.config.engine_config import EngineConfig, KVOptions
from lamina.config.flat_options import OPTIONS, flat_options, make_config, replace_options
from lamina.config.option import options_of
from lamina.config.topology import TopologyOptions
from lamina.protocol.control import StartCompute, StartMemory
from lamina.protocol.step_plan import BindRequest

ASKED: list[dict[str, Any]] = [
    {},
    {"memory_weights": [0.7, 0.3], "memory_addresses": ["127.0.0.1:0", ""], "cores": "0-3,8/4/5"},
    {"memory_weights": "measured", "cores": "auto", "plan": "auto:3", "start_timeout_s": 5},
    {"pipeline": 3, "prefill_workers": 1, "overlap": False, "kv_cache_dtype": "fp8", "kv_memory": "1GiB"},
]


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("memory_weights", "0.7,0.3", (0.7, 0.3)),
        ("memory_weights", [0.7, 0.3], (0.7, 0.3)),
        ("memory_weights", (2, 1), (2.0, 1.0)),
        ("memory_weights", "", ()),
        ("memory_weights", [], ()),
        ("memory_weights", "measured", "measured"),
        ("memory_addresses", "h:1,h:2", ("h:1", "h:2")),
        ("memory_addresses", ["h:1", "h:2"], ("h:1", "h:2")),
        ("memory_addresses", "", ()),
        ("cores", "0-3,8/4", ((0, 1, 2, 3, 8), (4,))),
        ("cores", ["0-3,8", "4"], ((0, 1, 2, 3, 8), (4,))),
        ("cores", [[3, 0, 1], [4]], ((0, 1, 3), (4,))),
        ("cores", "auto", "auto"),
        ("cores", "", ()),
    ],
)
def test_lists_are_lists_however_they_are_written(name: str, written: Any, value: Any) -> None:
    assert flat_options(make_config({name: written}))[name] == value


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_configuration_travels_and_is_made_again_of_flat_names(asked: dict[str, Any]) -> None:
    config = make_config(asked)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    assert make_config(flat_options(config)) == config
    assert make_config(json.loads(json.dumps(flat_options(config)))) == config, "as --print-config prints it"
    assert replace_options(config, {"seed": 7}) == make_config({**asked, "seed": 7})


def test_every_option_is_declared_once() -> None:
    groups = [options_of(field.type) for field in msgspec.structs.fields(EngineConfig)]
    assert sum(map(len, groups)) == len(OPTIONS)
    assert all(option.help for option in OPTIONS.values())


@pytest.mark.parametrize(
    ("struct", "field", "words"),
    [
        (KVOptions, {"kv_cache_dtype": "int3"}, "--kv-cache-dtype must be one of"),
        (KVOptions, {"block_size": 48}, "--block-size must divide 128"),
        (KVOptions, {"overlap": 1}, "Expected `bool`"),
        (TopologyOptions, {"memory_weights": [0.0]}, "--memory-weights must be positive"),
        (TopologyOptions, {"memory_workers": 0}, ">= 1"),
        (TopologyOptions, {"pipeline": 0}, "--pipeline"),
        (TopologyOptions, {"plan": "auto:0"}, "--pipeline"),
    ],
)
def test_what_comes_from_the_wire_is_checked_as_what_is_made_here(
    struct: type[msgspec.Struct], field: dict[str, Any], words: str
) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.msgpack.decode(msgspec.msgpack.encode(field), type=struct)


def test_flags_of_lists(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--memory-weights", "0.7,0.3", "--memory-addresses", "h:1,h:2", "--cores", "0/1,2/3"]
    assert main(["generate", "m", *flags, "--print-config"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["memory_weights"] == [0.7, 0.3]
    assert printed["memory_addresses"] == ["h:1", "h:2"]
    assert printed["cores"] == [[0], [1, 2], [3]]


@pytest.mark.parametrize(
    ("asked", "batches", "replicas"),
    [({"plan": "auto"}, 2, 1), ({"plan": "auto:1"}, 1, 1), ({"plan": "auto:4"}, 4, 3), ({"pipeline": 3}, 3, 2)],
)
def test_batches_that_may_be_chosen_have_their_replicas(asked: dict[str, Any], batches: int, replicas: int) -> None:
    topology = TopologyOptions(**asked)
    assert (topology.max_batches, topology.replicas) == (batches, replicas)
    assert topology.measures_pipeline == topology.measures_weights == ("plan" in asked)


def test_a_plan_measures_the_parts_of_the_work_unless_they_are_given() -> None:
    assert not TopologyOptions(plan="auto", memory_weights=(2.0, 1.0)).measures_weights
    assert not TopologyOptions(plan="auto", memory_workers=2, tensor_parallel_size=2).measures_weights, (
        "each rank has one"
    )
    assert not TopologyOptions(plan="auto", kv_parity=1).measures_weights, "equal parts alone have a parity"
    assert TopologyOptions(memory_weights="measured").measures_weights


@pytest.mark.parametrize("plan", ["auto:", "auto:0", "auto:x", "auto:-1", "auto:\u0663", "fast"])
def test_other_words_for_a_plan_are_refused(plan: str) -> None:
    with pytest.raises(
        ValueError, match=f"--pipeline must be a number, auto, or auto:n for up to n batches, not {plan}"
    ):
        TopologyOptions(plan=plan)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (
            {"pipeline": "auto:3"},
            "--pipeline must be a number of batches, not auto:3, as is plan='auto:3', which measures it",
        ),
        (
            {"pipeline": "auto", "plan": "auto"},
            "--pipeline must be a number of batches, not auto, as is plan='auto', which",
        ),
        (
            {"pipeline": 3, "plan": "auto"},
            "--pipeline auto does not go with --pipeline 2 or more, because it chooses the number of batches",
        ),
        ({"plan": "auto:2000"}, "--pipeline auto:n must be at most 1025, not 2000"),
    ],
)
def test_a_plan_and_a_number_of_batches_do_not_go_together(asked: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}"):
        make_config(asked)


@pytest.mark.parametrize(
    ("message", "resolved"),
    [
        (StartCompute, {"trace"}),  # whether spans are recorded; the option is a file's name
        (StartMemory, {"trace"}),
        (BindRequest, {"dtype", "max_model_len", "partition", "prefill_workers", "prefill_pipeline"}),
    ],
)
def test_messages_embed_the_structs_of_options_and_copy_none(message: type, resolved: set[str]) -> None:
    """``resolved``: fields with an option's name, whose values follow from the model and several options."""
    assert {field.name for field in msgspec.structs.fields(message)} & OPTIONS.keys() == resolved
