"""The command line: flags come from the configuration, bad input is one line and exit status 2.

Covers: lamina/cli/generate.py.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lamina.cli.generate import DEFAULTS
from lamina.cli.launch import COMMANDS, main
from lamina.config.flag_groups import flag_name
from lamina.config.flat_options import OPTIONS, make_config
from lamina.config.option import parse_size, size_flag
from lamina.executor.launchers import zygote_client
from lamina.executor.load_balance import weights_of
from lamina.netstack import SCHEMES
from lamina.netstack.doctor import opens
from lamina.request import SamplingParams
from lamina.server.engine_client import launch
from lamina.server.engine_client.messages import StartEngine

MODEL = str(Path(__file__).resolve().parents[2] / "examples" / "tiny_lm" / "model")
STARTERS = (["generate", MODEL, "--prompt", "x"], ["serve", MODEL, "--port", "0"], ["bench", "decode", MODEL])


def test_print_config_is_what_a_run_would_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "m", "--memory-workers", "4", "--no-overlap", "--print-config"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["memory_workers"] == 4
    assert printed["overlap"] is False
    flags = {"attention": "attention_backend", "kv_memory": "kv_cache_memory_bytes"}
    assert set(printed) == {"model", *(flags.get(f.name, f.name) for f in OPTIONS.values())}


def test_every_option_has_a_flag_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help=all"])
    text = capsys.readouterr().out
    words = [re.split("[ :,]", flag_name(name)) for name in OPTIONS]  # a flag, and perhaps a mode and a key
    assert [each for each in words if not all(re.search(rf"(?<![\w-]){re.escape(word)}", text) for word in each)] == []


def test_generate_says_what_it_does_without_flags_and_that_the_api_does_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    help = " ".join(capsys.readouterr().out.split())
    assert "0 = greedy (default: 0.0)" in help
    assert f"the most tokens of a completion (default: {DEFAULTS.max_tokens})" in help
    assert f"SamplingParams draws at temperature {SamplingParams().temperature}" in help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_helps(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    assert "--dry-run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate", "no/such/model", "--prompt", "x"], "no/such/model"),
        (["generate", "no/such/model", "--prompt", "x", "--dry-run"], "no/such/model"),
        (["generate", "m"], "--prompt"),
        (["generate", "m", "--prompt", "x", "--memory-workers", "0"], "--memory-workers"),
        (["generate", "m", "--prompt", "x", "--threads", "compute=100000"], "--threads compute="),
        (["generate", "m", "--prompt", "x", "--kv-cache-memory-bytes", "9 bananas"], "--kv-cache-memory-bytes"),
        (["generate", "m", "--prompt", "x", "--temperature", "nan"], "temperature"),
        (["generate", "m", "--prompt", "x", "--n", "0"], "--n must be at least 1"),
        (["generate", "m", "--prompt", "x", "--max-tokens", "0"], "--max-tokens must be at least 1"),
        (
            ["generate", "m", "--prompt", "x", "--min-tokens", "99"],
            "--min-tokens must be less than or equal to --max-tokens 64, not 99",
        ),
        (["generate", "m", "--prompt", "x", "--sampling-seed", "-2"], "generate: --sampling-seed must lie in 0.."),
        (["generate", "m", "--prompt", "x", "--stop", ""], "generate: --stop must not contain an empty string"),
        (["generate", MODEL, "--prompt", "x", "--transport", "shmm"], "--transport: unknown transport 'shmm'"),
        (["generate", "m", "--prompt", "x", "--logprobs", "2"], "--logprobs needs --json"),
        (["generate", "m", "--prompt", "x", "--block-size", "48"], "--block-size"),
        (
            ["generate", MODEL, "--prompt", "x", "--kv-cache-memory-bytes", "9999999GB"],
            "--kv-cache-memory-bytes 9999999GB on 2 memory workers: KV",
        ),
        (["generate", "", "--prompt", "x"], "model is empty"),
        (["generate", "", "--prompt", "x", "--dry-run"], "model is empty"),
        (["generate", MODEL, "--prompt", "x", "--prompt", ""], "--prompt '' is empty"),
        (["generate", MODEL, "--prompt", "x", "--prompt", "", "--dry-run"], "--prompt '' is empty"),
        (["generate", MODEL, "--prompt", "x " * 9, "--max-model-len", "9"], "tokens; at most 8 fit"),
        (["generate", MODEL, "--prompt", "x " * 9999], "tokens; at most 2047 fit"),
        (["generate", MODEL, "--prompt", "caf\udce9"], r"prompt 'caf\udce9' is not UTF-8 at character 3"),
        (["generate", "m", "--prompt-file", "no/such/file"], "generate: no/such/file: No such file or directory"),
        (["timeline", "no/such/file"], "timeline: no/such/file: No such file or directory"),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_bad_input_is_one_line_and_status_2(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("standard_input", [False, True])
def test_a_file_of_prompts_is_utf_8(
    standard_input: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(b"one\ncaf\xe9\n")
    with path.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["generate", MODEL, "--prompt-file", "-" if standard_input else str(path)]) == 2
    assert "--prompt-file" in (err := capsys.readouterr().err)
    assert err.endswith("is not UTF-8: byte 0xe9 at 7\n")


def test_ctrl_c_while_modules_are_imported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lamina.cli.launch.import_module", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr("subprocess.Popen", refuse)


@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["serve", "--port", "0"], ["bench", "decode"]])
@pytest.mark.usefixtures("nothing_starts")
def test_a_directory_without_a_model_is_told_before_anything_starts(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(tmp_path)]) == 2
    assert "it has no config.json" in capsys.readouterr().err


@pytest.mark.long(but=["generate-flags0---transport", "generate-flags1---attention-backend", "serve-flags5-"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--transport", "pigeon"], "--transport"),
        (["--attention-backend", "magic"], "--attention-backend"),
        (["--max-model-len", "99999"], "--max-model-len"),
        (["--memory-weights", "1,1000"], "would get nothing of 4 KV heads"),
        (["--kv-cache-memory-bytes", "9999999GB"], "are free here: lower --kv-cache-memory-bytes below"),
        ([], ""),
    ],
)
@pytest.mark.parametrize("command", STARTERS, ids=lambda c: c[0])
def test_dry_run_checks_without_starting(
    command: list[str], flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--dry-run", *flags]) == (2 if flags else 0)
    printed = capsys.readouterr()
    assert words in printed.err
    assert ("would start 1 compute worker and 2 memory workers over shm" in printed.out) == (not flags)


@pytest.mark.parametrize("command", [["serve"], ["generate", "--prompt", "x"]], ids=lambda c: c[0])
def test_a_dry_run_imports_torch_for_a_model_that_is_there_alone(command: list[str]) -> None:
    """The import takes seconds: a mistyped path, or a missing part of a transport, is reported at once."""
    code = "import sys; from lamina.cli.launch import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    words = [sys.executable, "-c", code, *command, "no/such/model", "--dry-run"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2 False\n"
    assert "no such model directory: no/such/model" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-offload", "dir=no/such/kv"], "--kv-offload dir=no/such/kv: it cannot be made in "),
        (["--kv-offload", f"dir={Path(__file__).parent}"], "and KV reveals prompts: chmod 700 "),
        (["--kv-offload", "dir=kv,key=no/such"], "--kv-offload key=no/such: No such file or directory"),
        (
            ["--partition", "spill", "--kv-cache-memory-bytes", "2MiB"],
            "tokens together, not of 2048: raise --kv-cache-memory-bytes, or lower",
        ),
        (["--prefill-pipeline", "2"], "--prefill-pipeline needs --prefill-workers, because it divides"),
    ],
)
def test_dry_run_refuses_what_a_start_would(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", MODEL, "--dry-run", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not list(tmp_path.iterdir()), "it makes nothing"


def test_dry_run_reads_a_store_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "kv"
    store.mkdir(0o700)
    command = ["serve", MODEL, "--dry-run", "--kv-offload", f"dir={store}"]
    assert main(command) == 0
    (store / "secret").write_text("no secret")
    (store / "secret").chmod(0o600)
    assert main(command) == 2
    assert "a secret is 64 hexadecimal digits" in capsys.readouterr().err


@pytest.mark.long(but=["loopback"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_dry_run_opens_the_transport(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    ok, cause, _ = opens(scheme)
    assert main([*STARTERS[0], "--transport", scheme, "--dry-run"]) == (0 if ok else 2)
    assert capsys.readouterr().err == ("" if ok else f"lamina-launch generate: {cause}\n")


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--batch-size", "65"], "--max-num-seqs 64"), (["--input-len", "400", "--max-model-len", "450"], "at most 450")],
)
def test_dry_run_of_bench_decode_knows_what_cannot_be_timed(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*STARTERS[2], "--dry-run", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_serve_tells_where_it_cannot_listen(dry: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", MODEL, "--port", str(port), *dry]) == 2
    printed = capsys.readouterr()
    place = f"cannot listen on --host 127.0.0.1 --port {port}"
    assert (printed.out, printed.err) == ("", f"lamina-launch serve: {place}: Address already in use\n")
    assert main(["serve", MODEL, "--uds", "/no/such/s", *dry]) == 2
    assert capsys.readouterr().err == (
        "lamina-launch serve: cannot listen on --uds /no/such/s: /no/such/s.lock cannot be opened: "
        "No such file or directory\n"
    )


def test_dry_run_of_serve_leaves_no_socket(tmp_path: Path) -> None:
    assert main(["serve", MODEL, "--uds", str(tmp_path / "s"), "--dry-run"]) == 0
    assert not list(tmp_path.iterdir())


def test_dry_run_of_serve_looks_for_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", MODEL, "--dry-run", "--ssl-keyfile", "no/such", "--ssl-certfile", "no/such"]) == 2
    assert "--ssl-keyfile no/such" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_starts")
def test_serve_reads_tls_files_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key.pem"
    key.touch(0o600)
    assert main(["serve", MODEL, "--ssl-certfile", "no/cert", "--ssl-keyfile", str(key)]) == 2
    assert capsys.readouterr().err == "lamina-launch serve: --ssl-certfile no/cert: No such file or directory\n"


@pytest.mark.parametrize("key", ["", " ", " , ", "\n"])
@pytest.mark.parametrize("name", ["LAMINA_API_KEY", "LAMINA_ADMIN_KEY"])
def test_a_key_that_is_set_and_blank_is_refused(
    name: str, key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, key)
    assert main(["serve", MODEL, "--host", "0.0.0.0", "--dry-run"]) == 2
    assert capsys.readouterr().err == f"lamina-launch serve: {name} is set and blank: give a key, or unset it\n"


def test_a_key_on_the_command_line_warns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", MODEL, "--api-key", "one", "--print-config"]) == 0
    assert capsys.readouterr().err == "--api-key: other users of this host can see it; set LAMINA_API_KEY instead\n"


def test_the_first_engine_logs_as_the_server_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def note(start: StartEngine) -> None:
        started.append(start.log_level)
        raise OSError("seen")

    monkeypatch.setattr(launch, "launch_engine", note)
    monkeypatch.setattr(zygote_client, "START", SimpleNamespace(get=lambda environment: None))
    assert main(["serve", MODEL, "--port", "0", "--log-level", "error"]) == 2
    assert started == ["error"]


def test_a_tls_key_that_all_users_may_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key.pem"
    key.write_text("")
    key.chmod(0o604)
    assert main(["serve", MODEL, "--dry-run", "--ssl-keyfile", str(key), "--ssl-certfile", str(key)]) == 2
    said = f"--ssl-keyfile {key}: all users of this host may read it (mode 0604): chmod it to 0600"
    assert capsys.readouterr().err == f"lamina-launch serve: {said}\n"


def test_version_and_a_typo_in_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    with pytest.raises(SystemExit) as ended:
        main(["generate", "m", "--prompt", "x", "--maxtokens", "3"])
    assert ended.value.code == 2
    said = "lamina-launch generate: unknown argument --maxtokens (did you mean --max-tokens?)"
    assert capsys.readouterr().err == f"{said}; see lamina-launch generate --help\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["bench", "decode", "m", "--batchsize=8"], "lamina-launch bench decode: unknown argument --batchsize (did"),
        (["serve", "--model", "m"], "unknown argument --model: the model is an argument without a flag; see"),
        (["serve", "m", "--ctx-size", "4096"], "unknown argument --ctx-size (did you mean --max-model-len?); see"),
        (["serve", "m", "--n-predict", "5"], "argument --n-predict: a request's max_tokens says that, or --max"),
        (["serve", "m", "--n-gpu-layers", "2"], "unknown argument --n-gpu-layers; see"),
        (["timeline", "t", "--qqq"], "lamina-launch timeline: unknown argument --qqq; see"),
        (["plan", "simulate", "--rows", "two"], "--rows must be a whole number, not 'two'; see lamina-launch plan sim"),
        (["generate", "m", "--temperature", "hot"], "generate: --temperature must be a number, not 'hot'; see"),
        (["generat"], "lamina-launch: COMMAND 'generat' is unknown (did you mean generate?); see lamina-launch"),
        (["simulate", "--trace", "t"], "lamina-launch: COMMAND 'simulate' is unknown (did you mean plan simulate?)"),
        (["fly"], "lamina-launch: COMMAND 'fly' is unknown (choose one of generate, serve, chat, scale, "),
        (["kv", "verfy", "d"], "lamina-launch kv: action 'verfy' is unknown (did you mean verify?); see"),
        (["bench", "engine"], "lamina-launch bench: BENCHMARK 'engine' is unknown ("),
        (["bench", "serve", "--endpoint", "x"], "--endpoint 'x' is unknown (choose one of "),
        (["serve"], "lamina-launch serve: model is missing; see lamina-launch serve --help"),
        (["kv"], "lamina-launch kv: action, DIR are missing; see"),
        ([], "lamina-launch: COMMAND is missing; see lamina-launch --help"),
    ],
)
def test_what_cannot_be_parsed_is_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("argv", [["timeline", "--help"], ["--help"]])
def test_a_reader_that_leaves_is_no_error(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = os.pipe()
    os.close(theirs)
    with open(ours, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        assert main(argv) == 141
    assert capsys.readouterr().err == ""


def test_pickled_weights_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert main(["generate", str(tmp_path), "--prompt", "x", "--dry-run"]) == 2
    assert "pickled" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("512MB", 512 * 10**6),
        ("1024", 1024),
        ("1.5kib", 1536),
        ("1TiB", 1 << 40),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--kv-cache-memory-bytes") == size


@pytest.mark.parametrize("text", ["", "-1", "0", "4 GiB x", "nan", "4TiBs"])
def test_bad_sizes(text: str) -> None:
    words = re.escape(
        f"--kv-cache-memory-bytes must be a size such as 512MiB or 4GiB (B, KB to TB, KiB to TiB), not {text!r}"
    )
    with pytest.raises(ValueError, match=f"^{words}$"):
        parse_size(text, "--kv-cache-memory-bytes")


@pytest.mark.parametrize(
    ("nbytes", "least", "most"),
    [
        (1 << 20, "1MiB", "1MiB"),
        (2129920, "2.1MiB", "2MiB"),
        ((1 << 30) + 1, "1.1GiB", "1GiB"),
        (1000, "1000B", "1000B"),
        ((1 << 30) - 1, "1024MiB", "1023.9MiB"),
        (7, "7B", "7B"),
    ],
)
def test_a_size_is_told_as_a_flag_takes_it(nbytes: int, least: str, most: str) -> None:
    assert (size_flag(nbytes, least=True), size_flag(nbytes)) == (least, most)
    assert parse_size(most, "--kv-cache-memory-bytes") <= nbytes <= parse_size(least, "--kv-cache-memory-bytes")
    assert size_flag(0) == "0B"


def test_unknown_options_are_errors() -> None:
    with pytest.raises(ValueError, match="block_sise"):
        make_config({"block_sise": 16})


@pytest.mark.parametrize(
    ("rates", "weights"),
    [([50e9, 52e9], [1.0, 1.0]), ([20e9, 60e9], [0.33, 1.0]), ([1e9, 4000e9], [0.1, 1.0]), ([7.0], [1.0])],
)
def test_rates_that_hardly_differ_weigh_the_same(rates: list[float], weights: list[float]) -> None:
    assert weights_of(rates) == weights


def test_options_as_other_libraries_write_them() -> None:
    import torch

    config = make_config({"dtype": torch.bfloat16, "kv_memory": 1 << 30})
    assert (config.model.dtype, config.devices.kv_bytes()) == ("bfloat16", 1 << 30)
    with pytest.raises(ValueError, match="'memory_worker'; did you mean memory_workers"):
        make_config({"memory_worker": 2})


@pytest.mark.long
def test_several_completions_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    generate = ["generate", MODEL, "--prompt", "def f", "--transport", "loopback", "--max-tokens", "4"]
    sampling = ["--logprobs", "1", "--temperature", "0.8", "--min-p", "0.02", "--frequency-penalty", "0.1"]
    assert main([*generate, *sampling, "--n", "2", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    outputs = json.loads(line)["outputs"]
    assert [o["index"] for o in outputs] == [0, 1]
    assert all(len(entry) in (1, 2) for o in outputs for entry in o["logprobs"])  # of itself, if that is the best
    assert main([*generate, "--n", "3"]) == 0
    assert capsys.readouterr().out.count("def f") >= 3
