"""lm-eval and the chat client of transformers: programs that know a model's text and expect it back."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import MODEL, ROOT, Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000), pytest.mark.usefixtures("client")]
Run, Environment = Callable[..., str], Callable[..., Path]
NEEDS = ("lm_eval[api]", "transformers", "torch==2.13.0", "accelerate")

CHOICES = [
    {"question": "import", "choices": [" os", " def", " )", " =="], "answer": 0},
    {"question": "def f(x):\n    return", "choices": [" x", " import", " class", " :"], "answer": 0},
    {"question": "for i in", "choices": [" range", " else", " import", " def"], "answer": 0},
    {"question": "class Stack", "choices": [":", " range", " return", " in"], "answer": 0},
    {"question": "if __name__ ==", "choices": [" '__main__'", " import", " 0", " self"], "answer": 0},
    {"question": "try:\n    pass\nexcept", "choices": [" ValueError", " try", " if", " range"], "answer": 0},
]
TASKS = {
    "lamina_choice": """
task: lamina_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "lamina_text": """
task: lamina_text
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def scores(folder: Path) -> dict[str, Any]:
    """Returns the score, and for each question the answer."""
    (results,) = folder.rglob("results_*.json")
    found = {"results": json.loads(results.read_text())["results"]}
    for name in TASKS:
        (samples,) = folder.rglob(f"samples_{name}_*.jsonl")
        found[name] = [json.loads(line)["filtered_resps"] for line in samples.read_text().splitlines()]
    return found


@pytest.mark.client("lm-eval")
def test_scores_are_those_of_transformers(server: Running, environment: Environment, run: Run, tmp_path: Path) -> None:
    program = environment("lm-eval", *NEEDS) / "lm_eval"
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHOICES))
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(task.replace("DATA", str(tmp_path / "data.jsonl")))
    model = str(ROOT / MODEL)
    wire = f"model=tiny,base_url={server.url}/v1/completions,num_concurrent=4,max_length=2048,"
    wire += f"tokenizer_backend=huggingface,tokenizer={model}"
    both = {"local-completions": wire, "hf": f"pretrained={model},dtype=float32,max_length=2048"}
    found = {}
    for kind, arguments in both.items():
        run(
            program, "run", "--model", kind, "--model_args", arguments, "--include_path", tmp_path, "--tasks",
            ",".join(TASKS), "--log_samples", "--output_path", tmp_path / kind,
            HF_DATASETS_OFFLINE="1", OMP_NUM_THREADS="1",
        )  # fmt: skip
        found[kind] = scores(tmp_path / kind)
    ours, theirs = found["local-completions"], found["hf"]
    for name in TASKS:
        for metric, value in theirs["results"][name].items():
            if isinstance(value, float):
                assert ours["results"][name][metric] == value, (name, metric)
    assert ours["lamina_text"] == theirs["lamina_text"]
    for mine, reference in zip(ours["lamina_choice"], theirs["lamina_choice"], strict=True):
        assert [greedy for _, greedy in mine] == [greedy for _, greedy in reference]
        assert [float(x) for x, _ in mine] == pytest.approx([float(x) for x, _ in reference], abs=1e-3)


@pytest.mark.client("transformers chat")
def test_transformers_chat(server: Running, environment: Environment, tmp_path: Path) -> None:
    program = environment("lm-eval", *NEEDS) / "transformers"
    words = "Write a class.\nn\n!exit\n"  # "n": where an answer was cut off, do not go on
    done = subprocess.run(
        [str(program), "chat", "tiny", f"{server.url}/v1", "max_new_tokens=12"], cwd=tmp_path, input=words,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "COLUMNS": "200"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    _, _, answer = done.stdout.partition("<tiny>:")
    assert answer.strip()
    assert "tokens in" in answer or "tok/s" in answer or len(answer.strip()) > 3
