"""lm-evaluation-harness: tasks of its own making, so that nothing is downloaded."""

import json

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
TASKS = {
    "choice": "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: '{{label}}'\n"
    "metric_list: [{metric: acc}, {metric: acc_norm}]",
    "rolling": "output_type: loglikelihood_rolling\ndoc_to_target: '{{question}}'\n"
    "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]",
    "generate": "output_type: generate_until\ndoc_to_target: 'x'\n"
    "generation_kwargs: {until: ['\\n', 'zzz'], max_gen_toks: 6, do_sample: false, temperature: 0}\n"
    "metric_list: [{metric: exact_match}]",
}
DOCS = [
    {"question": "The sky is", "choices": [" blue", " a green thing", " loud"], "label": 0},
    {"question": "Zwölf plus eins sind", "choices": [" dreizehn", " zwölf"], "label": 0},
    {"question": "Kimi is", "choices": [" a model", " a lake in the far north"], "label": 1},
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "docs.jsonl").write_text("\n".join(json.dumps(doc) for doc in DOCS), encoding="utf-8")
    for name, rest in TASKS.items():
        text = f"task: {name}\n{COMMON.format(data=folder / 'docs.jsonl')}{rest}\n"
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluate(server, tasks, names, model="local-completions", **arguments):
    path = "chat/completions" if model.endswith("chat-completions") else "completions"
    found = simple_evaluate(
        model=model,
        model_args={"model": server.model, "base_url": f"{server.url}/{path}", "max_retries": 1, **arguments},
        tasks=names,
        task_manager=tasks,
        bootstrap_iters=0,
        apply_chat_template=model.endswith("chat-completions"),
    )
    return {name: [sample["resps"] for sample in found["samples"][name]] for name in names}


def test_likelihoods_are_the_same_however_they_are_asked_for(tiny, tasks):
    names = ["choice", "rolling"]
    # by default the server tokenizes, and the prompts go out as lists of ids
    one = evaluate(tiny, tasks, names)
    assert len(one["choice"]) == len(one["rolling"]) == len(DOCS)
    for more in ({"batch_size": 4}, {"num_concurrent": 3}, {"tokenized_requests": False, "batch_size": 2}):
        other = evaluate(tiny, tasks, names, **more)
        for name in names:
            assert_near(one[name], other[name])


def assert_near(one, other):
    """Compare the nested lists of two runs: numbers up to rounding, the rest exactly."""
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_near(*pair)
    elif isinstance(one, bool) or not isinstance(one, float | int):
        assert str(one) == str(other)
    else:
        assert one == pytest.approx(other, abs=1e-3)


def test_generation(tiny, tasks):
    one = evaluate(tiny, tasks, ["generate"])
    assert one == evaluate(tiny, tasks, ["generate"], batch_size=3)
    assert one == evaluate(tiny, tasks, ["generate"], tokenizer_backend="none", num_concurrent=2)


def test_chat(scripted, tasks):
    model = "local-chat-completions"
    answers = evaluate(scripted, tasks, ["generate"], model, num_concurrent=2, eos_string="<|end_of_msg|>")
    assert answers["generate"] == [[["Hello! How can I help?"]]] * len(DOCS)
