"""SmolLM2-135M-Instruct on real prompts: `precise` float32 logits beside those of transformers, and what float32 can tell."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from rljax.backends.jax import hf
from tests.shared import convert_smollm2, shared

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BOUND = 1e-4  # max abs of float32 logits
PLAIN = (
    "The capital of France is",
    "What is 12+30?",
    "def fib(n):\n    if n < 2:\n        return n\n",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "1 2 3 4 5 6 7 8 9 10 11 12",
    "Water boils at 100 degrees Celsius because",
    "# Notes\n\n- one\n- two\n- three\n",
    "SELECT name, age FROM people WHERE age > 30 ORDER BY",
    "import numpy as np\n\nclass Matrix:\n    def __init__(self, rows):\n",
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    return convert_smollm2(tmp_path_factory.mktemp("smollm2"))


def prompts(tokenizer):
    """45 of 5 to 300 tokens: through the chat template, GSM8K with answers, plain text, several problems in a row."""
    records = [json.loads(line) for line in (shared("data/gsm8k") / "test.jsonl").read_text().splitlines()]
    chosen = [records[i] for i in np.random.default_rng(0).choice(len(records), 40, replace=False)]
    questions = [record["question"] for record in chosen]

    def chat(text):
        messages = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    solved = ["\n".join((record["question"], record["answer"])) for record in chosen[14:26]]
    several = ["\n".join(questions[i : i + 3]) for i in range(26, 38, 3)]
    texts = [*solved, *PLAIN, *several]
    return [chat(text) for text in (*questions[:14], *PLAIN[:6])] + [tokenizer(text)["input_ids"][:300] for text in texts]


def reference(path, dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)

    def logits(token_ids):
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0].double().numpy()

    return logits


def ours(path):
    graphdef, params = hf.load(path, precise=True)

    @jax.jit
    def run(params, token_ids, positions):
        model = nnx.merge(graphdef, params)
        return model.logits(model(token_ids, positions))

    def logits(token_ids):
        padded = np.zeros((1, -(-len(token_ids) // 64) * 64), np.int32)  # few shapes to compile; no token sees a later one
        padded[0, : len(token_ids)] = token_ids
        return np.asarray(run(params, padded, np.arange(padded.shape[1])[None]))[0, : len(token_ids)]

    return logits


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_precise_logits_agree_wherever_float32_can_tell(smollm2):
    """To 1e-4, on 40 prompts at least; and nowhere farther than transformers' own float32 is from its own float64."""
    theirs, mine = reference(smollm2, torch.float32), ours(smollm2)
    found = {}
    for token_ids in prompts(transformers.AutoTokenizer.from_pretrained(smollm2)):
        expected = theirs(token_ids)
        found[tuple(token_ids)] = (np.abs(mine(token_ids) - expected).max(), expected)
    beyond = {token_ids: pair for token_ids, pair in found.items() if pair[0] > BOUND}
    assert len(found) - len(beyond) >= 40, sorted(difference for difference, _ in found.values())
    exact = reference(smollm2, torch.float64)
    for token_ids, (difference, expected) in beyond.items():
        assert difference <= np.abs(exact(token_ids) - expected).max()
